"""Opening the sockets that the API listens on, and removing what is left of them."""

import contextlib
import errno
import grp
import os
import socket
import stat

import msgspec

from gpuagent.errors import Refused
from gpuagent.quantities import QuantityError, split_address

_PATH_MOST_BYTES = 107
"""sun_path has 108 bytes, the last of which is zero (unix(7))."""
BACKLOG = 128


class Address(msgspec.Struct, frozen=True):
    """A loopback address and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """From "127.0.0.1:9485", "[::1]:9485" or "localhost:9485". Raises Refused."""
        try:
            host, port = split_address(text)
        except QuantityError as error:
            raise Refused(f"api.metrics_listen: {error}") from error
        return cls("127.0.0.1" if host == "localhost" else host, port)

    @property
    def names(self) -> frozenset[str]:
        """What a Host header may say."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset({own, "localhost", "127.0.0.1", "[::1]"})


def bind_loopback(address: Address) -> socket.socket:
    """A listening TCP socket. Raises Refused."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise Refused(
            f"cannot listen on {address.host} port {address.port} ({error.strerror}): "
            "set api.metrics_listen to a free port, or to nothing"
        ) from error
    return sock


def admin_path(path: str) -> str:
    """Where administrators find a socket of their own, beside the one at `path`.

    The kernel queues connections until they are taken, those of all users in one queue: whoever
    connects in a loop keeps it full. Into the queue of this socket he does not come.
    """
    stem, suffix = os.path.splitext(path)
    return f"{stem}-admin{suffix}"


def bind_admin_socket(path: str, group: int | None) -> socket.socket:
    """As `bind_socket`, but open to root and the members of a group (its id) only."""
    sock = bind_socket(path, mode=0o600)
    if group is not None:
        # Of a group that we are not in, as any user but root may be, nobody is let in.
        with contextlib.suppress(PermissionError):
            os.chown(path, -1, group)
            os.chmod(path, 0o660)
    return sock


def bind_socket(path: str, *, mode: int = 0o666) -> socket.socket:
    """A listening Unix socket at `path`, open to all local users: roles decide what they may do.

    A socket that nobody listens on is replaced. Raises Refused, with what to do.
    """
    size = len(os.fsencode(path))
    if size > _PATH_MOST_BYTES:
        raise Refused(
            f"the socket path {path} has {size} bytes and the kernel takes {_PATH_MOST_BYTES}: "
            "set paths.socket to a shorter one"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        _clear(path)
        sock.bind(path)
        os.chmod(path, mode)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise Refused(f"cannot listen on {path}: {error.strerror}") from error
    except Refused:
        sock.close()
        raise
    return sock


def _clear(path: str) -> None:
    """Remove a socket that an agent left behind. Raises Refused if it is anything else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Refused(f"{path} exists and is no socket: remove it, or set paths.socket to another")
    if _answers(path):
        raise Refused(
            f"the socket {path} is in use: another agent runs; stop it, or set paths.socket to another"
        )
    os.unlink(path)


def _answers(path: str) -> bool:
    """Whether somebody listens. Raises OSError where that cannot be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        code = probe.connect_ex(path)
    if code in {errno.ECONNREFUSED, errno.ENOENT}:
        return False
    if code in {0, errno.EAGAIN}:  # EAGAIN: so busy that its queue is full
        return True
    raise OSError(code, os.strerror(code))


def remove_socket(path: str, inode: int) -> None:
    """Remove the socket at `path` if it is still the one with this inode."""
    try:
        if os.lstat(path).st_ino == inode:
            os.unlink(path)
    except OSError:
        return  # gone already, or the directory is


def group_id(name: str) -> int | None:
    """Id of a group; None for no name and for a group that does not exist."""
    try:
        return grp.getgrnam(name).gr_gid if name else None
    except KeyError:
        return None
