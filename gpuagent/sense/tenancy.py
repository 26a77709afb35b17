"""Which process belongs to which tenant: rules first, then what is found gets a stable name. Pure.

Rules are tried in order and the first one that fits claims the process, whether it uses a GPU or
not. What uses a GPU and is claimed by no rule makes a tenant of its own, named after the most
specific thing its cgroup path says; everything else at that place belongs to it as well.

Nobody's are the agent's own processes and the servers of CUDA MPS, which work for others: the
driver attributes the work of several tenants to one server (FACTS 2).
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from gpuagent.config import Found, Match, TenantRule
from gpuagent.model.inventory import GpuProcess, Level, Limits, Place, Process, Tenant
from gpuagent.sense.places import made_by_user, place_of

MPS_PROGRAMS = frozenset({"nvidia-cuda-mps-server", "nvidia-cuda-mps-control"})

_HEX = re.compile(r"[0-9a-f]+")
_SHORTEST_ID = 6
_ID_SHOWN = 12
_KNOWN_MOST = 4096

Fits = tuple[re.Pattern[str], ...]


class Rule:
    """A tenant rule made ready: each pattern that is given, compiled once."""

    def __init__(self, given: TenantRule) -> None:
        self.given = given
        match = given.match
        self._unit = _pattern(match.unit)
        # A pattern names a cgroup and everything below it.
        cgroup = match.cgroup.rstrip("/")
        self._cgroup = _pattern(cgroup, f"{cgroup}/*") if cgroup else ()
        container = match.container
        whole_id = len(container) >= _SHORTEST_ID and _HEX.fullmatch(container)
        self._container = _pattern(container, f"{container}*" if whole_id else "")
        self._pod = _pattern(match.pod, match.pod.replace("_", "-"))
        self._slurm_job = _pattern(match.slurm_job)
        self._user = _pattern(match.user)
        self._exe = _pattern(match.exe)
        self._empty = match == Match()
        self._trusting = bool(match.unit or match.container or match.cgroup) and not (
            match.user or match.cgroup.startswith("/user.slice/")
        )

    def fits(self, process: Process, place: Place) -> bool:
        """Whether the process shows all that the rule asks for. A rule that asks nothing fits none.

        A unit, container or cgroup below a user's own systemd could bear any name he likes: it
        counts only where the rule names the user, or a cgroup in /user.slice, too.
        """
        if self._empty or (self._trusting and made_by_user(process.cgroup)):
            return False
        return (
            _fits(self._unit, place.unit)
            and _fits(self._cgroup, process.cgroup)
            and _fits(self._container, place.container)
            and _fits(self._pod, place.pod)
            and _fits(self._slurm_job, place.slurm_job)
            and (_fits(self._user, process.user) or _fits(self._user, str(process.uid)))
            and _fits(self._exe, process.exe)
        )


def _pattern(*texts: str) -> Fits:
    return tuple(re.compile(fnmatch.translate(t)) for t in dict.fromkeys(texts) if t)


def _fits(patterns: Fits, text: str) -> bool:
    return not patterns or (bool(text) and any(p.match(text) for p in patterns))


class Rules:
    """All rules, in order. The answer for a kind of process is remembered, at most 4,096 of them."""

    def __init__(self, given: Iterable[TenantRule] = ()) -> None:
        self._rules = tuple(Rule(rule) for rule in given)
        self._known: dict[tuple[str, int, str, str], tuple[TenantRule | None]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rule.given.name for rule in self._rules)

    def claim(self, process: Process) -> TenantRule | None:
        """The first rule that fits; None for an MPS server and where none does."""
        if not self._rules or serves_mps(process):
            return None
        shows = (process.cgroup, process.uid, process.user, process.exe)
        known = self._known.get(shows)
        if known is None:
            place = place_of(process.cgroup)
            first = next((r.given for r in self._rules if r.fits(process, place)), None)
            if len(self._known) >= _KNOWN_MOST:
                self._known.clear()
            known = self._known[shows] = (first,)
        return known[0]


def serves_mps(process: Process) -> bool:
    """Whether it is a server or control daemon of CUDA MPS, by the name of its executable."""
    return process.exe.rpartition("/")[2] in MPS_PROGRAMS


def found_name(process: Process) -> str:
    """The stable name of what is found: of its pod, job, container or unit, else of its user.

    A login session's number changes with each login, so a session counts as its user. What a user's
    own systemd started bears his number, since two users may choose one name.
    """
    place = place_of(process.cgroup)
    whose = f"{place.uid}/" if place.uid is not None and made_by_user(process.cgroup) else ""
    if place.pod:
        return f"pod:{place.pod}"
    if place.slurm_job:
        return f"job:{place.slurm_job}"
    if place.container:
        hexadecimal = _HEX.fullmatch(place.container)
        shown = place.container[:_ID_SHOWN] if hexadecimal else place.container
        return f"container:{whose}{shown}"
    if place.unit and not place.session:
        return f"unit:{whose}{place.unit}"
    if place.home and not place.session:
        return f"cgroup:{whose}{place.home}"
    return f"user:{process.user}"


def own_processes(processes: Iterable[Process], agent_pid: int) -> frozenset[int]:
    """The agent, its children and theirs, and what shares its unit or container."""
    known = {p.pid: p for p in processes}
    agent = known.get(agent_pid)
    place = place_of(agent.cgroup) if agent is not None else Place()
    home = "" if place.session else place.home
    own = {agent_pid}
    for process in known.values():
        line: list[int] = []
        at: Process | None = process
        while at is not None and at.pid not in own and at.pid not in line:
            line.append(at.pid)
            at = known.get(at.ppid)
        if at is not None and at.pid in own:
            own.update(line)
        elif home and place_of(process.cgroup).home == home:
            own.add(process.pid)
    return frozenset(own)


class Claims(msgspec.Struct, frozen=True):
    """Tenants by name, and whose each of their processes is."""

    tenants: tuple[Tenant, ...]
    """Without seats, by name."""
    owner: Mapping[int, str]
    """Name of the tenant by pid."""


def assign(
    processes: Collection[Process],
    gpu_processes: Iterable[GpuProcess],
    *,
    rules: Rules,
    found: Found,
    own: frozenset[int] = frozenset(),
    since: Mapping[str, float] | None = None,
) -> Claims:
    """The tenants of these processes.

    A tenant exists as soon as one of its processes does, and no longer. `since` gives the monotonic
    seconds at which names were first seen.
    """
    cards: dict[int, set[str]] = {}
    for listed in gpu_processes:
        cards.setdefault(listed.pid, set()).add(listed.gpu)
    members: dict[str, list[Process]] = {}
    by_rule: dict[str, TenantRule] = {}
    rest: list[Process] = []
    for process in processes:
        if process.pid in own or serves_mps(process):
            continue
        rule = rules.claim(process)
        if rule is None:
            rest.append(process)
        else:
            by_rule[rule.name] = rule
            members.setdefault(rule.name, []).append(process)
    for name, some in _found(rest, cards).items():
        members.setdefault(name, []).extend(some)
    first_seen = since or {}
    tenants = tuple(
        _tenant(
            name,
            members[name],
            rule=by_rule.get(name),
            found=found,
            cards=cards,
            since=first_seen.get(name, 0.0),
        )
        for name in sorted(members)
    )
    return Claims(tenants, {p.pid: t.name for t in tenants for p in t.processes})


def _found(rest: Sequence[Process], cards: Mapping[int, set[str]]) -> dict[str, list[Process]]:
    """Unclaimed processes by name: those on a card, and the others at the place of one of these."""
    names = {found_name(p) for p in rest if p.pid in cards}
    members: dict[str, list[Process]] = {}
    if not names:
        return members
    for process in rest:
        name = found_name(process)
        # A user is not a place: his other processes have nothing to do with the card.
        if name in names and (process.pid in cards or not name.startswith("user:")):
            members.setdefault(name, []).append(process)
    return members


def _tenant(
    name: str,
    processes: Sequence[Process],
    *,
    rule: TenantRule | None,
    found: Found,
    cards: Mapping[int, set[str]],
    since: float,
) -> Tenant:
    level = found.sla if rule is None else rule.sla
    hold_back = found.hold_back if rule is None else rule.hold_back
    limits = (
        Limits()
        if rule is None
        else Limits(memory_limit_bytes=rule.memory_limit, min_share_ratio=rule.min_share)
    )
    places = {place_of(p.cgroup) for p in processes}
    return Tenant(
        name=name,
        level=level,
        rule="" if rule is None else rule.name,
        kind="" if rule is None else rule.kind,
        enforce=hold_back and level != Level.L1,
        limits=limits,
        places=tuple(sorted(places, key=lambda p: (p.home, p.unit, p.slurm_step, p.pod))),
        processes=tuple(sorted(processes, key=lambda p: p.pid)),
        gpus=tuple(sorted({gpu for p in processes for gpu in cards.get(p.pid, ())})),
        users=tuple(sorted({p.user for p in processes})),
        since=since,
    )
