"""The runner of checks fails when any phase fails, whatever the way, and leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
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


def ran(phase: Phase) -> check.Outcome:
    return check.run([phase])[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def pytest_phase(folder: Path, source: str) -> Phase:
    (folder / "test_it.py").write_text(source)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(folder))
    return Phase("phase", command, 60, tests=True)


def test_a_command_counts_as_one_check() -> None:
    assert (lambda o: (o.passed, o.failed, o.why))(ran(python("pass"))) == (1, 0, "")
    assert (lambda o: (o.passed, o.failed, o.why))(ran(python("exit(3)"))) == (0, 1, "exit code 3")


def test_a_command_that_does_not_exist_fails() -> None:
    outcome = ran(Phase("phase", ("no/such/program",), 30))
    assert outcome.failed == 1
    assert outcome.why.startswith("could not start")


def test_tests_are_counted(tmp_path: Path) -> None:
    source = (
        "import pytest\ndef test_a(): pass\ndef test_b(): pass\ndef test_c(): assert 0\n"
        "@pytest.mark.skip\ndef test_d(): pass\n@pytest.fixture\ndef f(): assert 0\ndef test_e(f): pass\n"
    )
    outcome = ran(pytest_phase(tmp_path, source))
    assert (outcome.passed, outcome.failed, outcome.skipped, outcome.why) == (2, 2, 1, "exit code 1")


@pytest.mark.parametrize("source", ["", "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n"])
def test_a_phase_without_a_passing_test_fails(tmp_path: Path, source: str) -> None:
    outcome = ran(pytest_phase(tmp_path, source))
    assert outcome.failed == 1
    assert outcome.why


def test_a_crash_after_passing_tests_fails() -> None:
    outcome = ran(python("import os; os._exit(139)", tests=True))
    assert (outcome.passed, outcome.failed) == (0, 1)


def test_a_phase_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nchild.wait()"
    )
    outcome = ran(python(program, limit_s=3))
    assert outcome.why == "not done after 3 s"
    child = int((tmp_path / "pid").read_text())
    until(lambda: is_gone(child))


def test_what_failed_is_named(tmp_path: Path) -> None:
    outcome = ran(pytest_phase(tmp_path, "def test_a(): assert 0\ndef test_b(): pass\ndef test_c(): assert 0\n"))
    assert [name.rpartition("::")[2] for name in outcome.where] == ["test_a", "test_c"]


def test_tests_that_hang_are_named(tmp_path: Path) -> None:
    """Also in the workers of pytest-xdist, of which one is done."""
    (tests := tmp_path / "tests").mkdir()
    command = pytest_phase(tests, "import time\ndef test_a(): time.sleep(300)\ndef test_b(): pass\n").command
    hangs = Phase("hangs", (*command, "-n", "2"), 5, tests=True)
    outcome, other = check.run([hangs, Phase("other", (sys.executable, "-c", "pass"), 30, lane="other")])
    assert (outcome.failed, outcome.why, other.why) == (1, "not done after 5 s", "")
    assert "tests/test_it.py:2 test_a" in outcome.where


def test_a_worker_that_crashes_ends_its_phase(tmp_path: Path) -> None:
    """With one in its place, pytest-xdist would wait for ever where tests go by their files."""
    assert all("--max-worker-restart=0" in phase.command for phase in check.PHASES if "-n" in phase.command)
    crashes = "import os, signal\ndef test_a(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_b(): pass\n"
    command = (*pytest_phase(tmp_path, crashes).command, "-n", "2", "--dist", "loadfile", "--max-worker-restart=0")
    outcome = ran(Phase("phase", command, 60, tests=True))
    assert outcome.failed >= 1
    assert any("test_it" in name for name in outcome.where)


def test_settings_of_the_user_do_not_reach_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_SERVER", "tcp://10.0.0.1:1")
    program = "import os; exit(any(name.startswith('TENSORHUB_') for name in os.environ))"
    assert ran(python(program)).why == ""


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


def test_lanes_run_side_by_side_and_the_phases_of_one_in_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each phase waits for what the other lane's has said, and the third for what the first has left."""
    said = (
        "import pathlib, sys, time\nfolder, mine, other = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]\n"
        "print('begin', mine, flush=True)\n(folder / mine).touch()\nend = time.monotonic() + 20\n"
        "while not (folder / other).exists():\n    assert time.monotonic() < end\n    time.sleep(0.01)\n"
        "print('end', mine, file=sys.stderr)\n"
    )

    def phase(mine: str, other: str, lane: str) -> Phase:
        return Phase(mine, (sys.executable, "-c", said, str(tmp_path), mine, other), 30, lane=lane)

    phases = [phase("one", "two", "core"), phase("two", "one", "engines"), phase("three", "one", "core")]
    assert [(o.phase.name, o.why) for o in check.run(phases)] == [("one", ""), ("two", ""), ("three", "")]
    lines = capfd.readouterr().out.splitlines()
    for name in ("one", "two", "three"):
        at = lines.index(f"begin {name}")
        assert lines[at - 1 : at + 2] == [f"=== {name}: its output", f"begin {name}", f"end {name}"]
    assert lines.index("begin one") < lines.index("begin three")


