"""The tensorhub command."""
