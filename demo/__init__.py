"""The demo: a language model learns by reinforcement while two vLLM engines follow its weights through TensorHub."""