def test_what_needs_the_machine_for_itself_runs_before_the_others(tmp_path: Path) -> None:
    (said := tmp_path / "said").mkdir()
    note = f"import pathlib, time; at = pathlib.Path({str(said)!r}); "
    alone = f"{note}time.sleep(0.3); assert not list(at.iterdir()); (at / 'done').touch()"
    after = f"{note}assert (at / 'done').exists(); (at / 'begun').touch(exist_ok=True)"
    phases = [
        Phase("core", (sys.executable, "-c", after), 30),
        Phase("alone", (sys.executable, "-c", alone), 30, lane=check.FIRST),
        Phase("engines", (sys.executable, "-c", after), 30, lane="engines"),
    ]
    outcomes = check.run(phases)
    assert [(o.phase.name, o.why) for o in outcomes] == [("alone", ""), ("core", ""), ("engines", "")]


def test_what_only_computes_begins_at_once_and_takes_what_is_left(tmp_path: Path) -> None:
    wait = (
        "import os, pathlib, sys, time\nmine, other, nice = sys.argv[1:]\npathlib.Path(mine).touch()\n"
        "end = time.monotonic() + 20\nwhile not pathlib.Path(other).exists():\n    assert time.monotonic() < end\n"
        "time.sleep(0.2)\nassert os.getpriority(os.PRIO_PROCESS, 0) - int(nice) == 0\n"
    )
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    alone = Phase("alone", (sys.executable, "-c", wait, one, two, str(nice)), 30, lane=check.FIRST)
    pure = Phase("pure", (sys.executable, "-c", wait, two, one, str(check.LOWEST)), 30, lane=check.SPARE)
    assert [(o.phase.name, o.why) for o in check.run([alone, pure])] == [("alone", ""), ("pure", "")]


def test_a_failure_in_one_lane_stops_no_other(tmp_path: Path) -> None:
    phases = [
        Phase("gone", ("no/such/program",), 30),
        Phase("slow", (sys.executable, "-c", "import time; time.sleep(60)"), 0.5, lane="engines"),
        python("pass"),
    ]
    outcomes = check.run(phases)
    assert [(o.failed, o.why.split(" ")[0]) for o in outcomes] == [(1, "could"), (1, "not"), (0, "")]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_run_that_is_terminated_ends_its_phases(tmp_path: Path, lanes: int) -> None:
    sleeper = (
        "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); "
        "pathlib.Path(sys.argv[1]).rename(sys.argv[1] + '.pid'); time.sleep(300)"
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom tools import check\n"
        f"check.RESULTS = folder = Path({str(tmp_path)!r})\n"
        f"command = (sys.executable, '-c', {sleeper!r})\n"
        f"check.PHASES = tuple(check.Phase(f'p{{n}}', (*command, str(folder / f'{{n}}')), 300, lane=str(n)) "
        f"for n in range({lanes}))\n"
        "check.main([])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, cwd=check.ROOT) as run:
        files = [tmp_path / f"{number}.pid" for number in range(lanes)]
        until(lambda: all(file.exists() for file in files))
        run.terminate()
        assert run.wait(timeout=30) == 143
    until(lambda: all(is_gone(int(file.read_text())) for file in files))
