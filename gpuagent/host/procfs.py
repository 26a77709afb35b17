"""The host's processes as /proc shows them, and facts about the host as a whole.

Processes are read by hand: a table of 2,000 costs two small files each (about 6 µs of kernel time),
and what seldom changes (user, executable) is kept from one table to the next. Host facts are
psutil's; pressure is the kernel's own (Documentation/accounting/psi.rst).
"""

import contextlib
import errno
import os
import pwd
import re
from collections.abc import Sequence

import msgspec
import psutil

from gpuagent.errors import Gone, Unavailable
from gpuagent.model.inventory import Process
from gpuagent.ports import NodeFacts

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in include/linux/sched.h
_UID = re.compile(rb"^Uid:\s+(\d{1,10})\s", re.MULTILINE)
_NAMES_KEPT = 4096
_GONE = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})


def plain(raw: bytes) -> str:
    """`raw` as text that can be shown anywhere: what is not printable UTF-8 becomes U+FFFD.

    Names come from strangers. A cgroup whose name holds U+FFFD is never opened by it.
    """
    text = raw.decode("utf-8", "replace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


class _Stat(msgspec.Struct, frozen=True):
    """The fields we use of /proc/PID/stat (proc(5))."""

    name: bytes
    state: bytes
    ppid: int
    flags: int
    threads: int
    started: int


def parse_stat(raw: bytes) -> _Stat:
    """Fields of a stat line; the name may itself hold blanks, parentheses and line breaks.

    Raises ValueError for what is not one.
    """
    begin, end = raw.index(b"("), raw.rindex(b")")
    fields = raw[end + 2 :].split(None, 20)
    if len(fields) < 20:
        raise ValueError("a stat line with too few fields")
    return _Stat(
        name=raw[begin + 1 : end],
        state=fields[0],
        ppid=int(fields[1]),
        flags=int(fields[6]),
        threads=int(fields[17]),
        started=int(fields[19]),
    )


def parse_cgroup(raw: bytes) -> str:
    """The cgroup v2 path in /proc/PID/cgroup; empty where the process has none."""
    if raw.startswith(b"0::"):
        return plain(raw[3:].rstrip(b"\n"))
    begin = raw.find(b"\n0::")
    return plain(raw[begin + 4 :].split(b"\n", 1)[0]) if begin >= 0 else ""


def parse_uid(raw: bytes) -> int:
    """The real user in /proc/PID/status. Raises ValueError."""
    found = _UID.search(raw)
    if found is None:
        raise ValueError("a status without a user")
    return int(found[1])


class ProcTable:
    """The processes of a mounted proc filesystem. One thread at a time may ask for the table."""

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        self._known: dict[int, Process] = {}
        self._users: dict[int, str] = {}

    def read(self, pid: int) -> Process:
        """One process, everything read afresh. Raises Gone, also for a zombie; Unavailable."""
        stat = self._stat(pid)
        return self._whole(pid, stat, self.cgroup(pid))

    def again(self, known: Process) -> Process:
        """A process that is known: the same object while nothing has changed, as far as `table` looks.

        Raises as `read`. Where another process has its number by now, this is the other.
        """
        return self._renewed(known, self._stat(known.pid))

    def cgroup(self, pid: int) -> str:
        """The cgroup v2 path of a process, empty where it has none. Raises Gone, Unavailable."""
        return parse_cgroup(self._bytes(pid, "cgroup"))

    def table(self) -> Sequence[Process]:
        """Every process with a user-space part, by pid. Unchanged ones are the same objects.

        User and executable are read again only when the process's name or parent has changed, as
        they do with the program it runs. Raises Unavailable where /proc cannot be read.
        """
        known: dict[int, Process] = {}
        for pid in self._pids():
            with contextlib.suppress(Gone):
                stat = self._stat(pid)
                if stat.flags & _KERNEL_THREAD:
                    continue
                before = self._known.get(pid)
                if before is None:
                    known[pid] = self._whole(pid, stat, self.cgroup(pid))
                else:
                    known[pid] = self._renewed(before, stat)
        self._known = known
        return tuple(known.values())

    def _renewed(self, before: Process, stat: _Stat) -> Process:
        cgroup = self.cgroup(before.pid)
        if (
            before.started != stat.started
            or before.ppid != stat.ppid
            or before.name != plain(stat.name)
        ):
            return self._whole(before.pid, stat, cgroup)
        if before.cgroup != cgroup:
            return msgspec.structs.replace(before, cgroup=cgroup)
        return before

    def _whole(self, pid: int, stat: _Stat, cgroup: str) -> Process:
        try:
            uid = parse_uid(self._bytes(pid, "status"))
        except ValueError as broken:
            raise Gone(f"process {pid}: /proc/{pid}/status has no user") from broken
        return Process(
            pid=pid,
            started=stat.started,
            ppid=stat.ppid,
            uid=uid,
            user=self._user(uid),
            name=plain(stat.name),
            exe=self._exe(pid),
            cgroup=cgroup,
        )

    def _pids(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._root) if name.isdecimal())
        except OSError as broken:
            raise Unavailable(
                f"{self._root}: {broken.strerror}; the process table needs a mounted proc"
            ) from broken

    def _stat(self, pid: int) -> _Stat:
        try:
            stat = parse_stat(self._bytes(pid, "stat"))
        except ValueError as broken:
            raise Gone(f"process {pid}: its stat line cannot be read") from broken
        # A leader that has ended while other threads live on is a zombie too, and no dead process.
        if stat.state in b"ZXx" and stat.threads <= 1:
            raise Gone(f"process {pid} has ended")
        return stat

    def _exe(self, pid: int) -> str:
        try:
            target = os.readlink(os.fsencode(f"{self._root}/{pid}/exe"))
        except OSError:
            return ""  # a kernel thread, a process that ends just now, or one we may not look into
        return plain(target.removesuffix(b" (deleted)"))

    def _bytes(self, pid: int, file: str) -> bytes:
        path = f"{self._root}/{pid}/{file}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(fd, 8192)
            finally:
                os.close(fd)
        except OSError as broken:
            if broken.errno in _GONE:
                raise Gone(f"process {pid} has ended") from broken
            if broken.errno in {errno.EACCES, errno.EPERM}:
                # hidepid, or a proc that is not ours to read: for us there is no such process.
                raise Gone(f"{path}: {broken.strerror}") from broken
            raise Unavailable(f"{path}: {broken.strerror}") from broken

    def _user(self, uid: int) -> str:
        name = self._users.get(uid)
        if name is None:
            try:
                name = plain(os.fsencode(pwd.getpwuid(uid).pw_name))
            except (KeyError, OverflowError):
                name = str(uid)
            if len(self._users) >= _NAMES_KEPT:
                self._users.clear()
            self._users[uid] = name
        return name


