"""A scenario file: the simulated host, its tenants, what happens when, and how the agent is configured.

`[agent]` is the agent's configuration as `config/gpuagent.toml` has it; `config` entries of the
timeline change it. Both are for whoever runs the agent: the simulated host does not look at them.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.errors import ConfigError
from gpuagent.sim import profiles
from gpuagent.sim.work import Idle, Inference, Work

NotNegative = Annotated[float, Meta(ge=0)]
Percentage = Annotated[float, Meta(gt=0, le=100)]
MemoryLimit = Annotated[int, Meta(ge=2**20)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Table = dict[str, object]


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host around the cards."""

    cpus: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """None for as many as the profile has."""


class CardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One card."""

    profile: str
    """A file of `gpuagent/sim/profiles`, without .toml."""
    ambient_celsius: float = 28.0
    set: dict[str, float] = {}
    """Coefficients of the profile that are different here."""


class MpsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CUDA MPS for a group of cards: one control daemon, of which every process there is a client."""

    cards: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    percentage: Percentage = 100.0
    """Default active thread percentage."""
    memory_limit_bytes: MemoryLimit | None = None
    """Default limit on the device memory of each client, on each card."""
    set: dict[str, float] = {}
    """Coefficients of `profiles/mps.toml` that are different here."""


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a service is there to keep, for whoever judges a run."""

    seconds: Annotated[float, Meta(gt=0)]
    quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.99


class TenantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant's process."""

    name: Name
    run: str
    """A workload of `gpuagent/sim/profiles/workloads.toml`."""
    set: Table = {}
    """Its numbers that are different here."""
    card: Annotated[int, Meta(ge=0)] = 0
    start: NotNegative = 0.0
    """Seconds after the beginning."""
    waits: bool = False
    """Whether it runs only when the timeline starts it."""
    cgroup: Annotated[str, Meta(pattern="^/[^/]")] = ""
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
    at: NotNegative
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
    rate: NotNegative


class Hang(_Happening, frozen=True, kw_only=True, tag="hang"):
    """Driver calls to a card hang for so long."""

    card: int
    seconds: Annotated[float, Meta(gt=0)]


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
    celsius: float


class Patch(_Happening, frozen=True, kw_only=True, tag="config"):
    """The operator changes the agent's configuration; tables are merged, everything else replaced."""

    agent: Table


Happening = Start | Stop | Restart | Mps | Load | Hang | Lose | Xid | Ambient | Patch


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file."""

    name: Name
    about: str
    seconds: Annotated[float, Meta(gt=0)]
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
        return msgspec.structs.replace(self, agent=_merged(self.agent, patch))

    def agent_toml(self, at: float = 0.0) -> str:
        """The agent's configuration at so many seconds, as a file that it reads."""
        table = self.agent
        for patch in sorted(self.timeline, key=lambda h: h.at):
            if isinstance(patch, Patch) and patch.at <= at:
                table = _merged(table, patch.agent)
        return "\n".join(_lines(table, ())) + "\n"


def names() -> tuple[str, ...]:
    """Names of the scenarios that come with the agent."""
    folder = _folder()
    found = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(n.removesuffix(".toml") for n in found if n.endswith(".toml")))


def named(name: str) -> Scenario:
    """A scenario that comes with the agent, by name, or any by its path. Raises ConfigError."""
    if name in names():
        return load(str(_folder() / f"{name}.toml"))
    if os.sep in name or name.endswith(".toml"):
        return load(name)
    known = ", ".join(names())
    raise ConfigError([f"{name!r} is no scenario; give the path of a file, or one of {known}"])


def _folder() -> Path:
    """Where they are: in the installed package, or in the source tree around it."""
    package = Path(__file__).parent.parent
    shipped = package / "data" / "scenarios"
    return shipped if shipped.is_dir() else package.parent / "config" / "scenarios"


def load(path: str) -> Scenario:
    """Read a scenario file and check all it says. Raises ConfigError with file and key."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: not UTF-8; save it as UTF-8"]) from None
    return parse(text, source=path)


def parse(text: str, *, source: str) -> Scenario:
    """A scenario from its text. Raises ConfigError; `source` is the file's name in it."""
    scenario = profiles.converted(profiles.document(text, where=source), Scenario, where=source)
    problems = [f"{source}: {problem}" for problem in _problems(scenario)]
    if problems:
        raise ConfigError(problems)
    return scenario


