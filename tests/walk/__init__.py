"""The exhaustive walk: every order of events around the real server machine (`python -m tests.walk`)."""
