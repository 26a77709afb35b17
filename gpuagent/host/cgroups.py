"""The cgroup v2 tree: reads and writes control files of the cgroup that was meant, no other.

A path can be removed and made again by somebody else at any time. So the directory is opened first,
its inode compared, and the control file opened relative to it: what is written reaches the cgroup
that was asked for or nothing at all. Files are never created (FACTS 5).

A cgroup is gone only if the tree it was in is there and does not have it. A root that is missing, is
no cgroup v2, or shows another tree than it did, says nothing of any cgroup.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence

from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported

_CONTROL_FILE = re.compile(r"[a-z]+(?:[._][a-z0-9]+)+")
TELLTALE = "cgroup.controllers"
"""A file that every cgroup v2 has, the root and a container's root included, and no other folder
(Documentation/admin-guide/cgroup-v2.rst, "Core Interface Files")."""
WITHOUT_V2 = "boot with systemd.unified_cgroup_hierarchy=1 (the default since Debian 11 and RHEL 9)"
"""How to get cgroup v2."""
_LARGEST = 1 << 20
_READ_BYTES = 4096

_MEANING: dict[int, type[AgentError]] = {
    errno.ENOENT: Gone,
    errno.ENODEV: Gone,
    errno.ENOTDIR: Gone,
    errno.ESRCH: Gone,  # a process that cgroup.procs is asked to take
    errno.EOPNOTSUPP: Unsupported,
    errno.ENOSYS: Unsupported,
    errno.EACCES: Refused,
    errno.EPERM: Refused,
    errno.EROFS: Refused,
    errno.EINVAL: Refused,
    errno.ERANGE: Refused,
    errno.EBUSY: Refused,
    errno.ENOSPC: Refused,
    errno.EDQUOT: Refused,
    errno.EISDIR: Refused,
    errno.ELOOP: Refused,
    errno.ENAMETOOLONG: Refused,
}
_REMEDY = {
    errno.EROFS: "the cgroup mount is read-only; mount it read-write for the agent",
    errno.EACCES: "the agent may not write here; run it as root or delegate the cgroup to it",
    errno.EPERM: "the agent may not write here; run it as root or delegate the cgroup to it",
    errno.EINVAL: "the kernel does not accept this value",
    errno.ERANGE: "the kernel does not accept this value",
    errno.ELOOP: "it is a symbolic link, which no control file is",
}


_NO_LENGTH = {errno.EINVAL, errno.EPERM, errno.EACCES}
"""How a file of the kernel's says that it cannot be cut, which it need not be."""


def _translated(broken: OSError, place: str) -> AgentError:
    number = broken.errno or 0
    remedy = _REMEDY.get(number)
    text = f"{place}: {broken.strerror}" + (f" ({remedy})" if remedy else "")
    return _MEANING.get(number, Unavailable)(text)


