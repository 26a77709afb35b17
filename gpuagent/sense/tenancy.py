"""Which process belongs to which tenant: rules first, then what is found gets a stable name. Pure.

A tenant must not be able to pass for another, nor to share its cgroup with another so that it can
no longer be held back. Therefore:

- A *household* has one owner: all that runs in one container, Slurm job, machine or unit of a
  user's own systemd, and all that one user runs in one unit of the system or in one folder. Only in
  login sessions, and where a cgroup is nobody's home, each process stands for itself.
- A rule that names the place (unit, cgroup, container, pod, Slurm job) comes before one that knows
  only user or executable; then the oldest process that a rule fits decides, by the first rule that
  fits it. What is started later changes nothing.
- User and executable count as far as somebody else vouches for them. The kernel vouches for the
  user of a process, but not in a container, pod or machine, where they count only beside a match of
  the container, pod or job itself. In a Slurm job the user must be the job's, and below a user's own
  systemd he must be that user; only beside this does the executable count there.

What uses a GPU and is claimed by no rule makes a tenant of its own, named after the most specific
thing its cgroup path says; everything else that is unclaimed at that place belongs to it as well.

Nobody's are the agent's own processes and the servers of CUDA MPS, which work for others: the
driver attributes the work of several tenants to one server (FACTS 2).
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from gpuagent.config import TenantRule
from gpuagent.model.inventory import GpuProcess, Place, Process, Tenant
from gpuagent.model.run import Reservation
from gpuagent.sense.places import delegated_to, made_by_user, place_of, walled
from gpuagent.sense.runs import descended, rule_of
from gpuagent.sense.terms import Terms

_MPS_CONTROL = "nvidia-cuda-mps-control"
_MPS_PROGRAMS = frozenset({"nvidia-cuda-mps-server", _MPS_CONTROL})

_HEX = re.compile(r"[0-9a-f]+")
_SHORTEST_ID = 6
_ID_SHOWN = 12
_KNOWN_MOST = 4096
_PROCESSES_MOST = 256
"""A tenant lists so many of its processes, and all of those on a card."""

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
        self._names_inside = bool(match.container or match.pod or match.slurm_job)
        self._names_user_tree = match.cgroup.startswith("/user.slice/")
        self.names_place = self._names_inside or bool(match.unit or match.cgroup)

    def fits(self, process: Process, place: Place, *, vouched: bool) -> bool:
        """Whether the process shows all that the rule asks for. A rule that asks nothing fits none.

        `vouched` says whether its user is known from somebody other than the process.
        """
        return (
            (self.names_place or bool(self._user or self._exe))
            and self._may_claim(process, place, vouched=vouched)
            and self.fits_place(process.cgroup, place)
            and (_fits(self._user, process.user) or _fits(self._user, str(process.uid)))
            and _fits(self._exe, process.exe)
        )

    def fits_place(self, cgroup: str, place: Place) -> bool:
        """Whether a process in this cgroup can fit, whoever it is and whatever it runs."""
        return (
            _fits(self._unit, place.unit)
            # What a place calls the cgroups below its own is its own affair.
            and _fits(self._cgroup, place.home or cgroup)
            and _fits(self._container, place.container)
            and _fits(self._pod, place.pod)
            and _fits(self._slurm_job, place.slurm_job)
        )

    def _may_claim(self, process: Process, place: Place, *, vouched: bool) -> bool:
        """Whether what the rule asks for is evidence at this place.

        A unit, container or cgroup below a user's own systemd could bear any name he likes: it
        counts only where the rule names the user, or a cgroup in /user.slice, too.
        """
        if made_by_user(process.cgroup):
            return vouched if self._user else self._names_user_tree
        if not walled(process.cgroup) or self._names_inside:
            return True
        if place.slurm_job and self._user:
            return vouched
        return not (self._user or self._exe)


def _pattern(*texts: str) -> Fits:
    return tuple(re.compile(fnmatch.translate(t)) for t in dict.fromkeys(texts) if t)


def _fits(patterns: Fits, text: str) -> bool:
    return not patterns or (bool(text) and any(p.match(text) for p in patterns))


class Rules:
    """All rules, in order, after those of `runs`. At most 4,096 answers are remembered."""

    def __init__(self, given: Iterable[TenantRule] = (), runs: Iterable[Reservation] = ()) -> None:
        given, runs = tuple(given), tuple(runs)
        declared = frozenset(r.name for r in given)
        self.roots = {r.key: rule_of(r, declared) for r in runs if not r.cgroup}
        """Who is known by descent, since it has no cgroup of its own."""
        rules = tuple(Rule(r) for r in (*(rule_of(r, declared) for r in runs if r.cgroup), *given))
        self._by_place = tuple(rule for rule in rules if rule.names_place)
        self._by_process = tuple(rule for rule in rules if not rule.names_place)
        self.names = tuple(rule.given.name for rule in rules)
        self._known: dict[
            tuple[str, int, str, str, int | None], tuple[TenantRule | None, TenantRule | None]
        ] = {}
        self._may: dict[str, frozenset[str]] = {}

    def may_claim(self, cgroup: str) -> frozenset[str]:
        """Names of the rules that a process in this cgroup could fit, as far as the path tells."""
        known = self._may.get(cgroup)
        if known is None:
            place = place_of(cgroup)
            rules = (*self._by_place, *self._by_process)
            known = frozenset(r.given.name for r in rules if r.fits_place(cgroup, place))
            if len(self._may) >= _KNOWN_MOST:
                self._may.clear()
            self._may[cgroup] = known
        return known

    def claim(self, process: Process) -> TenantRule | None:
        """The rule that has this process if it is alone at its place; None for an MPS server."""
        return None if serves_mps(process) else self.owner((process,))

    def owner(self, household: Sequence[Process]) -> TenantRule | None:
        """The rule that has all of these, who are the oldest first; None where none fits."""
        if not self.names:
            return None
        # Only root can start the first process of a Slurm job as somebody else.
        job_uid = next((p.uid for p in household if p.uid != 0), None)
        by_process: TenantRule | None = None
        for process in household:
            named, other = self._first(process, job_uid)
            if named is not None:
                return named
            by_process = by_process or other
        return by_process

    def _first(
        self, process: Process, job_uid: int | None
    ) -> tuple[TenantRule | None, TenantRule | None]:
        """The first rule that fits of those that name a place, and of the others."""
        shows = (process.cgroup, process.uid, process.user, process.exe, job_uid)
        known = self._known.get(shows)
        if known is None:
            if len(self._known) >= _KNOWN_MOST:
                self._known.clear()
            place = place_of(process.cgroup)
            vouched = _vouched(process, place, job_uid)
            named, other = (
                next((r.given for r in some if r.fits(process, place, vouched=vouched)), None)
                for some in (self._by_place, self._by_process)
            )
            known = self._known[shows] = (named, other)
        return known


def _vouched(process: Process, place: Place, job_uid: int | None) -> bool:
    """Whether somebody other than the process says who its user is."""
    ruler = delegated_to(process.cgroup)
    if ruler is not None:
        return process.uid == ruler
    if place.slurm_job:
        return process.uid == (job_uid if place.uid is None else place.uid)
    return not walled(process.cgroup) or (made_by_user(process.cgroup) and not place.container)


def households(processes: Iterable[Process]) -> Collection[Sequence[Process]]:
    """Processes that have one owner together, each household with its oldest first."""
    found: dict[tuple[str, int], list[Process]] = {}
    for process in sorted(processes, key=lambda p: (p.started, p.pid)):
        place = place_of(process.cgroup)
        if not place.home or place.session:
            key = ("", process.pid)
        elif walled(process.cgroup):
            key = (place.home, -1)
        else:
            key = (place.home, process.uid)
        found.setdefault(key, []).append(process)
    return found.values()


def serves_mps(process: Process, parent: Process | None = None) -> bool:
    """Whether it is a server or control daemon of CUDA MPS that works for the whole host.

    Anybody can give a program that name. It counts only outside containers, pods, jobs and users'
    own trees, as root's or as a child of root's control daemon, which starts a server under the
    user of its clients. An MPS of a user's own serves nobody else, and is that user's.
    """
    if _program(process) not in _MPS_PROGRAMS or walled(process.cgroup):
        return False
    return process.uid == 0 or (
        parent is not None
        and parent.uid == 0
        and _program(parent) == _MPS_CONTROL
        and not walled(parent.cgroup)
    )


def mps_servers(processes: Iterable[Process]) -> frozenset[int]:
    """The pids of those that serve CUDA MPS for the whole host."""
    named = [p for p in processes if _program(p) in _MPS_PROGRAMS]
    known = {p.pid: p for p in named}
    return frozenset(p.pid for p in named if serves_mps(p, known.get(p.ppid)))


def _program(process: Process) -> str:
    return process.exe.rpartition("/")[2]


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
    """The agent, what shares its unit or container, and the children of all these and theirs."""
    known = {p.pid: p for p in processes}
    agent = known.get(agent_pid)
    place = place_of(agent.cgroup) if agent is not None else Place()
    home = "" if place.session else place.home
    own = {agent_pid}
    if home:
        own |= {p.pid for p in known.values() if place_of(p.cgroup).home == home}
    others: set[int] = set()
    for process in known.values():
        line: list[int] = []
        at: Process | None = process
        while at is not None and at.pid not in own and at.pid not in others:
            line.append(at.pid)
            others.add(at.pid)
            at = known.get(at.ppid)
        if at is not None and at.pid in own:
            own.update(line)
            others.difference_update(line)
    return frozenset(own)


class Claims(msgspec.Struct, frozen=True):
    """Tenants by name, and whose each of their processes is."""

    tenants: tuple[Tenant, ...]
    """Without seats, by name."""
    owner: Mapping[int, str]
    """Name of the tenant by pid: of every process, also those that the tenant does not list."""
    mps: frozenset[int] = frozenset()
    """Pids of the servers of CUDA MPS, which are nobody's."""