def parse_pressure(text: str) -> float | None:
    """The share of the last 10 s in which some task waited, from a PSI file; None if not there."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["some"]:
            for word in words[1:]:
                if word.startswith("avg10="):
                    try:
                        return min(max(float(word[6:]) / 100, 0.0), 1.0)
                    except ValueError:
                        return None
    return None


class HostNode:
    """CPUs, memory and pressure of the host."""

    def __init__(self, proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup") -> None:
        self._proc_root = proc_root
        self._cgroup_root = cgroup_root
        self._times: tuple[float, float] | None = None

    def read(self) -> NodeFacts:
        """Facts now; the busy share is since the reading before, None at first."""
        memory = psutil.virtual_memory()
        return NodeFacts(
            cpus=psutil.cpu_count() or 1,
            cpu_busy_ratio=self._busy(),
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            cpu_pressure_ratio=self._pressure("cpu"),
            memory_pressure_ratio=self._pressure("memory"),
            io_pressure_ratio=self._pressure("io"),
        )

    def _busy(self) -> float | None:
        times = psutil.cpu_times()
        # Guest time is part of user time already (proc_stat(5)).
        counted = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        busy, total = counted, counted + times.idle + times.iowait
        before, self._times = self._times, (busy, total)
        if before is None or total <= before[1]:
            return None
        return float(min(max((busy - before[0]) / (total - before[1]), 0.0), 1.0))

    def _pressure(self, what: str) -> float | None:
        """From /proc/pressure, or the root cgroup where only that has it; None without PSI."""
        for path in (
            f"{self._proc_root}/pressure/{what}",
            f"{self._cgroup_root}/{what}.pressure",
        ):
            try:
                with open(path, encoding="ascii", errors="replace") as file:
                    return parse_pressure(file.read(4096))
            except OSError:
                continue  # not built in, or switched off (psi=0): then the kernel does not say
        return None
