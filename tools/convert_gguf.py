"""Turn a GGUF file into a Hugging Face checkpoint in bfloat16: `python -m tools.convert_gguf FILE OUT`.

Runs in the vLLM environment, which has transformers, gguf and accelerate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig


def convert(gguf: Path, out: Path) -> None:
    """Write config, tokenizer and safetensors of `gguf` into `out`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
