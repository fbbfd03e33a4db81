"""Logging and counters: what operators and tests can see of a running part."""
