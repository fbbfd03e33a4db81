"""The reference server as a pure machine: messages in, messages out; no IO, no clock, no chance."""
