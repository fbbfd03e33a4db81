"""Publish a trainer's weights after every optimizer step."""