def assign(
    processes: Collection[Process],
    gpu_processes: Iterable[GpuProcess],
    *,
    rules: Rules,
    terms: Terms,
    own: frozenset[int] = frozenset(),
    since: Mapping[str, float] | None = None,
    once: Collection[int] = (),
) -> Claims:
    """The tenants of these processes.

    A tenant exists as soon as one of its processes does, and no longer. `since` gives the monotonic
    seconds at which names were first seen; `once` are processes that have been on a card: a crowd does
    not hide them, for one that is suspended is on none.
    """
    cards: dict[int, set[str]] = {}
    for listed in gpu_processes:
        cards.setdefault(listed.pid, set()).add(listed.gpu)
    servers = mps_servers(processes)
    nobodys = own | servers
    by_rule, rest = _claimed((p for p in processes if p.pid not in nobodys), rules)
    members = {rule.name: some for rule, some in by_rule} | _found(rest, cards)
    given = {rule.name: rule for rule, _ in by_rule}
    first_seen = since or {}
    tenants = tuple(
        _tenant(
            name,
            members[name],
            rule=given.get(name),
            terms=terms,
            cards=cards,
            once=once,
            since=first_seen.get(name, 0.0),
        )
        for name in sorted(members)
    )
    return Claims(tenants, {p.pid: name for name in members for p in members[name]}, servers)


