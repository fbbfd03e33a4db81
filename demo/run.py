"""Run the demo: `python demo/run.py [--quick] [--megatron | --sglang]`, with the vLLM environment's Python.

A hub, a trainer (this process) and two `vllm serve --weight-source tensorhub` engines: the engines answer prompts, the
trainer learns from the answers and publishes each new version in place, the engines fill themselves from the trainer
and from each other. It ends with proof and exit code 0, or says what was off and exits with 1.

With --megatron the trainer is one of Megatron-Core, four processes in an environment of their own, and an engine of two
ranks follows it (demo/megatron). With --sglang one trainer is followed by a vLLM engine and by SGLang engines, which
have an environment of their own, while one of them is killed and another joins (demo/sglang).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of this folder: the demo's modules are a package
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# Read by torch when it is imported. Waiting threads sleep: this process shares its cores with the engines.
os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", TOKENIZERS_PARALLELISM="false")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import argparse  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
from types import FrameType  # noqa: E402

from demo.account import Account  # noqa: E402
from demo.megatron import profiles as megatron  # noqa: E402
from demo.processes import Children, DemoError, adopt_orphans, descendants, kill_descendants  # noqa: E402
from demo.profiles import FULL, QUICK, Profile  # noqa: E402
from demo.proof import none_left  # noqa: E402
from demo.sglang import profiles as sglang  # noqa: E402

_LIMIT_S = {"full": 1800, "quick": 540, "megatron": 900, "megatron-quick": 540, "sglang": 900, "sglang-quick": 540}
Form = Profile | megatron.Profile | sglang.Profile


def run(profile: Form, folder: Path) -> bool:
    """Run one form of the demo with its files in `folder`; returns whether everything held."""
    account = Account()
    with Children(folder / "logs") as children:
        if isinstance(profile, megatron.Profile):
            from demo.megatron.session import Session as Megatron

            checks = Megatron(profile, folder, children, account).run()
        elif isinstance(profile, sglang.Profile):
            from demo.sglang.session import Session as SGLang

            checks = SGLang(profile, folder, children, account).run()
        else:
            from demo.session import Session  # brings torch

            checks = Session(profile, folder, children, account).run()
    checks.append(none_left(descendants()))
    account.checks(checks[-1:])
    held = all(check.held for check in checks)
    account.end(held)
    return held


def _stop(number: int, _: FrameType | None) -> None:
    if number == signal.SIGALRM:
        raise DemoError("the demo took too long")
    raise SystemExit(128 + number)


def main() -> int:
    """Read the command line and run; returns the exit code."""
    parser = argparse.ArgumentParser(description="A model learns, and engines follow it through TensorHub.")
    parser.add_argument("--quick", action="store_true", help="a tiny local model, or fewer steps: about two minutes")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--megatron", action="store_true", help="Megatron-Core trains on 2 x 2 ranks")
    kinds.add_argument("--sglang", action="store_true", help="a vLLM and SGLang engines follow one trainer")
    parser.add_argument("--keep", action="store_true", help="keep the run's files, logs and checkpoint")
    options = parser.parse_args()
    profile = choose(options)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _stop)
    signal.alarm(_LIMIT_S[profile.name])
    folder = Path(tempfile.mkdtemp(prefix="tensorhub-demo-"))
    (folder / "logs").mkdir()
    held = False
    try:
        held = run(profile, folder)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
    finally:
        signal.alarm(0)
        kill_descendants()
        _tidy(folder, everything=held and not options.keep, weights=not options.keep)
    return 0 if held else 1


def choose(options: argparse.Namespace) -> Form:
    """Return the form that the command line asks for."""
    forms: dict[str, tuple[Form, Form]] = {
        "megatron": (megatron.FULL, megatron.QUICK),
        "sglang": (sglang.FULL, sglang.QUICK),
    }
    full, quick = next((pair for name, pair in forms.items() if getattr(options, name)), (FULL, QUICK))
    return quick if options.quick else full


def _tidy(folder: Path, *, everything: bool, weights: bool) -> None:
    if everything:
        shutil.rmtree(folder, ignore_errors=True)
        return
    if weights:
        for kept in folder.iterdir():
            if kept.name != "logs":
                shutil.rmtree(kept, ignore_errors=True) if kept.is_dir() else kept.unlink()
    print(f"logs: {folder / 'logs'}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
