"""Publish a trainer's weights after every optimizer step."""

from tensorhub_megatron.publisher import Publisher, attach_optimizer, parameters_of

__all__ = ["Publisher", "attach_optimizer", "parameters_of"]
