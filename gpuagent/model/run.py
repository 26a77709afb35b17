"""Runs: tenants that `gpuagent run` starts, what is reserved for each, and why one was refused."""

import re
from typing import Literal

import msgspec

from gpuagent.model.inventory import Level

MOST_RUNS = 256
MOST_RUNS_OF_USER = 32
"""Root and the group of administrators are bound by `MOST_RUNS` only."""
MOST_CARDS = 64
REFUSALS_OF_USER = 5
REFUSED_USERS = 64
"""Of so many users the last refusals are remembered."""
BYTES_MOST = 1 << 50
CPU_WEIGHT_MOST = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
"""What a run may be called: nothing that is found is called so, since that has a colon."""
CARD = re.compile(r"[A-Za-z0-9-]{1,64}")
"""A card as somebody names it: UUID or index."""
CGROUP_MOST = 4096
NOTES_MOST = 8

Key = tuple[int, int]
"""Names a run: the process and its start time."""


class RunAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for, and by whom: all that the kernel says of who asks."""

    pid: int
    """Of the process that becomes the tenant: the one that asks."""
    started: int
    uid: int
    gids: frozenset[int] = frozenset()
    admin: bool = False
    by: str
    level: Level
    name: str = ""
    """Empty to be given one."""
    memory_bytes: int | None = None
    """Device memory on each of its cards."""
    share_ratio: float | None = None
    """Part of the multiprocessors of each card."""
    gpus: tuple[str, ...] = ()
    """UUIDs or indices; () for any `count` cards."""
    count: int = 1
    cpu_weight: int | None = None
    host_memory_bytes: int | None = None
    """`memory.max` of its scope."""
    strict: bool = False
    """Whether it is not to run without a scope that keeps what is asked."""

    @property
    def key(self) -> Key:
        return (self.pid, self.started)

    @property
    def words(self) -> str:
        """What is asked for, for people."""
        where = "on one card" if self.count == 1 else f"on {self.count} cards"
        if self.gpus:
            where = "on " + ", ".join(f"GPU {g}" if g.isdigit() else g for g in self.gpus)
        parts = [self.level.name, where]
        if self.memory_bytes is not None:
            parts.append(f"with {gib(self.memory_bytes)} on each")
        if self.share_ratio is not None:
            parts.append(f"and {self.share_ratio:.0%} of it")
        return " ".join(parts)

    def fault(self) -> str:
        """What is wrong with it, whatever the host is like; empty if nothing is."""
        if self.name and not NAME.fullmatch(self.name):
            return (
                "the name of a run has 1 to 63 letters, digits and ._@-, and begins with a letter "
                "or a digit"
            )
        if not 1 <= self.count <= MOST_CARDS or len(self.gpus) > MOST_CARDS:
            return f"a run has 1 to {MOST_CARDS} cards"
        if not all(CARD.fullmatch(name) for name in self.gpus):
            return "a card is named by its UUID or its index"
        if not all(
            size is None or 0 < size <= BYTES_MOST
            for size in (self.memory_bytes, self.host_memory_bytes)
        ):
            return "a size is more than 0, and no host has so much as that"
        if self.share_ratio is not None and not 0.01 <= self.share_ratio <= 1:
            return "a share is between 1 % and 100 %"
        if self.cpu_weight is not None and not 1 <= self.cpu_weight <= CPU_WEIGHT_MOST:
            return f"a CPU weight is between 1 and {CPU_WEIGHT_MOST}"
        return ""


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was admitted: what is promised to it for as long as it lives."""

    name: str
    level: Level
    pid: int
    started: int
    uid: int
    by: str
    gpus: tuple[str, ...]
    """UUIDs."""
    memory_bytes: int | None = None
    share_ratio: float | None = None
    began_wall: float
    unit: str = ""
    """Its scope; empty where it has none, and is known by its pid and the children of that only."""
    cgroup: str = ""
    """Of that scope."""
    notes: tuple[str, ...] = ()
    """What was asked for and could not be had, each a sentence."""

    @property
    def key(self) -> Key:
        return (self.pid, self.started)

    def fault(self) -> str:
        """Why no agent of ours can have made it; empty if one can."""
        if not NAME.fullmatch(self.name) or self.pid <= 0 or self.started < 0 or self.uid < 0:
            return "it names no run"
        if len(self.gpus) > MOST_CARDS or len(self.notes) > NOTES_MOST:
            return "it has too many cards or notes"
        if self.memory_bytes is not None and not 0 < self.memory_bytes <= BYTES_MOST:
            return "its memory is not credible"
        if self.share_ratio is not None and not 0 < self.share_ratio <= 1:
            return "its share is not credible"
        if len(self.cgroup) > CGROUP_MOST or (self.cgroup and not self.cgroup.startswith("/")):
            return "its cgroup is no path"
        return ""


Why = Literal["forbidden", "refused", "unavailable"]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run was not started, with what led to it."""

    kind: Why
    why: str
    remedy: str = ""
    numbers: tuple[tuple[str, float], ...] = ()
    """What was compared, by name, in base units."""
    uid: int = 0
    by: str = ""
    asked: str = ""
    wall: float = 0.0
    number: int = 0
    """Counts the refusals of a run of the agent, from 1."""

    @property
    def text(self) -> str:
        return f"{self.why}; {self.remedy}" if self.remedy else self.why


class RunList(msgspec.Struct, frozen=True):
    """All of them, for readers."""

    active: tuple[Reservation, ...] = ()
    """By name."""
    refused: tuple[Refusal, ...] = ()
    """The last of each user, oldest first."""

    def of_tenant(self, name: str) -> Reservation | None:
        return next((r for r in self.active if r.name == name), None)

    def of_process(self, key: Key) -> Reservation | None:
        return next((r for r in self.active if r.key == key), None)


class Starter(msgspec.Struct, frozen=True):
    """Who may start tenants of which levels, by number; None for anybody."""

    uid: int | None
    gid: int | None
    levels: tuple[Level, ...]

    def allows(self, ask: RunAsk) -> bool:
        return (
            ask.level in self.levels
            and (self.uid is None or self.uid == ask.uid)
            and (self.gid is None or self.gid in ask.gids)
        )


def gib(size: float) -> str:
    """A size for people."""
    return f"{size / 2**30:.4g} GiB" if size >= 2**30 else f"{size / 2**20:.4g} MiB"
