"""Get the demo's models, and take what a disk-less engine may have of them: everything but the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from demo.processes import DemoError

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_TINY_SEED = 1


def smollm2(folder: Path) -> Path:
    """Return the checkpoint of SmolLM2-135M-Instruct; it is kept in the user's cache folder."""
    from tools.pythons import SetupError
    from tools.smollm2 import checkpoint

    try:
        return checkpoint()
    except SetupError as error:
        raise DemoError(str(error)) from None


def tiny(folder: Path) -> Path:
    """Make a two-layer Qwen3 with random weights in `folder`."""
    from tools.tinymodel import make_model

    return make_model(folder / "tiny", "qwen3-tied", _TINY_SEED)


def without_weights(checkpoint: Path, folder: Path) -> Path:
    """Copy config and tokenizer of a checkpoint into the new `folder`, and no weight file."""
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not file.name.startswith("."):
            shutil.copy(file, folder / file.name)
    if not (folder / "config.json").exists():
        raise DemoError(f"{checkpoint} has no config.json")
    return folder