def _claimed(
    processes: Iterable[Process], rules: Rules
) -> tuple[list[tuple[TenantRule, list[Process]]], list[Process]]:
    """Each rule that has somebody, with whom it has; and those that none has."""
    members, others = descended(processes, rules.roots)
    rest: list[Process] = []
    for household in households(others):
        rule = rules.owner(household)
        if rule is None:
            rest.extend(household)
        else:
            members.setdefault(rule.name, (rule, []))[1].extend(household)
    return list(members.values()), rest


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
    terms: Terms,
    cards: Mapping[int, set[str]],
    once: Collection[int],
    since: float,
) -> Tenant:
    bond = terms.bind(rule)
    with_card = {place_of(p.cgroup).home for p in processes if p.pid in cards}
    places = sorted(
        {place_of(p.cgroup) for p in processes},
        key=lambda p: (p.home not in with_card, p.home, p.unit, p.slurm_step, p.pod),
    )
    first = sorted(processes, key=lambda p: (p.pid not in cards, p.pid not in once, p.pid))
    on_card = sum(p.pid in cards for p in processes)
    listed = first[: max(_PROCESSES_MOST, on_card)]
    return Tenant(
        name=name,
        level=bond.level,
        rule="" if rule is None else rule.name,
        kind="" if rule is None else rule.kind,
        enforce=bond.holds,
        limits=bond.limits,
        levers=bond.levers,
        observed=bond.observed,
        hours=bond.hours,
        notice=bond.notice,
        places=tuple(places),
        processes=tuple(sorted(listed, key=lambda p: p.pid)),
        process_count=len(processes),
        gpus=tuple(sorted({gpu for p in processes for gpu in cards.get(p.pid, ())})),
        users=tuple(sorted({p.user for p in listed})),
        since=since,
    )
