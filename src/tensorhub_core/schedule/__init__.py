"""Choose which copies a reader reads from; pure."""
