"""The table of settings in the operations page is generated, complete and up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorhub_core.settings import keys
from tools import gen_settings


def test_the_table_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert gen_settings.main(["--check"]) == 0, capsys.readouterr().err


def test_the_table_names_every_setting_once() -> None:
    lines = gen_settings.PAGE.read_text(encoding="utf-8").splitlines()
    for name in keys():
        assert sum(line.startswith(f"| `{name}` | ") for line in lines) == 1


def test_a_table_that_is_not_up_to_date_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "operations.md"
    page.write_text(f"before\n{gen_settings.BEGIN}| `lease_s` | wrong |\n{gen_settings.END}after\n", encoding="utf-8")
    monkeypatch.setattr(gen_settings, "PAGE", page)
    assert gen_settings.main(["--check"]) == 1
    assert gen_settings.main([]) == 0
    assert gen_settings.main(["--check"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `lease_s` | the server | `5.0` | seconds " in text


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks"):
        gen_settings.written("nothing")
