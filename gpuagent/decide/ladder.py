"""The rungs: which levers can relieve which cause, and the settings that a share means for each."""

from collections.abc import Iterable, Iterator

import msgspec

from gpuagent.config import Backpressure
from gpuagent.decide.origins import Origins
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Level, Seat, Tenant, on_cgroup
from gpuagent.model.plan import Blocked, Cause, Setting
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT

RUNGS: dict[str, tuple[Knob, ...]] = {
    "cpu": (CPU_WEIGHT, CPU_MAX),
    "memory": (CPU_MAX,),
    "temperature": (CPU_MAX,),
    "latency": (CPU_WEIGHT, CPU_MAX),
}
"""Levers on a tenant by the cause they can relieve, the gentlest first (DESIGN 5)."""


CPU_UNKNOWN = Blocked("refused", "how much CPU it uses is not known, so no share of it is")


def is_last_rung(knob: str, kind: str) -> bool:
    """Whether no lever on a tenant is left after this one for such a cause."""
    return RUNGS[kind][-1].name == knob


class Pull(msgspec.Struct, frozen=True):
    """One lever, pulled on one tenant to one share for one cause."""

    knob: Knob
    tenant: Tenant
    share: float
    origins: Origins
    cause: Cause
    because: str
    """Why now, in words."""

    def settings(self, protected: Iterable[Tenant], law: Backpressure) -> tuple[Setting, ...]:
        """One setting for each cgroup of the tenant: to be tried, or blocked with the reason."""
        if not self.tenant.seats:
            return ()
        make = self._cpu_max if self.knob is CPU_MAX else self._cpu_weight
        guarded = tuple(protected)
        return tuple(s for seat in self.tenant.seats for s in make(seat, guarded, law))

    def _cpu_max(
        self, seat: Seat, _protected: tuple[Tenant, ...], law: Backpressure
    ) -> Iterator[Setting]:
        origin = self.origins.get((seat.path, seat.inode))
        used = None if origin is None else origin.cores
        blocked = None
        if seat.refusal:
            blocked = Blocked("refused", seat.refusal)
        elif used is None:
            blocked = CPU_UNKNOWN
        elif used <= law.min_cores:
            why = f"it uses {used:.2f} cores; of {law.min_cores:g} or less there is nothing to take"
            blocked = Blocked("ineffective", why)
        cores = max(law.min_cores, self.share * (used or 0.0))
        yield self._setting(
            seat,
            cores,
            f"cpu.max {cores:.2f} cores, {self.share:.0%} of the {used or 0:.2f} it used before",
            blocked,
        )

    def _cpu_weight(
        self, seat: Seat, protected: tuple[Tenant, ...], _law: Backpressure
    ) -> Iterator[Setting]:
        """At the ancestor just below the one it shares with each tenant to be protected."""
        targets = {
            target.path: target
            for other in protected
            for guarded in other.seats
            if (target := below_common(seat, guarded)) is not None
        }
        if not targets:
            yield self._setting(
                seat,
                1.0,
                "cpu.weight",
                Blocked("ineffective", "no more important tenant competes with it as a sibling"),
            )
        for target in targets.values():
            origin = self.origins.get((target.path, target.inode))
            original = None if origin is None else origin.weight
            blocked = None
            if target.refusal:
                blocked = Blocked("refused", target.refusal)
            elif original is None:
                blocked = Blocked("ineffective", f"{target.path} has no cpu.weight to turn")
            weight = max(1.0, float(round(self.share * (original or 100.0))))
            yield self._setting(
                target,
                weight,
                f"cpu.weight {weight:.0f}, {self.share:.0%} of {original or 100:.0f}",
                blocked,
            )

    def _setting(self, seat: Seat, value: float, what: str, blocked: Blocked | None) -> Setting:
        return Setting(
            self.knob,
            on_cgroup(self.tenant.name, seat.path, seat.inode),
            value,
            why=f"{what}: {self.because}; {self.tenant.name} is L{self.tenant.level.value}",
            rule=f"backpressure/{self.cause.kind}",
            numbers=(*self.cause.numbers, ("share", self.share)),
            blocked=blocked,
        )


def unfit(knob: Knob, kind: str, busy: float | None, law: Backpressure) -> Blocked | None:
    """Why a lever cannot relieve this kind of cause now, wherever it is pulled.

    `busy` is the share of all CPU time in use. A weight decides something only while CPUs are
    contended: they are where they are the cause, and for a latency they may be. Where that is not
    known the weight is left out too: waiting for it would cost a time box, and cpu.max acts anyway.
    """
    if knob is not CPU_WEIGHT or kind != "latency":
        return None
    if busy is None:
        return Blocked("ineffective", "whether the CPUs are contended is not known")
    if busy >= law.cpu_busy:
        return None
    return Blocked(
        "ineffective",
        f"the CPUs are busy in {busy:.0%} of the time, and a weight acts only while they are "
        f"contended ({law.cpu_busy:.0%})",
    )


def below_common(seat: Seat, other: Seat) -> Seat | None:
    """The seat or ancestor of it that is a sibling of the other's branch; None if there is none.

    cpu.weight is compared among the children of one cgroup only, so this is the one place where
    it decides between the two.
    """
    branch = (seat, *seat.above)
    theirs = {other.path, *(s.path for s in other.above)}
    if seat.path in theirs or other.path in {s.path for s in branch}:
        return None
    outside = [s for s in branch if s.path not in theirs]
    return outside[-1]


def protected_from(tenant: Tenant, tenants: Iterable[Tenant]) -> tuple[Tenant, ...]:
    """Those that are more important."""
    return tuple(t for t in tenants if t.level < tenant.level)


def may_be_held(tenant: Tenant) -> bool:
    """L1's own knobs are never touched; others only where the operator allows it."""
    return tenant.enforce and tenant.level is not Level.L1
