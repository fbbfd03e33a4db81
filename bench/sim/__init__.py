"""Simulate fleets on a virtual clock: the real server machine, client machine and schedule over flow-level links."""
