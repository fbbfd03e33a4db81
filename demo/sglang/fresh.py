"""Ask fresh stock engines, without TensorHub, for temperature-0 answers: one engine for each version.

    python -m demo.sglang.fresh SPEC        with the vLLM environment's Python

SPEC holds a JSON list of [CHECKPOINT, ASK, OUT, DTYPE], for demo/fresh.py. vLLM is imported once, and forked for each.
SGLang's engines are forked too (serving.py) and run `answer`, which does what demo/fresh.py does for vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def answer(checkpoint: str, ask: str, out: str, limits: Mapping[str, Any]) -> None:
    """Load the checkpoint into a stock SGLang and answer; one request at a time, as the engines were asked."""
    import sglang

    engine = sglang.Engine(model_path=checkpoint, log_level="warning", **limits)
    try:
        found = []
        for request in json.loads(Path(ask).read_text(encoding="utf-8")):
            sampling = {
                "max_new_tokens": request["max_tokens"],
                "temperature": 0,
                "ignore_eos": request.get("ignore_eos", False),
            }
            reply = engine.generate(input_ids=request["prompt"], sampling_params=sampling)
            found.append({"token_ids": reply["output_ids"]})
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    finally:
        engine.shutdown()


def main(spec: str) -> None:
    """Answer for each version with a vLLM in a process of its own, one after the other; ends at the first failure."""
    import vllm

    from demo.fresh import main as answer_one

    assert vllm
    for each in json.loads(Path(spec).read_text(encoding="utf-8")):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                answer_one(*each)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status != 0:
            raise SystemExit(f"no answers of {each[0]}, see above")


if __name__ == "__main__":
    main(*sys.argv[1:])
