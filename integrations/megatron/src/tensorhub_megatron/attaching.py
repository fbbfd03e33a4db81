"""Publish the live parameters of a Megatron trainer, on every rank, after every step of its optimizer."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorhub_core import connect
from tensorhub_core.errors import ConfigError
from tensorhub_core.settings import load_settings
from tensorhub_megatron import compat, freshness
from tensorhub_megatron.agreement import Agreement, agreement_of
from tensorhub_megatron.layout import Described, describe
from tensorhub_megatron.modules import require_no_adapters
from tensorhub_megatron.publication import Publication, Registration, Weights
from tensorhub_megatron.publisher import Publisher
from tensorhub_megatron.stepping import stepping

if TYPE_CHECKING:
    import torch

    from tensorhub_core.settings import Settings


def attach(
    model_chunks: Any,
    optimizer: Any,
    *,
    server: str | Sequence[str] | None = None,
    model: str = "policy",
    stream: str | None = None,
    start_version: int = 0,
    every: int = 1,
    hf_config: Any = None,
    extra_names: Mapping[str, str | None] | None = None,
    replica: str = "trainer",
    group: Any = None,
    timeout_s: float | None = None,
    transport: str = "auto",
    settings: Mapping[str, object] | Settings | None = None,
) -> Publisher:
    """Publish a Megatron trainer's weights as `start_version`, and again after every `every`-th optimizer step.

    Call it once on every rank, after DistributedDataParallel and the optimizer are made (they move the parameters) and
    a checkpoint is loaded, with what `get_model()` and `get_megatron_optimizer()` returned. Nothing of the training
    loop changes: `optimizer.step` waits until no engine reads the weights any more, steps, gathers what
    `overlap_param_gather` would gather later, and publishes the next version. An iteration that is skipped (overflow)
    makes no version: the same one is offered again.

    Engines read the parameters in place, as boxes of Hugging Face tensors: nothing is gathered, converted or copied
    here (but small buffers, such as the bias of a router, which change before the step). All ranks are shards of one
    replica, those of every data-parallel group included: shard = rank in `group`, num_shards = its size. What several
    ranks hold is read once, and from whom is least busy, so that all the network cards of the trainer serve. `group`
    (None: all ranks) is for jobs in which other ranks do something else.

    `hf_config` and `extra_names` are `describe()`'s, `server`, `stream`, `transport` and `settings` are
    `tensorhub_core.connect()`'s; on several machines name the server. Parameters that were offloaded and came
    back elsewhere are registered anew; call `unpublish()` before they go and `publish()` when they are back, or readers
    meanwhile fail. `timeout_s` bounds the wait for readers before a step (None: the setting `call_timeout_s`);
    DeadlineExceeded then comes out of `optimizer.step` on *all* ranks, none of which has stepped, and the step may be
    called again. What fails on one rank, here or later, is raised on all.

    Raises ConfigError, RegistrationError for what cannot be described, StateError if the optimizer is attached already,
    and what `connect`, `register` and `publish` raise; nothing stays attached then.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, Sequence) else [model_chunks]
    return attach_weights(
        MegatronWeights(chunks, hf_config, extra_names),
        optimizer,
        names=(model, replica, stream),
        server=server,
        start_version=start_version,
        every=every,
        group=group,
        timeout_s=timeout_s,
        transport=transport,
        settings=settings,
    )


def attach_weights(weights: Weights, optimizer: Any, **how: Any) -> Publisher:
    """Open a publication of these weights and let it follow `optimizer`; called by all ranks of `group`."""
    stepping(optimizer)
    return Publisher(open_publication(weights, **how), optimizer)


