"""The ledger's file: appended to durably, replaced as a whole, whole again after any crash.

Blocking calls that raise OSError; `Ledger` runs them off the loop and says what they mean.
"""

import contextlib
import errno
import os

from gpuagent.act.statedir import require_ours

SIZE_MAX = 64 * 1024 * 1024
"""A file beyond this was not written by us: the ledger rewrites itself long before."""


class Journal:
    """An append-only file of lines, each ending in a newline. Not safe for two threads at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self._temporary = path + ".new"
        self._fd = -1

    def open(self) -> bytes:
        """Open or create it, and return what it holds. What a crash left half-replaced is removed.

        Raises Refused where others could have written it.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        require_ours(self._fd, self.path)
        self._sync_directory()
        self.size = os.fstat(self._fd).st_size
        if self.size > SIZE_MAX:
            raise OSError(errno.EFBIG, f"{self.size} bytes long, which no ledger of ours gets")
        return _read_all(self._fd, self.size)

    def append(self, lines: bytes) -> None:
        """Durable when it returns. After a failure the end may be torn: `replace` is due."""
        if os.fstat(self._fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file has been deleted")
        _write_all(self._fd, lines)
        os.fdatasync(self._fd)
        self.size += len(lines)

    def replace(self, lines: bytes) -> None:
        """Make `lines` the whole content: after a crash it is the old content or the new."""
        fd = self._create_temporary()
        try:
            _write_all(fd, lines)
            os.fsync(fd)
            self._rename()
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            raise
        self.close()
        self._fd, self.size = fd, len(lines)
        self._sync_directory()

    def set_aside(self, content: bytes) -> None:
        """Keep a copy of a damaged file for people; best effort."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            fd = os.open(self.path + ".damaged", flags, 0o600)
            try:
                _write_all(fd, content)
            finally:
                os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _create_temporary(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._temporary, flags, 0o600)

    def _rename(self) -> None:
        os.rename(self._temporary, self.path)

    def _sync_directory(self) -> None:
        fd = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, size: int) -> bytes:
    parts = []
    offset = 0
    while offset < size:
        part = os.pread(fd, size - offset, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
