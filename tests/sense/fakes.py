"""A host of values: processes, cgroups and events that tests put there."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from gpuagent.clock import Clock
from gpuagent.errors import Gone, Unavailable, Unsupported
from gpuagent.model.inventory import Process
from gpuagent.model.state import Health, Instant
from gpuagent.ports import Cgroups, Processes, ProcessEvents


def process(pid: int, cgroup: str = "/", **fields: object) -> Process:
    """A process of user 1000, alice, that runs Python; `fields` say what is different."""
    given: dict[str, object] = {
        "pid": pid,
        "started": 1000 + pid,
        "ppid": 1,
        "uid": 1000,
        "user": "alice",
        "name": "python3",
        "exe": "/usr/bin/python3.11",
        "cgroup": cgroup,
    }
    return Process(**{**given, **fields})  # type: ignore[arg-type]  # checked by msgspec's decoder only


class FakeProcesses:
    """Processes by pid; `broken` makes the table unreadable."""

    def __init__(self, *processes: Process) -> None:
        self.all = {p.pid: p for p in processes}
        self.broken = ""
        self.tables = 0
        self.reads = 0
        self.looked_at: list[int] = []
        """Whom somebody asked for again."""

    def put(self, *processes: Process) -> None:
        self.all.update({p.pid: p for p in processes})

    def read(self, pid: int) -> Process:
        self.reads += 1
        return self._at(pid)

    def _at(self, pid: int) -> Process:
        if pid not in self.all:
            raise Gone(f"process {pid} has ended")
        return self.all[pid]

    def again(self, known: Process) -> Process:
        self.looked_at.append(known.pid)
        process = self._at(known.pid)
        return known if process == known else process

    def cgroup(self, pid: int) -> str:
        return self._at(pid).cgroup

    def table(self) -> Sequence[Process]:
        self.tables += 1
        if self.broken:
            raise Unavailable(self.broken)
        return tuple(self.all.values())


class FakeCgroups:
    """Control files by cgroup and name; a cgroup's inode is given or made up once.

    `broken` says why there is no tree.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, str]] = {}
        self.inodes: dict[str, int] = {}
        self.broken = ""

    def make(self, path: str, **files: str) -> None:
        """A cgroup with all above it; `cpu_max="..."` is the file cpu.max."""
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts) + 1):
            above = "/" + "/".join(parts[:depth])
            self.inodes.setdefault(above, 100 + len(self.inodes))
            self.files.setdefault(above, {})
        self.files[path].update({k.replace("_", ".", 1): v for k, v in files.items()})

    def remove(self, path: str) -> None:
        del self.inodes[path], self.files[path]

    def tree(self) -> str:
        if self.broken:
            raise Unavailable(self.broken)
        return "fake"

    def inode(self, path: str) -> int:
        self.tree()
        if path not in self.inodes:
            raise Gone(f"{path}: no such cgroup")
        return self.inodes[path]

    def read(self, path: str, file: str) -> str:
        self.inode(path)
        if file not in self.files[path]:
            raise Unsupported(f"{path}/{file}: no such control file")
        return self.files[path][file]

    def owner(self, path: str, file: str) -> int:
        self.read(path, file)
        return 0

    def read_all(self, path: str, inode: int, files: Sequence[str]) -> dict[str, str]:
        if self.inode(path) != inode:
            raise Gone(f"{path}: another cgroup has taken this path")
        return {f: self.files[path][f] for f in files if f in self.files[path]}

    def write(self, path: str, inode: int, file: str, text: str) -> None:
        if self.inode(path) != inode:
            raise Gone(f"{path}: another cgroup has taken this path")
        self.read(path, file)
        self.files[path][file] = text


class FakeEvents:
    """What was asked for, and what tests let be heard."""

    def __init__(self) -> None:
        self.health = Health("process_events", up=True)
        self.pids: frozenset[int] = frozenset()
        self.matters: Callable[[int], bool] | None = None
        self.queue: list[tuple[int, Literal["exec", "exit"]]] = []

    def watch(self, pids: Collection[int], matters: Callable[[int], bool] | None) -> None:
        self.pids, self.matters = frozenset(pids), matters

    def take(self) -> list[tuple[int, Literal["exec", "exit"]]]:
        heard, self.queue = self.queue, []
        return heard


class OwnClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.mono = 100.0

    def now(self) -> Instant:
        return Instant(self.mono, 1_700_000_000 + self.mono)

    async def sleep(self, seconds: float) -> None:
        self.mono += seconds


_fits: tuple[Processes, Cgroups, ProcessEvents, Clock] = (
    FakeProcesses(),
    FakeCgroups(),
    FakeEvents(),
    OwnClock(),
)
"""The fakes are what the protocols ask for: mypy looks."""