def _problems(scenario: Scenario) -> Iterator[str]:
    """What the types do not say: names that mean nothing, and work that no card knows."""
    names = [t.name for t in scenario.tenants]
    paths = [t.path for t in scenario.tenants]
    for i, tenant in enumerate(scenario.tenants):
        key = f"tenants[{i}]"
        if names.count(tenant.name) > 1:
            yield f"{key}.name: {tenant.name} is given twice"
        if paths.count(tenant.path) > 1:
            yield f"{key}.cgroup: {tenant.path} is given twice; each tenant has one to itself"
        if any(p != tenant.path and p.startswith(f"{tenant.path}/") for p in paths):
            yield f"{key}.cgroup: {tenant.path} has other tenants below it"
        if tenant.card >= len(scenario.cards):
            yield f"{key}.card: there is no card {tenant.card}"
        else:
            yield from _misfits(scenario, tenant, key)
    for i, card in enumerate(scenario.cards):
        try:
            profiles.card(card.profile, card.set)
        except ConfigError as error:
            yield from (f"cards[{i}]: {problem}" for problem in error.problems)
    yield from _wrong_mps(scenario)
    services = {t.name for t in scenario.tenants if _rated(scenario, t)}
    for i, happening in enumerate(scenario.timeline):
        key = f"timeline[{i}]"
        tenant_name = getattr(happening, "tenant", "")
        if tenant_name and tenant_name not in names:
            yield f"{key}.tenant: there is no tenant {tenant_name}"
        elif isinstance(happening, Load) and tenant_name not in services:
            yield f"{key}.tenant: {tenant_name} has no rate of requests to change"
        if getattr(happening, "card", 0) not in range(len(scenario.cards)):
            yield f"{key}.card: there is no such card"


def _wrong_mps(scenario: Scenario) -> Iterator[str]:
    shared = [card for group in scenario.mps for card in group.cards]
    for i, group in enumerate(scenario.mps):
        for card in group.cards:
            if card >= len(scenario.cards):
                yield f"mps[{i}].cards: there is no card {card}"
            elif shared.count(card) > 1:
                yield f"mps[{i}].cards: card {card} is given twice; a card has one daemon"
        try:
            profiles.mps(group.set)
        except ConfigError as error:
            yield from (f"mps[{i}]: {problem}" for problem in error.problems)
        users = sorted({t.user for t in scenario.tenants if t.card in group.cards})
        if len(users) > 1:
            yield f"mps[{i}]: a server works for one user at a time; give {' and '.join(users)} one"
    for i, tenant in enumerate(scenario.tenants):
        limited = (tenant.thread_percentage, tenant.memory_limit_bytes) != (None, None)
        if limited and tenant.card not in shared:
            yield f"tenants[{i}]: its MPS limits mean nothing; card {tenant.card} has no MPS"
    for i, what in enumerate(scenario.timeline):
        if isinstance(what, Mps) and what.mps >= len(scenario.mps):
            yield f"timeline[{i}].mps: there is no MPS group {what.mps}"
        elif isinstance(what, Mps) and (what.percentage, what.memory_limit_bytes) == (None, None):
            yield f"timeline[{i}]: give percentage or memory_limit_bytes; it sets nothing"


def _rated(scenario: Scenario, tenant: TenantSpec) -> bool:
    try:
        work = scenario.work(tenant)
    except ConfigError:
        return False
    return isinstance(work, Inference) and not work.trace


def _misfits(scenario: Scenario, tenant: TenantSpec, key: str) -> Iterator[str]:
    try:
        work = scenario.work(tenant)
    except ConfigError as error:
        yield from (f"{key}: {problem}" for problem in error.problems)
        return
    kind = scenario.cards[tenant.card].profile
    if isinstance(work, Idle) or kind not in profiles.cards():
        return
    known = profiles.card(kind).shapes
    if work.shape not in known:
        yield f"{key}.set.shape: {kind} has no {work.shape}; it has {', '.join(known)}"


# -- the agent's configuration as text ------------------------------------------------------------------


def _merged(table: Mapping[str, object], patch: Mapping[str, object]) -> Table:
    merged = dict(table)
    for key, value in patch.items():
        known = merged.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        merged[key] = _merged(known, value) if both else value  # type: ignore[arg-type]  # `both`
    return merged


def _lines(table: Mapping[str, object], path: tuple[str, ...]) -> Iterator[str]:
    """Values first, then tables, then arrays of tables: so that each key is in its own table."""
    later: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, dict) or _tables(value):
            later.append((key, value))
        else:
            yield f"{key} = {_value(value)}"
    for key, value in later:
        below = (*path, key)
        if isinstance(value, dict):
            yield f"[{'.'.join(below)}]"
            yield from _lines(value, below)
        elif isinstance(value, list):
            for one in value:
                yield f"[[{'.'.join(below)}]]"
                yield from _lines(one, below)


def _tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _value(value: object) -> str:
    """A JSON text, number, truth value or list of them is the same in TOML, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
