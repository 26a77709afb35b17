"""A scenario file: the simulated host, its tenants, what happens when, and how the agent is configured.

`[agent]` is the agent's configuration as `config/gpuagent.toml` has it; `config` entries of the
timeline change it. Both are for whoever runs the agent: the simulated host does not look at them.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.errors import ConfigError
from gpuagent.sim import profiles
from gpuagent.sim.reading import Problem, document, located, wrong
from gpuagent.sim.tables import Table, lines, merged
from gpuagent.sim.work import WEEK_SECONDS, Duration, Idle, Inference, Rate, Seconds, Work

Celsius = Annotated[float, Meta(ge=-50, le=150)]
Percentage = Annotated[float, Meta(gt=0, le=100)]
MemoryLimit = Annotated[int, Meta(ge=2**20)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
_LEAST_TRACE_SECONDS = 1e-3
_LONGEST_PATH = 1024
_LONGEST_PART = 255
"""NAME_MAX of Linux, in bytes."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host around the cards."""

    cpus: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """None for as many as the profile has."""


class CardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One card."""

    profile: str
    """A file of `gpuagent/sim/profiles`, without .toml."""
    ambient_celsius: Celsius = 28.0
    set: dict[str, profiles.Coefficient] = {}
    """Coefficients of the profile that are different here."""


class MpsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CUDA MPS for a group of cards: one control daemon, of which every process there is a client."""

    cards: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    percentage: Percentage = 100.0
    """Default active thread percentage."""
    memory_limit_bytes: MemoryLimit | None = None
    """Default limit on the device memory of each client, on each card."""
    set: dict[str, profiles.Coefficient] = {}
    """Coefficients of `profiles/mps.toml` that are different here."""


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a service is there to keep, for whoever judges a run."""

    seconds: Duration
    quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.99


class TenantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant's process."""

    name: Name
    run: str
    """A workload of `gpuagent/sim/profiles/workloads.toml`."""
    set: Table = {}
    """Its numbers that are different here."""
    card: Annotated[int, Meta(ge=0)] = 0
    start: Seconds = 0.0
    """Seconds after the beginning."""
    waits: bool = False
    """Whether it runs only when the timeline starts it."""
    cgroup: str = ""
    """Its control group; empty for /system.slice/NAME.service."""
    user: Name = "alice"
    thread_percentage: Percentage | None = None
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in its environment, on a card that is used through MPS."""
    memory_limit_bytes: MemoryLimit | None = None
    """CUDA_MPS_PINNED_DEVICE_MEM_LIMIT likewise."""
    objective: Objective | None = None

    @property
    def path(self) -> str:
        return self.cgroup or f"/system.slice/{self.name}.service"


class _Happening(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do"
):
    at: Seconds
    """Seconds after the beginning."""


class Start(_Happening, frozen=True, kw_only=True, tag="start"):
    tenant: str


class Stop(_Happening, frozen=True, kw_only=True, tag="stop"):
    tenant: str


class Restart(_Happening, frozen=True, kw_only=True, tag="restart"):
    """The tenant's process ends, if it runs, and starts again."""

    tenant: str


class Mps(_Happening, frozen=True, kw_only=True, tag="mps"):
    """The operator sets what MPS allows its next clients. Nothing changes for those that run."""

    mps: Annotated[int, Meta(ge=0)] = 0
    """Which group of cards."""
    percentage: Percentage | None = None
    memory_limit_bytes: MemoryLimit | None = None


class Load(_Happening, frozen=True, kw_only=True, tag="load"):
    """Requests come at another rate."""

    tenant: str
    rate: Rate


class Hang(_Happening, frozen=True, kw_only=True, tag="hang"):
    """Driver calls to a card hang for so long."""

    card: int
    seconds: Duration


class Lose(_Happening, frozen=True, kw_only=True, tag="lose"):
    """A card falls off the bus: XID 79 in the kernel log, and its processes end."""

    card: int


class Xid(_Happening, frozen=True, kw_only=True, tag="xid"):
    """The driver reports an error; the tenant, where one is given, ends by it."""

    card: int
    xid: Annotated[int, Meta(ge=1, le=999)]
    tenant: str = ""


class Ambient(_Happening, frozen=True, kw_only=True, tag="ambient"):
    """The air around a card has another temperature."""

    card: int
    celsius: Celsius


class Patch(_Happening, frozen=True, kw_only=True, tag="config"):
    """The operator changes the agent's configuration; tables are merged, everything else replaced."""

    agent: Table


