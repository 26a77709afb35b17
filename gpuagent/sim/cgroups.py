"""The cgroup v2 tree of the simulated host, and its control files as the kernel reads and writes them."""

import contextlib
import math
from collections.abc import Sequence

from gpuagent.errors import Gone, Refused, Unsupported
from gpuagent.sim.cpu import Group

# Bounds of the kernel: kernel/sched/core.c (tg_set_cfs_bandwidth), cgroup-v2.rst for the weight.
_QUOTA_MIN_US = 1_000
_PERIOD_MIN_US = 1_000
_PERIOD_MAX_US = 1_000_000
_WEIGHT_MAX = 10_000
_FIRST_INODE = 1000


class SimCgroups:
    """Implements `ports.Cgroups`. Reading from other threads is safe: no call changes two things."""

    def __init__(self) -> None:
        self.root = Group("/", 1, None)
        self._groups: dict[str, Group] = {"/": self.root}
        self._last_inode = _FIRST_INODE

    # -- what the host does ---------------------------------------------------------------------------

    def owner(self, path: str, file: str) -> int:
        self.read(path, file)
        return 0

    def make(self, path: str) -> Group:
        """The group at this path, made with all above it where they are not there."""
        known = self._groups.get(path)
        if known is not None:
            return known
        above = self.make(path.rpartition("/")[0] or "/")
        self._last_inode += 1
        group = self._groups[path] = Group(path, self._last_inode, above)
        above.below.append(group)
        return group

    def remove(self, group: Group) -> None:
        """Its usage stays with those above, which have counted it."""
        for gone in group.family():
            del self._groups[gone.path]
        if group.above is not None:
            group.above.below.remove(group)

    # -- ports.Cgroups --------------------------------------------------------------------------------

    def tree(self) -> str:
        return "simulated"

    def inode(self, path: str) -> int:
        return self._group(path).inode

    def read(self, path: str, file: str) -> str:
        group = self._group(path)
        match file:
            case "cpu.max":
                quota = "max" if group.quota == math.inf else _us(group.quota * group.period)
                return f"{quota} {_us(group.period)}"
            case "cpu.weight":
                return str(group.weight)
            case "cpu.stat":
                return (
                    f"usage_usec {_us(group.usage_seconds)}\n"
                    f"nr_periods {group.periods:.0f}\n"
                    f"nr_throttled {group.throttled_periods:.0f}\n"
                    f"throttled_usec {_us(group.throttled_seconds)}"
                )
            case "memory.current":
                return f"{sum(g.memory_bytes for g in group.family()):.0f}"
            case "cpu.pressure" if not group.below:
                return group.pressure.text()
            case "cgroup.freeze" if group.above is not None:
                return str(int(group.freeze))
            case "cgroup.events" if group.above is not None:
                populated = any(g.processes for g in group.family())
                return f"populated {populated:d}\nfrozen {group.frozen:d}"
        raise Unsupported(f"{path}/{file}: no such control file")

    def read_all(self, path: str, inode: int, files: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        if self._group(path).inode != inode:
            raise Gone(f"{path}: another cgroup has taken this path")
        for file in files:
            with contextlib.suppress(Unsupported):
                found[file] = self.read(path, file)
        return found

    def write(self, path: str, inode: int, file: str, text: str) -> None:
        group = self._group(path)
        if group.inode != inode:
            raise Gone(f"{path}: another cgroup has taken this path")
        match file:
            case "cpu.max":
                group.quota, group.period = _quota(group, text)
            case "cpu.weight":
                if not (_whole(text) and 1 <= int(text) <= _WEIGHT_MAX):
                    raise _refused(path, file, text)
                group.weight = int(text)
            case "cgroup.freeze" if group.above is not None:
                value = text.removesuffix("\n")
                if value not in {"0", "1"}:
                    raise _refused(path, file, text)
                group.set_freeze(value == "1")
            case _:
                self.read(path, file)
                raise Refused(f"{path}/{file}: cannot be written")

    def _group(self, path: str) -> Group:
        group = self._groups.get(path)
        if group is None:
            raise Gone(f"{path}: no such cgroup")
        return group


def _quota(group: Group, text: str) -> tuple[float, float]:
    """Cores and period in seconds of a text for cpu.max."""
    words = text.split()
    if not 1 <= len(words) <= 2 or not all(_whole(w) for w in words[words[:1] == ["max"] :]):
        raise _refused(group.path, "cpu.max", text)
    period = int(words[1]) if len(words) == 2 else round(group.period * 1e6)
    if not _PERIOD_MIN_US <= period <= _PERIOD_MAX_US:
        raise _refused(group.path, "cpu.max", text)
    if words[0] == "max":
        return math.inf, period / 1e6
    if int(words[0]) < _QUOTA_MIN_US:
        raise _refused(group.path, "cpu.max", text)
    return int(words[0]) / period, period / 1e6


def _refused(path: str, file: str, text: str) -> Refused:
    return Refused(f"{path}/{file}: the kernel does not accept {text[:80]!r}")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
