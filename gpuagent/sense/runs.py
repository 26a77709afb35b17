"""Sensor `runs`: which of the runs that were admitted have ended; and whose the processes of each are."""

import asyncio
from collections.abc import Collection, Iterable, Mapping

from gpuagent.config import Match, TenantRule
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.model.inventory import Process, on_tenant
from gpuagent.model.run import Key, Reservation, gib
from gpuagent.model.state import Event, Instant, NodeState, Sensed
from gpuagent.ports import Cgroups, Processes, Runs


class NoRuns:
    """Where nobody can start any. Implements `ports.Runs`."""

    def active(self) -> tuple[Reservation, ...]:
        return ()

    def end(self, keys: Collection[Key]) -> None:
        """There is none to end."""


class RunEnds:
    """A run lives as long as its process does, and beyond that as long as its scope has another."""

    name = "runs"
    interval = 1.0

    def __init__(self, runs: Runs, *, processes: Processes, cgroups: Cgroups) -> None:
        self._runs = runs
        self._processes = processes
        self._cgroups = cgroups

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """An event for each that has ended. Raises Unavailable where /proc cannot be read."""
        active = self._runs.active()
        if not active:
            return Sensed()
        ended = await asyncio.to_thread(lambda: [r for r in active if not self._lives(r)])
        self._runs.end([r.key for r in ended])
        return Sensed(events=tuple(_ended(r, now) for r in ended))

    def _lives(self, run: Reservation) -> bool:
        try:
            if self._processes.read(run.pid).started == run.started:
                return True
        except Gone:
            pass
        return bool(run.cgroup) and self._populated(run.cgroup)

    def _populated(self, cgroup: str) -> bool:
        try:
            return "populated 1" in self._cgroups.read(cgroup, "cgroup.events").splitlines()
        except Gone:
            return False
        except (Refused, Unsupported, Unavailable):
            return True  # nobody knows, and a promise does not end for that


def _ended(run: Reservation, now: Instant) -> Event:
    lasted = max(0.0, now.wall - run.began_wall)
    free = ""
    if run.memory_bytes is not None:
        free = f"; the {gib(run.memory_bytes)} on each of its cards are free again"
    text = f"run {run.name} of {run.by} has ended after {lasted:.0f} s{free}"
    return Event("run-ended", now.mono, text, on_tenant(run.name), (("seconds", lasted),))


# -- as tenants ----------------------------------------------------------------------------------------


def rule_of(run: Reservation, declared: Collection[str] = ()) -> TenantRule:
    """The rule that claims what is in its scope; without a scope it claims nothing by itself.

    A run whose name is that of a `declared` rule since is not that tenant: it goes on under another.
    """
    return TenantRule(
        name=f"run:{run.name}" if run.name in declared else run.name,
        sla=run.level,
        match=Match(cgroup=_literally(run.cgroup)),
        memory_limit=run.memory_bytes,
        memory_reserved=run.memory_bytes,
        compute_share=run.share_ratio,
    )


def descended(
    processes: Iterable[Process], roots: Mapping[Key, TenantRule]
) -> tuple[dict[str, tuple[TenantRule, list[Process]]], tuple[Process, ...]]:
    """The processes that descend from one of the roots, or are one, by their rule's name; and the others."""
    everybody = tuple(processes)
    rules = _heirs(everybody, roots) if roots else {}
    members: dict[str, tuple[TenantRule, list[Process]]] = {}
    for process in everybody:
        if (rule := rules.get(process.pid)) is not None:
            members.setdefault(rule.name, (rule, []))[1].append(process)
    return members, tuple(p for p in everybody if p.pid not in rules)


def _heirs(processes: Iterable[Process], roots: Mapping[Key, TenantRule]) -> dict[int, TenantRule]:
    """The rule by pid; of two roots above a process, the nearest counts."""
    known = {p.pid: p for p in processes}
    found: dict[int, TenantRule | None] = {}
    for process in known.values():
        line: list[int] = []
        at: Process | None = process
        rule: TenantRule | None = None
        while at is not None and at.pid not in found and at.pid not in line:
            line.append(at.pid)
            rule = roots.get((at.pid, at.started))
            if rule is not None:
                break
            at = known.get(at.ppid)
        else:
            rule = found.get(at.pid) if at is not None else None
        found.update(dict.fromkeys(line, rule))
    return {pid: rule for pid, rule in found.items() if rule is not None}


def _literally(path: str) -> str:
    """A path as a pattern that fits nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in path)