Happening = Start | Stop | Restart | Mps | Load | Hang | Lose | Xid | Ambient | Patch


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file."""

    name: Name
    about: str
    seconds: Annotated[float, Meta(ge=1, le=WEEK_SECONDS)]
    """How long it takes to see what it shows."""
    cards: Annotated[tuple[CardSpec, ...], Meta(min_length=1)]
    tenants: tuple[TenantSpec, ...]
    host: Host = Host()
    mps: tuple[MpsSpec, ...] = ()
    timeline: tuple[Happening, ...] = ()
    agent: Table = {}

    def work(self, tenant: TenantSpec) -> Work:
        """Its workload. Raises ConfigError."""
        return profiles.work(tenant.run, tenant.set, where=f"{self.name}: tenant {tenant.name}")

    def happenings(self) -> tuple[Happening, ...]:
        """What happens, the tenants' starts included, in order of time."""
        starts = tuple(Start(at=t.start, tenant=t.name) for t in self.tenants if not t.waits)
        return tuple(sorted((*starts, *self.timeline), key=lambda h: h.at))

    def agent_changes(self) -> tuple[float, ...]:
        """Seconds at which the agent's configuration changes, ascending."""
        return tuple(sorted({h.at for h in self.timeline if isinstance(h, Patch)}))

    def with_agent(self, patch: Mapping[str, object]) -> "Scenario":
        """The same with other values in the agent's configuration, merged like a timeline's."""
        return msgspec.structs.replace(self, agent=merged(self.agent, patch))

    def agent_table(self, at: float = 0.0) -> Table:
        """The agent's configuration at so many seconds, as values."""
        table = self.agent
        for patch in sorted(self.timeline, key=lambda h: h.at):
            if isinstance(patch, Patch) and patch.at <= at:
                table = merged(table, patch.agent)
        return table

    def agent_toml(self, at: float = 0.0) -> str:
        """The same as a file that the agent reads."""
        return "\n".join(lines(self.agent_table(at), ())) + "\n"


def names() -> tuple[str, ...]:
    """Names of the scenarios that come with the agent."""
    folder = _folder()
    found = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(n.removesuffix(".toml") for n in found if n.endswith(".toml")))


def named(name: str) -> Scenario:
    """A scenario that comes with the agent, by name, or any by its path. Raises ConfigError."""
    return load(path_of(name))


def path_of(name: str) -> str:
    """The file of a scenario that comes with the agent; a path as it is. Raises ConfigError."""
    if name in names():
        return str(_folder() / f"{name}.toml")
    if os.sep in name or name.endswith(".toml"):
        return name
    known = ", ".join(names())
    raise ConfigError([f"{name!r} is no scenario; give the path of a file, or one of {known}"])


def _folder() -> Path:
    """Where they are: in the installed package, or in the source tree around it."""
    package = Path(__file__).parent.parent
    shipped = package / "data" / "scenarios"
    return shipped if shipped.is_dir() else package.parent / "config" / "scenarios"


def load(path: str) -> Scenario:
    """Read a scenario file and check all it says. Raises ConfigError with file, line and key."""
    return parse(read(path), source=path)


def read(path: str) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: not UTF-8; save it as UTF-8"]) from None
    except ValueError as error:  # a zero byte in the path
        raise ConfigError([f"{path!r}: cannot be read: {error}"]) from error


def parse(text: str, *, source: str) -> Scenario:
    """A scenario from its text. Raises ConfigError with every problem; `source` is the file's name.

    What `[agent]` says is for whoever configures an agent by it: see `lab.scenarios`.
    """
    table = document(text, where=source)
    problems = list(wrong(Scenario, table))
    if not problems:
        made = msgspec.convert(table, Scenario)
        problems = list(_problems(made))
        if not problems:
            return made
    raise ConfigError(located(problems, text, source=source))


def _problems(scenario: Scenario) -> Iterator[Problem]:
    """What the types do not say: names that mean nothing, and work that no card knows."""
    names = [t.name for t in scenario.tenants]
    paths = [t.path for t in scenario.tenants]
    for i, tenant in enumerate(scenario.tenants):
        at = ("tenants", i)
        if names.count(tenant.name) > 1:
            yield Problem((*at, "name"), f"{tenant.name} is given twice")
        if paths.count(tenant.path) > 1:
            what = f"{tenant.path} is given twice; each tenant has one to itself"
            yield Problem((*at, "cgroup"), what)
        if fault := _no_cgroup(tenant.path):
            yield Problem((*at, "cgroup"), fault)
        if any(p != tenant.path and p.startswith(f"{tenant.path}/") for p in paths):
            yield Problem((*at, "cgroup"), f"{tenant.path} has other tenants below it")
        if tenant.card >= len(scenario.cards):
            yield Problem((*at, "card"), _no_card(scenario, tenant.card))
        else:
            yield from _misfits(scenario, tenant, at)
    for i, card in enumerate(scenario.cards):
        try:
            profiles.card(card.profile, card.set)
        except ConfigError as error:
            yield from (Problem(("cards", i), problem) for problem in error.problems)
    yield from _wrong_mps(scenario)
    yield from _wrong_happenings(scenario)


