"""Read safetensors, `torch.distributed.checkpoint` and Megatron folders; write safetensors ones."""
