"""What pulling a lever on a tenant to a share means: the settings, each to be tried or blocked."""

from collections.abc import Iterable, Iterator

import msgspec

from gpuagent.config import Backpressure
from gpuagent.decide.ladder import below_common
from gpuagent.decide.origins import Origins
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Process, Seat, Subject, Tenant, on_cgroup, on_process
from gpuagent.model.plan import Blocked, Cause, Setting
from gpuagent.model.vocab import CPU_MAX, CPU_WEIGHT, IO_WEIGHT, RUNNING

CPU_UNKNOWN = Blocked("refused", "how much CPU it uses is not known, so no share of it is")
_WEIGHT = 100.0
"""What the kernel gives to a cgroup that nobody has given a weight."""


class Pull(msgspec.Struct, frozen=True):
    """One lever, pulled on one tenant to one share for one cause."""

    knob: Knob
    tenant: Tenant
    share: float
    origins: Origins
    cause: Cause
    because: str
    """Why now, in words."""
    processes: tuple[Process, ...] = ()
    """Those of the tenant that a lever on processes is pulled on."""
    risk: str = ""
    """What a freeze would do to others; empty for nothing."""

    def settings(self, protected: Iterable[Tenant], law: Backpressure) -> tuple[Setting, ...]:
        """One setting for each cgroup or process: to be tried, or blocked with the reason."""
        if self.knob in {CPU_WEIGHT, IO_WEIGHT}:
            guarded = tuple(protected)
            return tuple(s for seat in self.tenant.seats for s in self._weight(seat, guarded))
        if self.knob is CPU_MAX:
            return tuple(self._cpu_max(seat, law) for seat in self.tenant.seats)
        if self.knob is RUNNING:
            return tuple(self._running(seat) for seat in self.tenant.seats)
        return tuple(self._ended(process) for process in self.processes)

    def _cpu_max(self, seat: Seat, law: Backpressure) -> Setting:
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
        return self._setting(
            self._at(seat),
            cores,
            f"cpu.max {cores:.2f} cores, {self.share:.0%} of the {used or 0:.2f} it used before",
            blocked,
        )

    def _weight(self, seat: Seat, protected: tuple[Tenant, ...]) -> Iterator[Setting]:
        """At the ancestor just below the one it shares with each tenant to be protected."""
        file = "cpu.weight" if self.knob is CPU_WEIGHT else "io.weight"
        targets = {
            target.path: target
            for other in protected
            for guarded in other.seats
            if (target := below_common(seat, guarded)) is not None
        }
        if not targets:
            why = "no more important tenant competes with it as a sibling"
            yield self._setting(self._at(seat), 1.0, file, Blocked("ineffective", why))
        for target in targets.values():
            origin = self.origins.get((target.path, target.inode))
            original = None if origin is None else origin.weight
            blocked = None
            if target.refusal:
                blocked = Blocked("refused", target.refusal)
            elif original is None and self.knob is CPU_WEIGHT:
                blocked = Blocked("ineffective", f"{target.path} has no cpu.weight to turn")
            if original is None or self.knob is IO_WEIGHT:
                original = _WEIGHT
            weight = max(1.0, float(round(self.share * original)))
            yield self._setting(
                self._at(target),
                weight,
                f"{file} {weight:.0f}, {self.share:.0%} of {original:.0f}",
                blocked,
            )

    def _running(self, seat: Seat) -> Setting:
        refusal = seat.refusal or self.risk
        return self._setting(
            self._at(seat),
            self.share,
            f"frozen in pulses, so that it runs in {self.share:.0%} of the time",
            Blocked("refused", refusal) if refusal else None,
        )

    def _ended(self, process: Process) -> Setting:
        what = {"suspend": "suspended", "terminate": "ended"}[self.knob.family]
        return self._setting(
            on_process(self.tenant.name, process.pid, process.started), 1.0, what, None
        )

    def _at(self, seat: Seat) -> Subject:
        return on_cgroup(self.tenant.name, seat.path, seat.inode)

    def _setting(
        self, subject: Subject, value: float, what: str, blocked: Blocked | None
    ) -> Setting:
        return Setting(
            self.knob,
            subject,
            value,
            why=f"{what}: {self.because}; {self.tenant.name} is L{self.tenant.level.value}",
            rule=f"backpressure/{self.cause.kind}",
            numbers=(*self.cause.numbers, ("share", self.share)),
            blocked=blocked,
        )
