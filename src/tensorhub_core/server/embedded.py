"""Find the reference server that all of a user's processes on this machine share, and start it when there is none.

The folder of its files belongs to the user alone. One file lock, held by the hub for its whole life, settles who it is;
another settles who starts it. The socket is a Unix socket in that folder, under a name that no other life of the hub
ever has: an address that was left behind by a crash leads nowhere, and nobody else can take it over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

import tensorhub_core
from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import ConfigError, ServerUnreachable
from tensorhub_core.server.files import accepts, free_lock, take_lock
from tensorhub_core.settings import PREFIX, load_settings

ADDRESS_FILE = "address"
POLL_S = 0.02
STARTS = 3
"""How often one call starts a hub before it gives up."""


class HubRecord(msgspec.Struct, frozen=True):
    """What the address file says about the running hub."""

    address: str
    pid: int
    epoch: int


def runtime_folder(configured: str | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the hub's files, made if need be; raises ConfigError unless it is the user's alone."""
    environ = os.environ if environ is None else environ
    session = environ.get("XDG_RUNTIME_DIR")
    if configured:
        folder = Path(configured)
    elif session and _is_ours(Path(session)):
        folder = Path(session) / "tensorhub"
    else:
        folder = Path(tempfile.gettempdir()) / f"tensorhub-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=bool(configured), exist_ok=True)
    except FileExistsError:
        pass  # not a folder: refused below
    except OSError as error:
        raise ConfigError(f"the runtime folder {folder} cannot be made: {error.strerror}") from None
    if not _is_ours(folder):
        raise ConfigError(
            f"the runtime folder {folder} is not a folder that only you can use: remove it, or give another"
            f" one in {PREFIX}RUNTIME_DIR"
        )
    return folder


def read_record(folder: Path) -> HubRecord | None:
    """Return what the address file says, or None if there is none or it is damaged."""
    try:
        return msgspec.json.decode((folder / ADDRESS_FILE).read_bytes(), type=HubRecord)
    except (OSError, msgspec.DecodeError):
        return None


def live_address(folder: Path) -> str | None:
    """Return the address of the hub that listens now, or None."""
    record = read_record(folder)
    return record.address if record is not None and accepts(socket_path(record.address)) else None


def socket_path(address: str) -> Path:
    """Return the Unix socket of an `ipc://` address."""
    return Path(address.removeprefix("ipc://"))


def running_address(server: ServerConfig | None = None) -> str | None:
    """Return the address of this user's embedded server if one runs; starts none."""
    server = load_settings().server if server is None else server
    return live_address(runtime_folder(server.runtime_dir))


def embedded_address(timeout_s: float = 10.0, server: ServerConfig | None = None) -> str:
    """Return the address of this user's embedded server, started as a process of its own if none runs.

    `server` gives the settings of a hub that has to be started; a running one keeps its own. A hub without workers
    ends by itself: whoever gets no answer at this address asks for it again. Raises ServerUnreachable if there is no
    hub after `timeout_s`, ConfigError if the runtime folder cannot be used. Any thread may call it.
    """
    server = load_settings().server if server is None else server
    folder = runtime_folder(server.runtime_dir)
    deadline = time.monotonic() + timeout_s
    trouble, starts = "it did not start", 0
    while True:
        address = live_address(folder)
        if address is not None:
            return address
        left_s = deadline - time.monotonic()
        if left_s <= 0 or starts == STARTS:
            tried = f"after {timeout_s:g} s" if starts < STARTS else f"after {starts} starts"
            raise ServerUnreachable(f"no embedded server in {folder} {tried}: {trouble}")
        with _try_lock(folder / "start.lock") as ours:
            if not ours:
                trouble = f"another process, which holds {folder / 'start.lock'}, does not get it started: end that one"
            elif live_address(folder) is None:
                starts += 1
                trouble = _start(server, folder, left_s) or "it did not start"
        time.sleep(POLL_S)


def _start(server: ServerConfig, folder: Path, timeout_s: float) -> str:
    """Start a hub and wait until it listens; return what went wrong, or nothing."""
    command = [sys.executable, "-m", "tensorhub_core.server", "--detach", "--timeout", f"{timeout_s:.3f}"]
    try:
        done = subprocess.run(
            command,
            env=_environment(server, folder),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout_s + 1.0,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[-500:] or "it ended at once"


def _environment(server: ServerConfig, folder: Path) -> dict[str, str]:
    """Return this process's environment with the hub's settings, and the package's place if it is not installed."""
    environ = dict(os.environ)
    for key, value in dataclasses.asdict(server).items():
        environ.pop(PREFIX + key.upper(), None)
        if value is not None:
            environ[PREFIX + key.upper()] = str(value)
    environ[PREFIX + "RUNTIME_DIR"] = str(folder.absolute())
    paths: list[str] = []
    for part in filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)):
        with contextlib.suppress(FileNotFoundError):  # of a working directory that is gone nothing can be imported
            paths.append(os.path.abspath(part))
    root = Path(tensorhub_core.__path__[0]).absolute().parent
    if root.name not in ("site-packages", "dist-packages"):
        paths.append(str(root))
    if paths:
        environ["PYTHONPATH"] = os.pathsep.join(paths)
    return environ


def _is_ours(folder: Path) -> bool:
    """Tell whether this is a real folder of this user that nobody else can enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Hold a file lock for the block if it is free; yield whether it is held. The kernel frees it with the process."""
    handle = take_lock(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            free_lock(handle)
