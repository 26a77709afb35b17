"""The policy that sets the host memory a tenant's rule declares: `memory.high` and `memory.max`.

As declared only: no cause pulls them, and an L1 tenant may have them, too. A limit is for all that a
tenant uses, so that it can be set only where the tenant has one control group and has it to itself.
`memory.max` is not set below what is in use: the kernel would end a process at once.
"""

from collections.abc import Iterator

import msgspec

from gpuagent.config import Config
from gpuagent.decide.merge import DECLARED
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Seat, Tenant, on_cgroup, on_tenant
from gpuagent.model.plan import Blocked, Decision, Setting
from gpuagent.model.state import Event, NodeState
from gpuagent.model.vocab import MEMORY_HIGH, MEMORY_MAX, TENANT_HOST_MEMORY_BYTES

RULE = f"{DECLARED}host_memory"
_ONCE_RATIO = 0.9
"""What stays over this part of memory.high has been told of: its use goes to and fro there."""
_UNKNOWN = "how much it uses is not known, and a limit below that would end one of its processes"
_FILES = {MEMORY_HIGH: "memory.high", MEMORY_MAX: "memory.max"}

Said = tuple[str, str]
"""Name of a tenant and of a knob."""


class Memory(msgspec.Struct, frozen=True):
    """Of which limits it has been said that they are not set, or that more is in use."""

    said: tuple[Said, ...] = ()


class Limits:
    """See the module."""

    name = "limits"

    def __init__(self, config: Config) -> None:
        """Limits are declared with the tenants, which are in the state."""

    def begin(self) -> Memory:
        return Memory()

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        if not state.tenants_known:
            return memory, Decision()
        settings = [s for t in state.inventory.tenants or () for s in _of(t, state)]
        news = {
            (s.subject.tenant, s.knob.name): word
            for s in settings
            if (word := _trouble(s, state, memory.said)) is not None
        }
        events = tuple(
            Event(word[0], state.now.mono, word[1], on_tenant(said[0]))
            for said, word in news.items()
            if said not in memory.said
        )
        return Memory(tuple(sorted(news))), Decision(settings=tuple(settings), events=events)


def _of(tenant: Tenant, state: NodeState) -> Iterator[Setting]:
    declared = (
        (MEMORY_HIGH, tenant.limits.host_memory_high_bytes),
        (MEMORY_MAX, tenant.limits.host_memory_max_bytes),
    )
    for knob, size in declared:
        if size is not None:
            for seat in tenant.seats:
                yield _setting(knob, float(size), tenant, seat, state)


def _setting(knob: Knob, size: float, tenant: Tenant, seat: Seat, state: NodeState) -> Setting:
    used = _used(tenant.name, state)
    setting = Setting(
        knob,
        on_cgroup(tenant.name, seat.path, seat.inode),
        size,
        why=f"{_FILES[knob]} {_gib(size)}, as declared for {tenant.name}",
        rule=RULE,
        numbers=(("declared_bytes", size), *((("used_bytes", used),) if used is not None else ())),
    )
    why = _against(setting, tenant, seat, state)
    return msgspec.structs.replace(setting, blocked=Blocked("refused", why)) if why else setting


def _against(setting: Setting, tenant: Tenant, seat: Seat, state: NodeState) -> str:
    """What speaks against setting it; empty for nothing."""
    if seat.refusal:
        return seat.refusal
    if len(tenant.seats) > 1:
        return (
            f"{tenant.name} has {len(tenant.seats)} control groups, and the limit is for all that "
            "it uses: a part of it for each would be another limit"
        )
    if setting.knob is not MEMORY_MAX or _in_force(setting, state):
        return ""
    used = _used(tenant.name, state)
    if used is None:
        return _UNKNOWN
    if used > setting.value:
        return f"it uses {_gib(used)}: the kernel would end one of its processes"
    return ""


def _in_force(setting: Setting, state: NodeState) -> bool:
    """Whether it is there already: then what it uses is less, whatever was read before."""
    outcome = state.outcomes.get(setting.key)
    return (
        outcome is not None
        and outcome.original is not None
        and outcome.real is not None
        and abs(outcome.real - setting.value) < setting.knob.deadband
    )


def _trouble(setting: Setting, state: NodeState, said: tuple[Said, ...]) -> tuple[str, str] | None:
    """Kind and text of what is to be told of it; None for nothing."""
    tenant, file = setting.subject.tenant, _FILES[setting.knob]
    if setting.blocked is not None:
        if setting.blocked.why == _UNKNOWN:
            return None
        return "limit-unused", f"{file} of {tenant} is not set: {setting.blocked.why}"
    used = _used(tenant, state)
    known = (tenant, setting.knob.name) in said
    much = setting.value * (_ONCE_RATIO if known else 1.0)
    if setting.knob is MEMORY_HIGH and used is not None and used > much:
        more = f"it uses {_gib(used)}, and {file} is {_gib(setting.value)}"
        return "limit-exceeded", f"{tenant} is slowed and reclaimed from: {more}"
    return None


def _used(tenant: str, state: NodeState) -> float | None:
    return state.fresh(TENANT_HOST_MEMORY_BYTES, on_tenant(tenant))


def _gib(size: float) -> str:
    return f"{size / 1024**3:.2f} GiB"