def _no_cgroup(path: str) -> str:
    """Why a path cannot be that of a control group; empty if it can."""
    if not path.isprintable() or len(path.encode()) > _LONGEST_PATH:
        return f"write a path on one line, of {_LONGEST_PATH} bytes at most"
    root, *parts = path.split("/")
    if root or any(p in {"", ".", ".."} or len(p.encode()) > _LONGEST_PART for p in parts):
        return f"{path[:60]!r} is no control group: write it as /machine.slice/NAME.scope"
    return ""


def _no_card(scenario: Scenario, number: int) -> str:
    last = len(scenario.cards) - 1
    return f"there is no card {number}; {'there is only card 0' if not last else f'there are 0 to {last}'}"


def _wrong_happenings(scenario: Scenario) -> Iterator[Problem]:
    names = [t.name for t in scenario.tenants]
    services = {t.name for t in scenario.tenants if _rated(scenario, t)}
    for i, happening in enumerate(scenario.timeline):
        at = ("timeline", i)
        if happening.at > scenario.seconds:
            what = (
                f"{happening.at:g} is after the end: the scenario has {scenario.seconds:g} seconds"
            )
            yield Problem((*at, "at"), what)
        name, card = getattr(happening, "tenant", ""), getattr(happening, "card", 0)
        if name and name not in names:
            what = f"there is no tenant {name}; there are {', '.join(names) or 'none'}"
            yield Problem((*at, "tenant"), what)
        elif isinstance(happening, Load) and name not in services:
            yield Problem((*at, "tenant"), f"{name} has no rate of requests to change")
        if card not in range(len(scenario.cards)):
            yield Problem((*at, "card"), _no_card(scenario, card))
        if isinstance(happening, Mps):
            yield from _wrong_limits(scenario, happening, at)


def _wrong_limits(scenario: Scenario, what: Mps, at: tuple[str, int]) -> Iterator[Problem]:
    if what.mps >= len(scenario.mps):
        yield Problem((*at, "mps"), f"there is no MPS group {what.mps}")
    elif (what.percentage, what.memory_limit_bytes) == (None, None):
        yield Problem(at, "give percentage or memory_limit_bytes; it sets nothing")


def _wrong_mps(scenario: Scenario) -> Iterator[Problem]:
    shared = [card for group in scenario.mps for card in group.cards]
    for i, group in enumerate(scenario.mps):
        at = ("mps", i)
        for card in group.cards:
            if card >= len(scenario.cards):
                yield Problem((*at, "cards"), _no_card(scenario, card))
            elif shared.count(card) > 1:
                yield Problem((*at, "cards"), f"card {card} is given twice; a card has one daemon")
        try:
            profiles.mps(group.set)
        except ConfigError as error:
            yield from (Problem(at, problem) for problem in error.problems)
        users = sorted({t.user for t in scenario.tenants if t.card in group.cards})
        if len(users) > 1:
            what = f"a server works for one user at a time; give {' and '.join(users)} one each"
            yield Problem(at, what)
    for i, tenant in enumerate(scenario.tenants):
        limited = (tenant.thread_percentage, tenant.memory_limit_bytes) != (None, None)
        if limited and tenant.card not in shared:
            what = f"its MPS limits mean nothing; card {tenant.card} has no MPS"
            yield Problem(("tenants", i), what)


def _rated(scenario: Scenario, tenant: TenantSpec) -> bool:
    """Whether its load can change; taken to be so where its workload is wrong, which is said itself."""
    if profiles.work_problems(tenant.run, tenant.set):
        return True
    work = scenario.work(tenant)
    return isinstance(work, Inference) and not work.trace


def _misfits(scenario: Scenario, tenant: TenantSpec, at: tuple[str, int]) -> Iterator[Problem]:
    problems = profiles.work_problems(tenant.run, tenant.set)
    yield from (Problem((*at, *p.path), p.text) for p in problems)
    kind = scenario.cards[tenant.card].profile
    if problems or kind not in profiles.cards():
        return
    work = scenario.work(tenant)
    if isinstance(work, Idle):
        return
    if isinstance(work, Inference) and work.trace:
        least = max(work.trace[-1], _LEAST_TRACE_SECONDS)
        if 0 < work.trace_seconds < least:
            what = f"{work.trace_seconds:g} is less than the trace takes, {least:g}"
            yield Problem((*at, "set", "trace_seconds"), what)
    known = profiles.card(kind).shapes
    if work.shape not in known:
        what = f"{kind} has no {work.shape}; it has {', '.join(known)}"
        yield Problem((*at, "set", "shape"), what)
