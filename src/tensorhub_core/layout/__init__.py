"""Describe tensors without addresses and plan how one shard is filled from others; pure."""