class CgroupTree:
    """The tree mounted at `root`. Blocking calls; safe from several threads.

    Each raises Unavailable where the root is not there, is no cgroup v2, or is not the one that was
    first seen.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/") or "/"
        self._known: tuple[int, int] | None = None
        """Device and inode of the root when it was first seen."""

    def tree(self) -> str:
        """Identity of the tree, which a cgroup's inode is of: device and inode of its root."""
        device, inode = self._rooted()
        return f"{device}:{inode}"

    def inode(self, path: str) -> int:
        """Identity of a cgroup. Raises Gone; Refused for what is no path of a cgroup."""
        with self._opened(path) as folder:
            return os.fstat(folder).st_ino

    def read(self, path: str, file: str) -> str:
        """Content without the final newline. Raises Gone, Unsupported (no such file), Refused."""
        with self._opened(path) as folder:
            return self._content(folder, path, file)

    def read_all(self, path: str, inode: int, files: Sequence[str]) -> dict[str, str]:
        """Content of these files of the cgroup with this inode; what it does not have is left out.

        Raises Gone where the cgroup has gone or another has taken its path, Refused.
        """
        found: dict[str, str] = {}
        with self._opened(path) as folder:
            self._same(folder, path, inode)
            for file in files:
                with contextlib.suppress(Unsupported):
                    found[file] = self._content(folder, path, file)
        return found

    def write(self, path: str, inode: int, file: str, text: str) -> None:
        """Write one control file of the cgroup with this inode.

        Raises Gone where the cgroup has gone or another has taken its path, Unsupported where it
        has no such file, Refused where the kernel or the mount says no.
        """
        data = f"{text}\n".encode()
        with self._opened(path) as folder:
            self._same(folder, path, inode)
            fd = self._control(folder, path, file, os.O_WRONLY)
            try:
                written = os.write(fd, data)
                _cut(fd, written)
            except OSError as broken:
                raise _translated(broken, self._place(path, file)) from broken
            finally:
                os.close(fd)
            if written != len(data):
                raise Unavailable(
                    f"{self._place(path, file)}: only {written} of {len(data)} bytes were written"
                )

    def opened(self, path: str, inode: int, file: str, flags: int) -> int:
        """Descriptor of one control file of the cgroup with this inode. The caller closes it.

        Whatever becomes of the path, it stays that cgroup's. Raises as `write`.
        """
        with self._opened(path) as folder:
            self._same(folder, path, inode)
            return self._control(folder, path, file, flags)

    def owner(self, path: str, file: str) -> int:
        """UID of the owner of a control file: not 0 in a delegated cgroup. Raises as `read`."""
        with self._opened(path) as folder:
            fd = self._control(folder, path, file, os.O_RDONLY)
            try:
                return os.fstat(fd).st_uid
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        parts = path.split("/")
        if not path.startswith("/") or "\0" in path or ".." in parts or "." in parts:
            raise Refused(f"{path!r} is no path below the cgroup root")
        if "\ufffd" in path:
            raise Refused(f"{path!r}: the name is not plain text, so it cannot be opened by it")
        try:
            folder = self._folder(path)
            try:
                self._rooted()
                yield folder
            finally:
                os.close(folder)
        except Gone:
            self._rooted()
            raise

    def _folder(self, path: str) -> int:
        """The opened folder. The caller closes it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._place(path), flags)
        except OSError as broken:
            raise _translated(broken, self._place(path)) from broken
        except UnicodeEncodeError as broken:
            raise Refused(f"{path!r} is no path below the cgroup root") from broken

    def _rooted(self) -> tuple[int, int]:
        """Device and inode of the root, which is the one that was first seen. Raises Unavailable."""
        try:
            status = os.stat(self._root)
        except OSError as broken:
            raise Unavailable(
                f"paths.cgroup_root {self._root} is no cgroup tree, as it is not there "
                f"({broken.strerror}); set it to where cgroup2 is mounted"
            ) from broken
        if not stat.S_ISDIR(status.st_mode):
            raise Unavailable(
                f"paths.cgroup_root {self._root} is no cgroup tree, as it is no folder; set it to "
                "where cgroup2 is mounted"
            )
        found = (status.st_dev, status.st_ino)
        if self._known is None:
            self._is_v2()
            self._known = found
        if found != self._known:
            raise Unavailable(
                f"paths.cgroup_root {self._root} shows another tree than it did at first; mount the "
                "old one there again, or restart gpuagent"
            )
        return found

    def _is_v2(self) -> None:
        """Asked until it is so once: what is the same folder then is still a cgroup. Raises Unavailable."""
        if not os.path.isfile(os.path.join(self._root, TELLTALE)):
            raise Unavailable(
                f"paths.cgroup_root {self._root} is no cgroup v2 mount, so no tenant's CPU can be read "
                f"or held back; {WITHOUT_V2}, or set it to where cgroup2 is mounted"
            )

    def _same(self, folder: int, path: str, inode: int) -> None:
        if os.fstat(folder).st_ino != inode:
            raise Gone(f"{self._place(path)}: another cgroup has taken this path")

    def _content(self, folder: int, path: str, file: str) -> str:
        fd = self._control(folder, path, file, os.O_RDONLY)
        try:
            return _whole(fd).removesuffix(b"\n").decode("utf-8", "replace")
        except OSError as broken:
            raise _translated(broken, self._place(path, file)) from broken
        finally:
            os.close(fd)

    def _control(self, folder: int, path: str, file: str, flags: int) -> int:
        """The opened control file. The caller closes it."""
        if not _CONTROL_FILE.fullmatch(file):
            raise Refused(f"{file!r} is no name of a control file")
        try:
            # Non-blocking, so that a FIFO somebody put there holds nobody up.
            fd = os.open(file, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except OSError as broken:
            if broken.errno == errno.ENOENT and self._still(folder, path):
                raise Unsupported(
                    f"{self._place(path, file)}: no such control file; its controller is not "
                    "enabled in the parent's cgroup.subtree_control (for a systemd unit, "
                    "`systemctl set-property UNIT CPUWeight=100` has it enabled)"
                ) from broken
            raise _translated(broken, self._place(path, file)) from broken
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Refused(f"{self._place(path, file)} is not a control file")
        return fd

    def _still(self, folder: int, path: str) -> bool:
        """Whether the opened cgroup is still the one at its path."""
        try:
            now = os.stat(self._place(path), follow_symlinks=False)
        except OSError:
            return False
        return now.st_ino == os.fstat(folder).st_ino

    def _place(self, path: str, file: str = "") -> str:
        folder = self._root.rstrip("/") + path.rstrip("/")
        return f"{folder}/{file}" if file else folder or "/"


def _cut(fd: int, length: int) -> None:
    """End a plain file here. After the write, so that a kill in between leaves no empty file."""
    try:
        os.ftruncate(fd, length)
    except OSError as broken:
        if broken.errno not in _NO_LENGTH:
            raise


def _whole(fd: int) -> bytes:
    data = b""
    while len(data) < _LARGEST:
        more = os.read(fd, _READ_BYTES)
        if not more:
            break
        data += more
    return data
