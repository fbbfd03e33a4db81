"""CURVE keys of the control plane: read from ZeroMQ certificates, and set on sockets.

CURVE protects `tcp://` addresses. A Unix socket is guarded by the permissions of its file and speaks without it.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from tensorhub_core.config import ClientConfig, ServerConfig
from tensorhub_core.errors import ConfigError

ZAP_DOMAIN = b"tensorhub"
_KEY_CHARACTERS = 40
_MOST_CERTIFICATE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: its own pair and the server's public key, in Z85."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's pair in Z85; `clients` is the folder of the clients that may connect, None = any."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Path | None = None


def client_keys(config: ClientConfig) -> ClientKeys | None:
    """Return the keys that the settings name, None for a client without CURVE; raises ConfigError."""
    if config.curve_server is None:
        if config.curve_client is not None:
            raise ConfigError("curve_client needs curve_server as well: the path of the server's public certificate")
        return None
    server = config.curve_server.encode()
    if not _is_key(server):
        server = public_key(Path(config.curve_server), "curve_server")
    if config.curve_client is None:
        raise ConfigError("curve_server needs curve_client as well: the path of this client's secret certificate")
    return ClientKeys(server, *_pair(Path(config.curve_client), "curve_client"))


def server_keys(config: ServerConfig) -> ServerKeys | None:
    """Return the keys that the settings name, None for a server without CURVE; raises ConfigError."""
    if config.curve_secret is None:
        if config.curve_clients is not None:
            raise ConfigError("curve_clients needs curve_secret as well: the path of the server's secret certificate")
        return None
    clients = None if config.curve_clients is None else Path(config.curve_clients)
    if clients is not None and not os.path.isdir(clients):
        raise ConfigError(f"curve_clients = {clients} is not a folder: `tensorhub keygen` makes one")
    return ServerKeys(*_pair(Path(config.curve_secret), "curve_secret"), clients)


def protect(socket: zmq.Socket[bytes], address: str, keys: ClientKeys | None) -> None:
    """Make a socket that is about to connect to `address` a client of CURVE, if there are keys for it."""
    if keys is not None and address.startswith("tcp://"):
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def guard(socket: zmq.Socket[bytes], address: str, keys: ServerKeys | None) -> None:
    """Make a socket that is about to listen on `address` a server of CURVE, if there are keys for it."""
    if keys is not None and address.startswith("tcp://"):
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def public_key(path: Path, setting: str) -> bytes:
    """Return the public key of a certificate in Z85; raises ConfigError naming the setting and the file."""
    return _read(path, setting)[0]


def _pair(path: Path, setting: str) -> tuple[bytes, bytes]:
    public, secret = _read(path, setting)
    if secret is None:
        raise ConfigError(f"{setting} = {path} has no secret key: name the file that ends with .key_secret")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{setting} = {path} is damaged: its public key is not that of its secret key")
    return public, secret


def _read(path: Path, setting: str) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate  # brings asyncio along

    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no file")  # a pipe would be waited for
        if about.st_size > _MOST_CERTIFICATE_BYTES:
            raise ValueError("it is too large")
        public, secret = load_certificate(path)
    except OSError as error:
        raise ConfigError(f"{setting} = {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{setting} = {path} is not a ZeroMQ certificate: {error}") from None
    for key in (public, secret):
        if key is not None and not _is_key(key):
            raise ConfigError(f"{setting} = {path} is not a ZeroMQ certificate: a key in it is not in Z85")
    return public, secret


def _is_key(text: bytes) -> bool:
    """Tell whether this is a key of 32 bytes in Z85."""
    if len(text) != _KEY_CHARACTERS:
        return False
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, struct.error):
        return False
