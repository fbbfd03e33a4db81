"""Read and write Hugging Face safetensors directories."""
