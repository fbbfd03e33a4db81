"""TensorHub: versioned weights by reference, moved peer to peer."""
