"""The kernel log: XID errors, some of which never reach NVML (79, 119 and 120; FACTS 2).

Reads /dev/kmsg, of which each read gives one record, or a plain file that somebody keeps of it.
The log holds strings that others chose (names of processes and of devices), so only a record of the
kernel's own that *begins* with the driver's words counts.
"""

import errno
import os
import re
import stat

from gpuagent.errors import AgentError, Refused, Unsupported
from gpuagent.ports import KernelXid

_RECORD_BYTES = 8192
"""Longest record of /dev/kmsg (CONSOLE_EXT_LOG_MAX)."""
_READS_AT_ONCE = 512
"""A flood is read over several calls, so that none takes long."""
_XIDS_AT_ONCE = 500
_TEXT_CHARACTERS = 200
_MARK = b"NVRM: Xid "
"""What a line without it does not deserve: to be looked at closely."""

_XID = re.compile(
    # Priority (kernel facility: 0 to 7), sequence, time, flags; or a time as dmesg prints it; or none.
    r"(?:[0-7],\d+,\d+,[^;\n]*;|(?:<[0-7]>)?\[ *\d+\.\d+\] |)"
    r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?\): (\d{1,4})\b"
)


class Kmsg:
    """Implements `ports.KernelLog`. What was logged before it was made is not told."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._inode = 0
        self._regular = False
        self._rest = b""
        self._fresh = False
        """Whether everything in the log is news, because it has only now appeared."""

    def take(self) -> list[KernelXid]:
        try:
            if self._replaced():
                self.close()
                self._fresh = True
            if self._fd < 0:
                self._open()
            return [found for line in self._lines() if (found := parse(line)) is not None]
        except OSError as error:
            self.close()
            self._fresh = error.errno == errno.ENOENT
            raise self._meaning(error) from error

    def close(self) -> None:
        """Let go of the log; `take` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._rest = b""

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self._inode = status.st_ino
        self._regular = stat.S_ISREG(status.st_mode)
        if not (self._fresh and self._regular):
            os.lseek(self._fd, 0, os.SEEK_END)
        self._fresh = False

    def _replaced(self) -> bool:
        """Whether a plain file was rotated away under us, or cut short."""
        if self._fd < 0 or not self._regular:
            return False
        status = os.stat(self._path)
        return status.st_ino != self._inode or status.st_size < os.lseek(self._fd, 0, os.SEEK_CUR)

    def _lines(self) -> list[str]:
        """Lines that may tell of an XID; of a flood, a part."""
        lines: list[str] = []
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                break  # Nothing more for now.
            except BrokenPipeError:
                continue  # Records were overwritten before we came: the next read goes on after them.
            if not data:
                break
            *whole, rest = (self._rest + data).split(b"\n")
            self._rest = rest[:_RECORD_BYTES]
            lines += (line.decode("utf-8", "replace") for line in whole if _MARK in line)
            if len(lines) >= _XIDS_AT_ONCE:
                break
        return lines

    def _meaning(self, error: OSError) -> AgentError:
        why = f"{self._path}: {error.strerror}; XIDs that NVML does not report are not seen"
        if isinstance(error, PermissionError):
            return Refused(f"{why}; reading it needs root or CAP_SYSLOG")
        return Unsupported(f"{why}; set paths.kernel_log to the kernel log")


def parse(line: str) -> KernelXid | None:
    """The XID that one line of the log reports, or None. Any text is allowed."""
    found = _XID.match(line)
    if found is None:
        return None
    domain, bus, device = (int(part, 16) for part in found.group(1, 2, 3))
    text = line[found.start(1) - len("NVRM: Xid (PCI:") :][:_TEXT_CHARACTERS]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return KernelXid((domain, bus, device), int(found[4]), text)
