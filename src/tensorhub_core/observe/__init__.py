"""Logging, counters and progress."""
