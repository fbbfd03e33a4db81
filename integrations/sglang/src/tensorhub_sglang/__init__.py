"""Prepare SGLang engines to take their weights from TensorHub."""
