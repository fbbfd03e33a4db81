"""A world of workers around the real server machine, for unit tests, random walks and exhaustive ones."""
