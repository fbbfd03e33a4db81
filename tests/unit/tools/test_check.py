"""The runner of checks fails when any phase fails, whatever the way, and leaves nothing running."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools import check
from tools.check import Phase


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()


def python(program: str, *, limit_s: float = 30, tests: bool = False) -> Phase:
    return Phase("phase", (sys.executable, "-c", program), limit_s, tests=tests)


def pytest_phase(folder: Path, source: str) -> Phase:
    (folder / "test_it.py").write_text(source)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(folder))
    return Phase("phase", command, 60, tests=True)


def test_a_command_counts_as_one_check() -> None:
    assert (lambda o: (o.passed, o.failed, o.why))(check.run_phase(python("pass"))) == (1, 0, "")
    assert (lambda o: (o.passed, o.failed, o.why))(check.run_phase(python("exit(3)"))) == (0, 1, "exit code 3")


def test_a_command_that_does_not_exist_fails() -> None:
    outcome = check.run_phase(Phase("phase", ("no/such/program",), 30))
    assert outcome.failed == 1
    assert outcome.why.startswith("could not start")


def test_tests_are_counted(tmp_path: Path) -> None:
    source = (
        "import pytest\ndef test_a(): pass\ndef test_b(): pass\ndef test_c(): assert 0\n"
        "@pytest.mark.skip\ndef test_d(): pass\n@pytest.fixture\ndef f(): assert 0\ndef test_e(f): pass\n"
    )
    outcome = check.run_phase(pytest_phase(tmp_path, source))
    assert (outcome.passed, outcome.failed, outcome.skipped, outcome.why) == (2, 2, 1, "exit code 1")


@pytest.mark.parametrize("source", ["", "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n"])
def test_a_phase_without_a_passing_test_fails(tmp_path: Path, source: str) -> None:
    outcome = check.run_phase(pytest_phase(tmp_path, source))
    assert outcome.failed == 1
    assert outcome.why


def test_a_crash_after_passing_tests_fails() -> None:
    outcome = check.run_phase(python("import os; os._exit(139)", tests=True))
    assert (outcome.passed, outcome.failed) == (0, 1)


def test_a_phase_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nchild.wait()"
    )
    outcome = check.run_phase(python(program, limit_s=3))
    assert outcome.why == "not done after 3 s"
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_settings_of_the_user_do_not_reach_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_SERVER", "tcp://10.0.0.1:1")
    program = "import os; exit(any(name.startswith('TENSORHUB_') for name in os.environ))"
    assert check.run_phase(python(program)).why == ""


def test_one_failing_phase_fails_the_run_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = tuple(
        Phase(name, (sys.executable, "-c", program), 30)
        for name, program in (("first", "pass"), ("second", "exit(1)"), ("third", "pass"))
    )
    monkeypatch.setattr(check, "PHASES", phases)
    assert check.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 1 failed, 0 skipped"
    assert check.main(["first", "third"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    assert check.main(["fourth"]) == 2


def test_a_run_that_is_terminated_ends_its_phase(tmp_path: Path) -> None:
    sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    program = (
        "import sys\nfrom pathlib import Path\nfrom tools import check\n"
        f"check.RESULTS = Path({str(tmp_path)!r})\n"
        f"check.PHASES = (check.Phase('p', (sys.executable, '-c', {sleeper!r}), 300),)\n"
        "check.main([])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, text=True, cwd=check.ROOT
    ) as run:
        assert run.stdout is not None
        child = next(int(line) for line in run.stdout if line.strip().isdigit())
        run.terminate()
        assert run.wait(timeout=30) == 143
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
