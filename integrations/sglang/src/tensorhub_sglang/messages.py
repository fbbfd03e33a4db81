"""What the server's main process and SGLang's schedulers say to each other about the hub; needs SGLang to be imported.

SGLang sends these as msgpack. Arguments and answers cross as JSON text, so that only plain values can.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class TensorHubCall(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Ask every rank of the engine for one call; `number` names the call in its answer."""

    number: int
    call: str
    arguments: str


class TensorHubReplies(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Answer a call: what every rank says, in order of rank."""

    number: int
    replies: list[str]


hook_custom_types(TensorHubCall, TensorHubReplies)
