"""Write docs/protocol.md from the message structs, the codec and the errors.

python -m tools.gen_protocol            write the page
python -m tools.gen_protocol --check    exit with 1 if the page is not up to date
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from tensorhub_core import errors
from tensorhub_core.state import messages
from tensorhub_core.wire import codec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
Struct = type[msgspec.Struct]
_BOUNDED = re.compile(r"Annotated\[((?:(?!Annotated).)*?), msgspec\.Meta\(max_length=(\d+)\)\]")
_RANGE = re.compile(r"Annotated\[int, msgspec\.Meta\(ge=0, le=(\d+)\)\]")
_OPTIONAL = re.compile(r"Optional\[(\w+)\]")


def render() -> str:
    """Return the whole page."""
    requests: list[Struct] = list(get_args(messages.Request))
    pushes: list[Struct] = list(messages.PUSHES)
    replies: list[Struct] = [kind for kind in get_args(messages.Reply) if kind not in pushes]
    records = nested([*requests, *replies, *pushes])
    parts = [
        "# Protocol",
        "<!-- Written by tools/gen_protocol.py from the sources; change those and run `make docs`. -->",
        _text(messages.__doc__ or "").replace(" `docs/protocol.md` is generated from here.", ""),
        f"This is protocol version **{messages.PROTOCOL}**. Peers of different versions do not understand each other:"
        " the server answers `Failure(protocol_mismatch)` under its own version, both sides raise `ProtocolMismatch`.",
        "## Frames",
        _text(codec.__doc__ or ""),
        f"A message has at most {codec.MAX_MESSAGE_BYTES >> 20} MiB; ZeroMQ closes the connection of a peer that sends"
        " a larger frame. The body is a msgpack map of the fields below and `type`, the message's name. Fields with"
        " their default value are left out, unknown fields and types are refused. `uint63` is a whole number from 0 to"
        " 2**63 - 1.",
        "Clients use a DEALER socket without an identity of their own: a connection is a session. After a new"
        " connection the server answers the first request with an `UnknownSession` push, whereupon the client says"
        " hello.",
    ]
    groups = {"Requests": requests, "Replies": replies, "Pushes": pushes, "Records inside messages": records}
    for title, structs in groups.items():
        parts.append(f"## {title}")
        for struct in structs:
            parts += list(render_struct(struct))
    parts += ["## Error codes", "What `Failure.code` may say; the client raises the error of this code.", error_table()]
    return "\n\n".join(parts) + "\n"


def nested(structs: Iterable[Struct]) -> list[Struct]:
    """Return the records that fields of these structs hold, in the order they are met, without the structs."""
    known = list(structs)
    found: list[Struct] = []
    waiting = [kind for struct in known for kind in get_type_hints(struct).values()]
    while waiting:
        kind = waiting.pop(0)
        waiting = [*get_args(kind), *waiting]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found and kind not in known:
            found.append(kind)
            waiting += get_type_hints(kind).values()
    return found


def render_struct(struct: Struct) -> Iterator[str]:
    """Yield the paragraphs of one struct."""
    yield f"### {struct.__name__}"
    yield _text(struct.__doc__ or "")
    rows = ["| field | type | default |", "|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        default = "" if field.required else f"`{field.default!r}`"
        rows.append(f"| `{field.name}` | `{_type(field.type)}` | {default} |")
    if len(rows) > 2:
        yield "\n".join(rows)


def _type(kind: Any) -> str:
    """Return a type as the sources write it."""
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    for module in {member.__module__ for member in (*get_args(messages.Request), *get_args(messages.Reply))}:
        text = text.replace(f"{module}.", "")
    text = text.replace("typing.", "")
    while (shorter := _BOUNDED.sub(r"\1 (at most \2)", text)) != text:
        text = shorter
    text = _RANGE.sub(lambda found: f"uint{int(found[1]).bit_length()}", text)
    text = _OPTIONAL.sub(r"\1 | None", text)
    return text.replace("|", "\\|")


def error_table() -> str:
    """Return the table of error codes."""
    rows = ["| code | error | meaning |", "|---|---|---|"]
    for code, kind in sorted(errors.ERRORS.items()):
        rows.append(f"| `{code}` | `{kind.__name__}` | {_text(inspect.getdoc(kind) or '')} |")
    rows.append(
        f"| `{codec.MalformedMessage.code}` | `TensorHubError` | {_text(codec.MalformedMessage.__doc__ or '')} |"
    )
    return "\n".join(rows)


def _text(docstring: str) -> str:
    """Return a docstring with its line breaks taken out and its paragraphs kept."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    page = render()
    if "--check" not in arguments:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print("docs/protocol.md is not up to date: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
