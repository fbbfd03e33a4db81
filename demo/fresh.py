"""Ask a fresh stock vLLM, without TensorHub, for temperature-0 answers.

    python -m demo.fresh CHECKPOINT ASK OUT DTYPE

ASK holds a JSON list of {"messages", "max_tokens"}, or with token ids {"prompt", "max_tokens"}, and "ignore_eos" if
all of them are wanted; OUT gets a list of {"token_ids", "logprobs"}. One request at a time, as the engines were asked,
so that the same arithmetic runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from demo.serving import ENGINE_LIMITS


def main(checkpoint: str, ask: str, out: str, dtype: str) -> None:
    """Load the checkpoint and answer."""
    from vllm import LLM, SamplingParams

    llm = LLM(checkpoint, **{**ENGINE_LIMITS, "dtype": dtype})
    found: list[dict[str, Any]] = []
    for request in json.loads(Path(ask).read_text(encoding="utf-8")):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=request.get("ignore_eos", False), logprobs=0
        )
        if "messages" in request:
            answers = llm.chat(request["messages"], sampling, use_tqdm=False)
        else:
            answers = llm.generate({"prompt_token_ids": request["prompt"]}, sampling, use_tqdm=False)
        answer = answers[0].outputs[0]
        token_ids = list(answer.token_ids)
        logprobs = [place[token].logprob for place, token in zip(answer.logprobs, token_ids, strict=True)]
        found.append({"token_ids": token_ids, "logprobs": logprobs})
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
