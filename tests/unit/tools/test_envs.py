"""Environments are made once, whole or again, by one process at a time, and never with a CUDA build of torch."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools import envs, piprun
from tools.pythons import SetupError, find_python

HERE = "{}.{}".format(*sys.version_info)


def fake_python(folder: Path, body: str) -> Path:
    """Write a program that stands for `python` and is called as `python -m pip ...`."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, sys\narguments = sys.argv[1:]\n{body}\n")
    path.chmod(0o755)
    return path


def test_what_was_not_finished_is_not_ready(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    assert not envs.is_ready(folder, "a")
    folder.mkdir()
    assert not envs.is_ready(folder, "a")
    envs.mark_ready(folder, "a")
    assert envs.is_ready(folder, "a")
    assert not envs.is_ready(folder, "b")
    (folder / "tensorhub-ready.json").write_text("{")
    assert not envs.is_ready(folder, "a")


def test_one_process_at_a_time_makes_an_environment(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with envs.locked(tmp_path / "x.lock", "x"):
            order.append("second")

    thread = threading.Thread(target=second)
    with envs.locked(tmp_path / "x.lock", "x"):
        thread.start()
        thread.join(1.0)
        order.append("first")
    thread.join(10.0)
    assert order == ["first", "second"]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> envs.Engine:
    """An engine whose lock names nothing, so that its environment takes a second to make."""
    (tmp_path / "tools" / "locks").mkdir(parents=True)
    (tmp_path / "tools" / "locks" / "toy.txt").write_text("torch==1.0\n")
    monkeypatch.setattr(envs, "TOOLS", tmp_path / "tools")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_venv = envs._make_venv
    monkeypatch.setattr(envs, "_make_venv", lambda base, folder: make_venv(base, folder, "--without-pip"))
    return envs.Engine("toy", check="import sys", needed_bytes=0, pythons=(HERE,))


def test_an_interrupted_build_is_made_again_and_a_whole_one_is_kept(
    engine: envs.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def install(python: Path, lock: Path, log: Path) -> None:
        calls.append(python)
        site_packages = envs._site_packages(python)
        assert not (site_packages / "half").exists(), "the interrupted build was not removed"
        (site_packages / "half").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(envs, "_install_lock", install)
    with pytest.raises(KeyboardInterrupt):
        envs._make_cached(engine)
    folder = envs._make_cached(engine)
    assert envs._make_cached(engine) == folder
    assert len(calls) == 2


def test_an_environment_whose_interpreter_is_gone_is_made_again(
    engine: envs.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "_install_lock", lambda python, lock, log: None)
    python = envs._make_cached(engine) / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/such/python")
    envs._make_cached(engine)
    assert python.exists()


def test_another_lock_gets_another_folder(engine: envs.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "_install_lock", lambda python, lock, log: None)
    first = envs._make_cached(engine)
    lock = envs.TOOLS / "locks" / "toy.txt"
    lock.write_text("# a comment changes nothing\ntorch==1.0\n")
    assert envs._make_cached(engine) == first
    lock.write_text("torch==1.1\n")
    assert envs._make_cached(engine) != first


def test_packages_that_do_not_work_are_not_kept(engine: envs.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "_install_lock", lambda python, lock, log: None)
    broken = envs.Engine("toy", check="raise SystemExit('no such kernel')", needed_bytes=0, pythons=(HERE,))
    with pytest.raises(SetupError, match="do not work together:\nno such kernel"):
        envs._make_cached(broken)
    with pytest.raises(SetupError, match="do not work together"):
        envs._make_cached(broken)


def test_too_little_space_is_said_before_anything_is_made(engine: envs.Engine) -> None:
    with pytest.raises(SetupError, match=r"needs 1152921504\.6 GB"):
        envs._make_cached(envs.Engine("toy", check="", needed_bytes=1 << 60, pythons=(HERE,)))


def test_a_stub_gives_a_name_and_a_version_and_no_code(tmp_path: Path) -> None:
    envs._install_stub(envs.TOOLS / "stubs" / "vllm" / "METADATA", tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert {str(file) for file in found.files or ()} == {
        f"vllm-0.32.0+cpu.dist-info/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    }


def test_a_script_runs_from_a_folder_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "with spaces" / ("long" * 40)
    folder.mkdir(parents=True)
    python = folder / "python"
    python.symlink_to(sys.executable)
    envs._write_script(folder / "tool", python, "json.tool:main")
    done = subprocess.run(
        [str(folder / "tool"), "--compact"], input='{"a": 1}', capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ('{"a":1}', "")


def test_a_missing_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SETUP_PYTHON", "/no/such/python")
    with pytest.raises(SetupError, match=r"The toy environment needs Python 3\.99 .*\nInstall python3\.99"):
        find_python(("3.99",), "The toy environment")
    assert find_python(("3.99", HERE), "x").exists()


def test_the_python_that_is_named_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "python"
    named.symlink_to(sys.executable)
    monkeypatch.setenv("SETUP_PYTHON", str(named))
    assert find_python((HERE,), "x") == named


@pytest.mark.parametrize(
    ("requires", "refused"),
    [
        (["filelock", "sympy>=1.13"], False),
        (["filelock", "nvidia-cudnn-cu13==9.24; platform_system == 'Linux'"], True),
        (["cuda-bindings<14,>=13"], True),
    ],
)
def test_a_cuda_build_of_torch_is_refused_before_it_is_fetched(
    tmp_path: Path, requires: list[str], refused: bool
) -> None:
    report = {"install": [{"metadata": {"name": "torch", "requires_dist": requires}}]}
    body = (
        "assert '--dry-run' in arguments and '--no-deps' in arguments\n"
        f"open(arguments[arguments.index('--report') + 1], 'w').write({json.dumps(report)!r})"
    )
    python = fake_python(tmp_path, body)
    if refused:
        with pytest.raises(SetupError, match=r"CUDA build of torch==2\.13\.0"):
            piprun.refuse_cuda_torch(python, "torch==2.13.0", log=tmp_path / "log")
    else:
        piprun.refuse_cuda_torch(python, "torch==2.13.0", log=tmp_path / "log")


def test_a_failing_pip_is_reported_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier call\n")
    python = fake_python(tmp_path, "print('WARNING: Location x'); print('no matching distribution'); sys.exit(1)")
    with pytest.raises(SetupError, match="pip could not install it") as caught:
        piprun.run_pip(python, ["install", "x"], log=tmp_path / "log", title="install it")
    assert "no matching distribution" in str(caught.value)
    assert "WARNING: Location" not in str(caught.value)
    assert "of an earlier call" not in str(caught.value)


def test_an_unknown_environment_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert envs.main(["core", "tpu"]) == 2
    assert "python3 -m tools.envs core" in capsys.readouterr().err
