"""The levers as they are against one state: whom they reach, what they mean, what stands against them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuagent.config import Backpressure as Law
from gpuagent.decide.card import card_floor, card_setting
from gpuagent.decide.causes import CauseKey
from gpuagent.decide.held import CARD, Futile, Held, HeldKey, Mark
from gpuagent.decide.ladder import RUNGS, Pull, may_be_held, protected_from, unfit
from gpuagent.decide.origins import Origins, Place, measure
from gpuagent.decide.share import Grip
from gpuagent.decide.victims import candidates, near
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import NODE, Tenant
from gpuagent.model.lease import overridden
from gpuagent.model.plan import Blocked, Cause, Setting
from gpuagent.model.state import NodeState
from gpuagent.model.vocab import KNOB, NODE_CPU_BUSY_RATIO, POWER_LIMIT

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
            if may_be_held(t) and t.seats and t.name not in taken
        }
        self._state = state
        self._law = law
        self._cpu_busy = state.fresh(NODE_CPU_BUSY_RATIO, NODE)
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
        return tenant is not None and near(self._state, held.cause.subject, tenant)

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
        tenant = self.tenants[held.tenant]
        pull = Pull(
            KNOB[held.knob], tenant, held.grip.share, self._origins(tenant), held.cause, held.why
        )
        return pull.settings(self._protect_from(tenant), self._law)

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
        for knob in RUNGS[cause.kind]:
            first = self._first_step(tenant, cause, knob)
            usable = any(s.blocked is None for s in self._make(first))
            if usable and self._useless(first) is None:
                grip = Grip(floor=tenant.limits.min_share_ratio)
                return self._trusted(msgspec.structs.replace(first, grip=grip))
        return None

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
        return Held(tenant.name, cause, knob.name, Grip(floor=0.0, share=self._law.cut, calm=False))

    def _useless(self, held: Held) -> Blocked | None:
        """Why the lever relieves nothing, from what it is or from what came of it before."""
        why = unfit(KNOB[held.knob], held.cause.kind, self._cpu_busy, self._law)
        if why is not None:
            return why
        mark = _mark(held)
        return next((f.blocked for f in self._futile if f.mark == mark), None)

    def give_up(self, held: Held, blocked: Blocked, *, trust_seconds: float) -> None:
        """Remember that a lever was of no use for this cause, and how long it was trusted."""
        if self._unfit(held) is not None:
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
        why = self._unfit(held)
        if why is not None:
            return why
        tried = [s for s in self.settings(held) if s.blocked is None]
        outcomes = (self._state.outcomes.get(s.key) for s in tried)
        refused = [o for o in outcomes if o is not None and o.result in ("refused", "contested")]
        if not tried or len(refused) < len(tried):
            return None
        return Blocked(refused[0].result, refused[0].why)

    def _unfit(self, held: Held) -> Blocked | None:
        """Why a lever in use relieves nothing now: what makes it so has to be plain."""
        busy = self._cpu_busy
        if busy is None or busy >= _STILL_BUSY * self._law.cpu_busy:
            return None
        return unfit(KNOB[held.knob], held.cause.kind, busy, self._law)

    def obstacles(self, cause: Cause, in_use: dict[HeldKey, Held]) -> Iterator[Setting]:
        """Levers that come before the one in use and cannot be pulled: said, with the reason."""
        for tenant in self.candidates(cause):
            held = in_use.get((tenant.name, cause.kind, cause.subject))
            for knob in RUNGS[cause.kind]:
                if held is not None and held.knob == knob.name:
                    break
                first = self._first_step(tenant, cause, knob)
                useless = self._useless(first)
                for setting in self._make(first):
                    blocked = setting.blocked or useless
                    if blocked is not None:
                        yield msgspec.structs.replace(setting, blocked=blocked)
