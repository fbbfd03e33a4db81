"""How many models, and streams of a model, the server knows by name: bounded, and forgotten where nobody needs them."""

from __future__ import annotations

from tensorhub_core.errors import StateError
from tensorhub_core.ids import ModelName
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import file_again
from tensorhub_core.state.records import ModelState


def model_of(s: Step, name: ModelName) -> ModelState:
    """Return a model, known or new; raises StateError if as many others as the limit allows are in use."""
    model = s.state.models.get(name)
    if model is not None:
        return model
    if len(s.state.models) >= s.state.config.max_models:
        make_place(s)
    return s.state.models.setdefault(name, ModelState(name))


def make_place(s: Step) -> None:
    """Forget one model that nobody is connected for; one of which no version was heard goes before the others.

    Those who held a version come back with it, and with the highest number that they have heard of (law L10).
    """
    used = {worker.model for worker in s.state.workers.values()}
    idle = [model for model in s.state.models.values() if model.name not in used]
    if not idle:
        raise StateError(
            f"the server has its limit of {s.state.config.max_models:,} models, and all of them are in use: "
            "end what is not needed any more, or start another server"
        )
    known = [model for model in idle if model.high is not None or model.heard is not None]
    forgotten = idle[0] if len(known) == len(idle) else next(model for model in idle if model not in known)
    if forgotten in known:
        s.log("warning", f"model {forgotten.name!r}, for which nobody is connected, is forgotten to make place")
    file_again(s, forgotten)  # nothing of it can be read any more
    del s.state.models[forgotten.name]
    s.forget(forgotten.name)


def add_stream(s: Step, model: ModelState, stream: str, *, over: bool = False) -> None:
    """Make a stream the model's current one, or one that is over; of those only so many are remembered."""
    if over:
        model.streams.insert(0, stream)
    else:
        model.stream = stream
        model.streams.append(stream)
    for old in old_streams(s, model)[: max(0, len(model.streams) - s.state.config.max_streams)]:
        model.streams.remove(old)


def check_streams(s: Step, model: ModelState) -> None:
    """Raise StateError if there are too many streams that connected workers name to begin another one."""
    if len(model.streams) >= s.state.config.max_streams and not old_streams(s, model):
        raise StateError(
            f"model {model.name!r} has its limit of {s.state.config.max_streams:,} streams, and workers of all of them "
            "are connected: close those of the streams that are over"
        )


def old_streams(s: Step, model: ModelState) -> list[str]:
    """Return the streams, oldest first, that no connected worker can come back to."""
    if len(model.streams) < s.state.config.max_streams:
        return []
    named = {worker.stream for worker in s.state.workers.values() if worker.model == model.name}
    return [stream for stream in model.streams if stream not in named and stream != model.stream]
