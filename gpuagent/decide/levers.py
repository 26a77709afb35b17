"""The levers as they are against one state: whom they reach, what they mean, what stands against them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuagent.config import Backpressure as Law
from gpuagent.decide.card import card_floor, card_setting
from gpuagent.decide.causes import CauseKey, growth
from gpuagent.decide.held import CARD, Futile, Held, HeldKey, Mark
from gpuagent.decide.ladder import (
    AT_ONCE,
    RUNGS,
    is_last_rung,
    may_be_held,
    protected_from,
    rungs,
    unfit,
)
from gpuagent.decide.origins import Origins, Place, measure
from gpuagent.decide.pull import Pull
from gpuagent.decide.risk import freezing
from gpuagent.decide.share import Grip
from gpuagent.decide.victims import candidates, near
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import NODE, Process, Tenant, on_tenant_gpu
from gpuagent.model.lease import overridden
from gpuagent.model.plan import Blocked, Cause, Setting
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import (
    CPU_MAX,
    KNOB,
    NODE_CPU_BUSY_RATIO,
    NODE_IO_PRESSURE_RATIO,
    POWER_LIMIT,
    RUNNING,
    SUSPENDED,
    TENANT_GPU_MEMORY_BYTES,
    TERMINATED,
)

OBSERVED = Blocked("would", "of this tenant, or of this family of knobs, it is only said")
_AT_ONCE_FAMILIES = frozenset(KNOB[name].family for name in AT_ONCE)
_STILL_BUSY = 0.8
"""CPUs that were contended still are at this part of the mark: a weight in use is not for a second."""


def _mark(held: Held) -> Mark:
    return (held.name, held.cause_key, held.knob)


class Levers:
    """Answers about one state, each worked out once."""

    def __init__(
        self,
        state: NodeState,
        law: Law,
        *,
        origins: Origins,
        futile: Sequence[Futile],
        missed: Mapping[Mark, float],
    ) -> None:
        taken = overridden(state.leases)  # somebody else decides on these
        self.tenants = {
            t.name: t
            for t in state.inventory.tenants or ()
            if may_be_held(t)
            and t.name not in taken
            and (t.seats or _AT_ONCE_FAMILIES & {*t.levers})
        }
        self._state = state
        self._law = law
        self._cpu_busy = state.fresh(NODE_CPU_BUSY_RATIO, NODE)
        self._disk_waits = state.fresh(NODE_IO_PRESSURE_RATIO, NODE)
        self._known = origins
        found = {f.mark: f.trust(law.ineffective_for) for f in futile if f.regretted}
        self._missed = {**missed, **found}
        self._futile = [f for f in futile if not f.regretted]
        self._measured: dict[str, Origins] = {}
        self._protected: dict[str, tuple[Tenant, ...]] = {}
        self._candidates: dict[CauseKey, list[Tenant]] = {}
        self._settings: dict[HeldKey, tuple[Held, tuple[Setting, ...]]] = {}

    def used(self, held: Held) -> None:
        """It is in use again: that it was missed is known to its holder from now on."""
        self._missed.pop(_mark(held), None)

    @property
    def missed(self) -> dict[Mark, float]:
        return dict(self._missed)

    @property
    def futile(self) -> tuple[Futile, ...]:
        return tuple(self._futile)

    @property
    def origins(self) -> Origins:
        """All that is known, what was measured just now included."""
        return {**self._known, **{p: o for m in self._measured.values() for p, o in m.items()}}

    def places(self, tenant: str) -> list[Place]:
        return [
            (place.path, place.inode)
            for seat in self.tenants[tenant].seats
            for place in (seat, *seat.above)
        ]

    def exists(self, held: Held) -> bool:
        """Whether what is held is still there, and still where the cause is."""
        if held.tenant == CARD:
            return self._state.inventory.gpu(held.cause.subject.gpu) is not None
        tenant = self.tenants.get(held.tenant)
        if tenant is None or KNOB[held.knob] not in rungs(tenant, held.cause.kind):
            return False  # a reload may have taken the lever out of its rule
        return near(self._state, held.cause.subject, tenant) or self.idled(held)

    def idled(self, held: Held) -> bool:
        """Whether its tenant does nothing because of this very lever: the driver lists it no more."""
        return held.knob in AT_ONCE and held.grip.share < 1.0 and bool(self._ours(held.tenant))

    def _ours(self, tenant: str) -> set[int]:
        """The processes of a tenant that are suspended by us."""
        return {
            subject.pid
            for (knob, subject), outcome in self._state.outcomes.items()
            if knob is SUSPENDED and subject.tenant == tenant and outcome.original is not None
        }

    def candidates(self, cause: Cause) -> list[Tenant]:
        """Tenants that contribute to the cause and may be held, the first to be cut first."""
        key = (cause.kind, cause.subject)
        if key not in self._candidates:
            found = candidates(self._state, cause)
            self._candidates[key] = [t for t in found if t.name in self.tenants]
        return self._candidates[key]

    # -- what a lever means --------------------------------------------------------------------------

    def settings(self, held: Held) -> tuple[Setting, ...]:
        """What it asks for now; nothing at a share of 1."""
        known = self._settings.get(held.key)
        if known is None or known[0] is not held:
            known = self._settings[held.key] = (held, self._make(held))
        return known[1]

    def _make(self, held: Held) -> tuple[Setting, ...]:
        if held.grip.share >= 1.0:
            return ()
        if held.tenant == CARD:
            setting = card_setting(self._state, held.cause, held.grip.share, held.why)
            return () if setting is None else (setting,)
        tenant, knob = self.tenants[held.tenant], KNOB[held.knob]
        pull = Pull(
            knob,
            tenant,
            held.grip.share,
            self._origins(tenant),
            held.cause,
            held.why,
            processes=self._processes(tenant, held.cause) if held.knob in AT_ONCE else (),
            risk=freezing(self._state.inventory, tenant) if knob is RUNNING else "",
        )
        return pull.settings(self._protect_from(tenant), self._law)

    def _processes(self, tenant: Tenant, cause: Cause) -> tuple[Process, ...]:
        """The tenant's own on the cards that the cause is about, or on any."""
        cards = self._cards(cause)
        listed = self._state.inventory.gpu_processes or ()
        on_them = {p.pid for p in listed if not cards or p.gpu in cards} | self._ours(tenant.name)
        return tuple(p for p in tenant.processes if p.pid in on_them)

    def _cards(self, cause: Cause) -> set[str]:
        if cause.subject.gpu:
            return {cause.subject.gpu}
        suffers = self._state.inventory.tenant(cause.subject.tenant)
        return set() if suffers is None else set(suffers.gpus)

    def _origins(self, tenant: Tenant) -> Origins:
        if tenant.name not in self._measured:
            self._measured[tenant.name] = measure(self._state, tenant, self._known)
        return self._measured[tenant.name]

    def _protect_from(self, tenant: Tenant) -> tuple[Tenant, ...]:
        if tenant.name not in self._protected:
            others = self._state.inventory.tenants or ()
            self._protected[tenant.name] = protected_from(tenant, others)
        return self._protected[tenant.name]

    # -- which lever, and what stands against it -----------------------------------------------------

    def grasp(self, tenant: Tenant, cause: Cause) -> Held | None:
        """A new lever on a tenant: the first rung that is neither futile nor blocked everywhere."""
        for knob in rungs(tenant, cause.kind):
            if knob is TERMINATED and self._too_soon(tenant, cause):
                return None
            first = self._first_step(tenant, cause, knob)
            usable = any(s.blocked is None for s in self._make(first))
            if usable and self._useless(first) is None:
                floor = tenant.limits.min_share_ratio
                grip = Grip(floor=floor, eased=floor if knob.name in AT_ONCE else 1.0)
                return self._trusted(msgspec.structs.replace(first, grip=grip))
        return None

    def _too_soon(self, tenant: Tenant, cause: Cause) -> bool:
        """Whether a tenant must not be ended yet: the trouble has to outlast a time box without it.

        It counts from the last lever that was let go, for whatever reason: that a gentler one is
        refused, or its tool is missing, is no reason to end anybody sooner.
        """
        key = (cause.kind, cause.subject)
        let_go = [
            f.until - self._law.ineffective_for
            for f in self._futile
            if f.name == tenant.name and f.cause == key
        ]
        return self._state.now.mono - max([cause.since, *let_go]) < self._law.time_box

    def _trusted(self, held: Held) -> Held:
        """What was let go of at its floor, and missed, goes back there at once."""
        trust = self._missed.get(_mark(held))
        if trust is None:
            return held
        grip = msgspec.structs.replace(held.grip, eased=held.grip.floor)
        return msgspec.structs.replace(held, grip=grip, trust_seconds=trust)

    def grasp_card(self, cause: Cause) -> Held | None:
        floor = card_floor(self._state, cause.subject)
        if floor is None:
            return None
        held = Held(CARD, cause, POWER_LIMIT.name, Grip(floor=floor))
        return None if self._useless(held) is not None else self._trusted(held)

    def _first_step(self, tenant: Tenant, cause: Cause, knob: Knob) -> Held:
        share = max(self._law.cut, tenant.limits.min_share_ratio)
        return Held(tenant.name, cause, knob.name, Grip(floor=0.0, share=share, calm=False))

    def last(self, held: Held) -> bool:
        """Whether no other lever is left to try after it."""
        if held.tenant == CARD:
            return True
        return is_last_rung(self.tenants[held.tenant], held.knob, held.cause.kind)

    def _useless(self, held: Held) -> Blocked | None:
        """Why the lever relieves nothing, from what it is or from what came of it before."""
        why = self._unfit(held, self._cpu_busy, self._disk_waits) or self._still(held)
        if why is not None:
            return why
        mark = _mark(held)
        return next((f.blocked for f in self._futile if f.mark == mark), None)

    def give_up(self, held: Held, blocked: Blocked, *, trust_seconds: float) -> None:
        """Remember that a lever was of no use for this cause, and how long it was trusted."""
        if self._plainly_unfit(held) is not None:
            return  # which is told anew each time
        until = self._state.now.mono + self._law.ineffective_for
        relief = held.relief.let_go() if held.relief and blocked.result == "ineffective" else None
        self._futile.append(
            Futile(
                name=held.name,
                knob=held.knob,
                until=until,
                blocked=blocked,
                cause=held.cause_key,
                relief=relief,
                trust_seconds=trust_seconds,
            )
        )

    def refusal(self, held: Held) -> Blocked | None:
        """Why it relieves nothing now, or why none of its settings can be made.

        Only what is known counts against a lever in use: a reading that is missing says nothing.
        """
        why = self._plainly_unfit(held)
        if why is not None:
            return why
        tried = [s for s in self.settings(held) if s.blocked is None]
        outcomes = (self._state.outcomes.get(s.key) for s in tried)
        refused = [o for o in outcomes if o is not None and o.result in ("refused", "contested")]
        if not tried or len(refused) < len(tried):
            return None
        return Blocked(refused[0].result, refused[0].why)

    def _unfit(self, held: Held, busy: float | None, waits: float | None) -> Blocked | None:
        return unfit(KNOB[held.knob], held.cause.kind, self._law, busy=busy, waits=waits)

    def _plainly_unfit(self, held: Held) -> Blocked | None:
        """Why a lever in use relieves nothing now: what makes it so has to be plain."""
        law, busy, waits = self._law, self._cpu_busy, self._disk_waits
        return self._unfit(
            held,
            law.cpu_busy if busy is None or busy >= _STILL_BUSY * law.cpu_busy else busy,
            law.io_pressure_high
            if waits is None or waits >= _STILL_BUSY * law.io_pressure_high
            else waits,
        )

    def _still(self, held: Held) -> Blocked | None:
        """That slowing a tenant frees nothing of a reservation, while its memory does not grow."""
        if held.cause.kind != "reserved" or held.knob != CPU_MAX.name:
            return None
        here = on_tenant_gpu(held.tenant, held.cause.subject.gpu)
        if (growth(self._state, TENANT_GPU_MEMORY_BYTES, here) or 0.0) > 0:
            return None
        return Blocked("ineffective", "its device memory does not grow: slowing it frees none")

    def obstacles(self, cause: Cause, in_use: dict[HeldKey, Held]) -> Iterator[Setting]:
        """Levers that come before the one in use and cannot be pulled: said, with the reason."""
        for tenant in self.candidates(cause):
            held = in_use.get((tenant.name, cause.kind, cause.subject))
            for knob in RUNGS[cause.kind]:
                if held is not None and held.knob == knob.name:
                    break
                if knob.family not in tenant.levers:
                    continue
                first = self._first_step(tenant, cause, knob)
                useless = self._useless(first)
                if useless is None and knob.family in tenant.observed:
                    if knob is TERMINATED and self._too_soon(tenant, cause):
                        continue
                    useless = OBSERVED
                for setting in self._make(first):
                    blocked = setting.blocked or useless
                    if blocked is not None:
                        yield msgspec.structs.replace(setting, blocked=blocked)