def open_publication(
    weights: Weights,
    *,
    names: tuple[str, str, str | None],
    server: str | Sequence[str] | None,
    start_version: int,
    every: int,
    group: Any,
    timeout_s: float | None,
    transport: str,
    settings: Mapping[str, object] | Settings | None,
) -> Publication:
    """Connect as one shard of the trainer's replica, and publish the weights; called by all ranks of `group`.

    `names`: of the model, the replica and the stream. If anything fails on a rank, nothing stays behind on any.
    """
    filled = load_settings(settings)
    wait_s = filled.client.call_timeout_s if timeout_s is None else timeout_s
    numbers: dict[str, Any] = {"start_version": start_version, "every": every, "timeout_s": wait_s}
    Publication(weights, **numbers)  # impossible ones are refused before any wait
    agreement = agreement_of(group, max(filled.client.call_timeout_s, wait_s))
    publication = Publication(weights, **numbers, agreement=agreement)
    model, replica, stream = names
    try:
        _require_one_hub(agreement, server or filled.client.server)
        _require_alike(
            agreement, model=model, replica=replica, stream=stream, start_version=int(start_version), every=int(every)
        )
    except BaseException:
        agreement.close()
        raise
    publication.open(
        lambda: connect(
            server,
            model=model,
            replica=replica,
            shard=agreement.rank,
            num_shards=agreement.size,
            stream=stream,
            transport=transport,
            settings=filled,
        )
    )
    return publication


def _require_one_hub(agreement: Agreement, server: str | Sequence[str] | None) -> None:
    """Raise ConfigError on all ranks if those of several machines would each start a hub of their own."""
    machine = 0 if server else 1 + zlib.crc32(socket.gethostname().encode())
    highest = agreement.highest(machine)
    lowest = -agreement.highest(-machine)
    if highest != lowest:
        raise ConfigError(
            f"the {agreement.size} ranks of the trainer would meet at different hubs: some run on machines of their "
            "own, or only some name a server: start `tensorhub serve`, and name it on all ranks with server= or "
            "TENSORHUB_SERVER"
        )


def _require_alike(agreement: Agreement, **given: object) -> None:
    """Raise ConfigError on all ranks, naming what they were not all given alike: their shards would never meet."""
    wrong = []
    for what, value in given.items():
        digest = zlib.crc32(repr(value).encode())
        if agreement.highest(digest) != -agreement.highest(-digest):
            wrong.append(what)
    if wrong:
        raise ConfigError(
            f"the ranks of the trainer were given different values of {', '.join(wrong)}: give all of them the same, "
            "and make none of the time, of chance or of a rank's own number"
        )


class MegatronWeights:
    """The parameters of one rank's model chunks, in place; of buffers, which change between steps too, copies."""

    def __init__(
        self, chunks: Sequence[Any], hf_config: Any = None, extra_names: Mapping[str, str | None] | None = None
    ) -> None:
        """Raise ConfigError for settings with which parameters change outside of steps."""
        self._chunks = chunks
        self._hf_config = hf_config
        self._extra_names = extra_names
        self._described: Described | None = None
        self._copies: dict[str, torch.Tensor] = {}
        freshness.require_steps_only(chunks)

    def refresh(self) -> None:
        """Gather what the distributed optimizer has left for the next forward pass; fill the copies."""
        freshness.gather_parameters(self._chunks)
        if self._described is None or self.moved():
            self._copies = {}
            return
        for name, copy in self._copies.items():
            copy.copy_(self._described.tensors[name])

    def describe(self) -> Registration:
        """Say what this rank holds."""
        found = describe(self._chunks, self._hf_config, extra_names=self._extra_names)
        parameters = {id(parameter) for chunk in self._chunks for parameter in chunk.parameters()}
        tensors = {
            name: tensor if id(found.parameters[name]) in parameters else self._copy(name, tensor)
            for name, tensor in found.tensors.items()
        }
        self._described = found
        return Registration(tensors, found.boxes)

    def moved(self) -> bool:
        """Tell whether a parameter or buffer was exchanged, or given other memory."""
        found = self._described
        if found is None or found.moved():
            return True
        models = [compat.unwrap(chunk) for chunk in self._chunks]  # DistributedDataParallel has other `buffers`
        for model in models:
            require_no_adapters(model)  # put in since, around parameters that stayed where they are
        now = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
        return any(id(parameter) not in now for parameter in found.parameters.values())

    def _copy(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return the copy of a buffer as of the last refresh: a version keeps its bytes when it is registered anew."""
        if name not in self._copies:
            self._copies[name] = buffer.detach().clone()
        return self._copies[name]
