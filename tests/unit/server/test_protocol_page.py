"""The protocol page is generated, complete and up to date."""

from __future__ import annotations

from typing import get_args

import pytest

from tensorhub_core.errors import ERRORS
from tensorhub_core.state import messages
from tools import gen_protocol


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert gen_protocol.main(["--check"]) == 0, capsys.readouterr().err


def test_the_page_names_every_message_field_and_error() -> None:
    page = gen_protocol.render()
    for struct in (*get_args(messages.Request), *get_args(messages.Reply), messages.Source, messages.Held):
        section = page.split(f"### {struct.__name__}\n", 1)[1].split("\n#", 1)[0]
        for name in struct.__struct_fields__:
            assert f"| `{name}` |" in section
    for code in ERRORS:
        assert f"| `{code}` |" in page


def test_a_page_that_is_not_up_to_date_is_reported(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "protocol.md"
    monkeypatch.setattr(gen_protocol, "PAGE", page)
    assert gen_protocol.main(["--check"]) == 1
    assert gen_protocol.main([]) == 0
    assert gen_protocol.main(["--check"]) == 0
    page.write_text(page.read_text() + "edited by hand\n")
    assert gen_protocol.main(["--check"]) == 1
