"""The data plane: one interface, several implementations."""
