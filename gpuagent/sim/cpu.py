"""How CPU time is shared out among control groups: quotas, weights, and who waits. Pure but for state.

Theory of operation. Every group has a demand in cores and gets at most its quota. Among siblings
what a group of little demand leaves over goes to the others, in proportion to `cpu.weight`
(Documentation/admin-guide/cgroup-v2.rst, "Weights"). What is demanded and not given waits. Pressure
is the waiting share of the time in which CPUs were not idle, as kernel/sched/psi.c weighs it.
"""

import math

from gpuagent.sim.profiles import HostProfile

_WINDOWS = (10.0, 60.0, 300.0)
_NONE = 1e-9
"""An average below this is none, and need not be brought nearer to it."""


class Pressure:
    """PSI "some" of one group: running averages, and the total."""

    def __init__(self) -> None:
        self.averages = [0.0] * len(_WINDOWS)
        self.total_seconds = 0.0

    def count(self, share: float, seconds: float, weights: tuple[float, ...]) -> None:
        """`share` of `seconds` was spent waiting; `weights` are those of `decay(seconds)`."""
        averages = self.averages
        for i, weight in enumerate(weights):
            averages[i] += (share - averages[i]) * weight
        self.total_seconds += share * seconds

    @property
    def none(self) -> bool:
        """Whether there has been none for so long that nothing is left to be counted."""
        return self.averages[-1] < _NONE

    def text(self) -> str:
        """As the kernel prints it; cpu pressure "full" is not simulated."""
        shown = " ".join(
            f"avg{window:.0f}={100 * average:.2f}"
            for window, average in zip(_WINDOWS, self.averages, strict=True)
        )
        none = " ".join(f"avg{window:.0f}=0.00" for window in _WINDOWS)
        return f"some {shown} total={self.total_seconds * 1e6:.0f}\nfull {none} total=0"


def decay(seconds: float) -> tuple[float, ...]:
    """How far each running average moves in so long."""
    return tuple(1.0 - math.exp(-seconds / window) for window in _WINDOWS)


class Group:
    """One control group: its settings, its demand, what it was given, and its counters."""

    def __init__(self, path: str, inode: int, above: "Group | None") -> None:
        self.path = path
        self.inode = inode
        self.above = above
        self.below: list[Group] = []
        self.weight = 100
        self.quota = math.inf
        """In cores."""
        self.period = 0.1
        self.demand = 0.0
        self.want = 0.0
        """What it would use if nobody else were there."""
        self.given = 0.0
        self.usage_seconds = 0.0
        self.periods = 0.0
        self.throttled_periods = 0.0
        self.throttled_seconds = 0.0
        self.pressure = Pressure()
        self.memory_bytes = 0.0
        self.processes = 0
        """In this group itself."""
        self.freeze = False
        """As written to cgroup.freeze."""
        self.frozen: bool = above is not None and above.frozen
        """Whether it or a group above it is to be frozen."""

    @property
    def ratio(self) -> float:
        """Share of its demand that it was given; 1 where it wants nothing."""
        return self.given / self.demand if self.demand > 0 else 1.0

    def family(self) -> "list[Group]":
        """This group and all below it."""
        return [self, *(g for child in self.below for g in child.family())]

    def set_freeze(self, freeze: bool) -> None:
        """Freeze or thaw it and all below; what is frozen from above stays so.

        The kernel takes a few milliseconds for it, which is less than a step.
        """
        self.freeze = freeze
        self.inherit_freeze()

    def inherit_freeze(self) -> None:
        above = self.above is not None and self.above.frozen
        self.frozen = self.freeze or above
        for child in self.below:
            child.inherit_freeze()


class Cpus:
    """All CPUs of the host."""

    def __init__(self, profile: HostProfile, root: Group, *, cpus: int, step: float) -> None:
        self.count = cpus
        self.busy_seconds = 0.0
        self.pressure = Pressure()
        self._root = root
        self._throttled_counts = profile.throttled_counts_in_node_pressure.value
        self._step = step
        self._decay = decay(step)

    def share(self) -> None:
        """Give out the CPU time of one step by the demand of each group without children."""
        if _want(self._root) or self._root.want > self.count:
            _give(self._root, min(float(self.count), self._root.want))
        waiting = self._account(self._root)
        busy = self._root.given
        self.busy_seconds += busy * self._step
        if waiting == 0.0 and self.pressure.none:
            return
        active = min(busy + waiting, float(self.count))
        self.pressure.count(min(waiting / max(active, 1.0), 1.0), self._step, self._decay)

    def _account(self, group: Group) -> float:
        """Count what the group got and did not get; threads that wait, as the node sees them."""
        step = self._step
        group.usage_seconds += group.given * step
        if group.quota != math.inf and group.demand > 0:
            group.periods += step / group.period
            if group.demand > group.quota:
                group.throttled_periods += step / group.period
                group.throttled_seconds += (group.demand - group.quota) * step
        if group.below:
            waiting = 0.0
            for child in group.below:
                waiting += self._account(child)
            return waiting
        lacking = group.demand - group.given
        if lacking > 0 or not group.pressure.none:
            share = lacking / group.demand if lacking > 0 else 0.0
            group.pressure.count(share, step, self._decay)
        return lacking if self._throttled_counts else group.want - group.given


def _want(group: Group) -> bool:
    """Add up demands, and give everybody what he wants; whether a quota further up forbids that."""
    short = False
    if group.below:
        group.demand = 0.0
        for child in group.below:
            short |= _want(child)
            group.demand += child.want
        short |= group.demand > group.quota
    group.want = group.given = min(group.demand, group.quota)
    return short


def _give(group: Group, cores: float) -> None:
    """Share out what a group was given among its children: to each by weight, to none too much."""
    group.given = cores
    left = [g for g in group.below if g.want > 0]
    for child in group.below:
        if child.want <= 0:
            _give(child, 0.0)
    if sum(g.want for g in left) <= cores:
        for child in left:
            _give(child, child.want)
        return
    while left:
        each = cores / sum(g.weight for g in left)
        content = [g for g in left if g.want <= g.weight * each]
        if not content:
            for child in left:
                _give(child, child.weight * each)
            return
        for child in content:
            _give(child, child.want)
            cores -= child.want
        left = [g for g in left if g not in content]
