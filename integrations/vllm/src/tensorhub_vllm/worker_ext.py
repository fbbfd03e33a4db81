"""What the API server may ask a rank: added to vLLM's worker class as `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

from tensorhub_core.engine.calls import RankReply, answer
from tensorhub_core.engine.shard import EngineShard
from tensorhub_vllm.loader import ATTRIBUTE


class TensorHubWorkerExtension:
    """Mixed into vLLM's worker: its method belongs to the worker's own thread."""

    def tensorhub(self, call: str, arguments: dict[str, Any] | None = None) -> RankReply:
        """Answer a call of `tensorhub_core.engine.calls`; never raises.

        A rank that raised would make vLLM's executor stop reading the other ranks' replies, and every later call would
        get the replies of the one before.
        """
        return answer(self._tensorhub_shard(), int(getattr(self, "rank", 0)), call, arguments or {})

    def _tensorhub_shard(self) -> EngineShard | None:
        try:
            return getattr(self.get_model(), ATTRIBUTE, None)  # type: ignore[attr-defined]
        except Exception:  # there is no model: then there is nothing of ours either
            return None
