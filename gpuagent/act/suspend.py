"""How it is read, encoded and set whether a process is suspended. The order is that of `Suspensions`."""

from contextlib import AbstractContextManager

from gpuagent.act.protects import Seen, is_mps_client, see_none_is
from gpuagent.act.suspensions import Suspensions
from gpuagent.act.targets import OfProcess
from gpuagent.errors import Refused
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Inventory, Subject
from gpuagent.model.vocab import SUSPENDED
from gpuagent.ports import Ender, Real

_RUNS = Real(0.0, "runs")
_LOCKED = Real(0.5, SUSPENDED.leftover)
"""At rest, with all its memory: neither of the two. Of ours, it is what an attempt has left."""
_SUSPENDED = Real(1.0, "suspended")
_REALS = {
    "runs": _RUNS,
    "locked": _LOCKED,
    "suspended": _SUSPENDED,
    "unconfirmed": Real(
        1.0, "suspended, as the tool says; the driver has not confirmed that its memory is free"
    ),
}
_ANOTHERS = Real(2.0, "suspended by somebody else")
"""Where we were about to suspend it. No value that we write, so that it is never taken for ours."""


class Suspend(OfProcess):
    """The raw text is "runs", "locked" or "suspended", or says of whom or of what it is not known."""

    knob: Knob = SUSPENDED

    def __init__(self, suspensions: Suspensions, *, ender: Ender, seen: Seen) -> None:
        super().__init__(ender)
        self._suspensions = suspensions
        self._seen = seen

    async def get(self, subject: Subject) -> Real:
        state = await self._suspensions.state(subject)
        if state == "suspended" and self._suspensions.anothers(subject):
            return _ANOTHERS
        return _REALS[state]

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """Half and more suspends. What somebody else has suspended or locked is left so."""
        return _SUSPENDED if value >= 0.5 and original == _RUNS else original

    async def set(self, subject: Subject, raw: str) -> None:
        """Goes on to its end also where the caller no longer waits."""
        if raw == _SUSPENDED.raw:
            await self._suspensions.suspend(subject, see=lambda: self._see(subject))
        elif raw == _RUNS.raw:
            await self._suspensions.resume(subject)
        else:
            raise Refused(f"{raw[:80]!r} is nothing that a process can be made to be")

    def all_at_once(self) -> AbstractContextManager[None]:
        """As `ports.Orderly`."""
        return self._suspensions.all_at_once()

    def _see(self, subject: Subject) -> None:
        """Raises Refused where it must not be suspended, or cannot be, Unavailable if unknown."""
        seen = self._seen()
        see_none_is(seen, subject.pid, subject.started)
        _see_tool_fits(seen, subject.pid)


def _see_tool_fits(inventory: Inventory, pid: int) -> None:
    """Raises Refused where cuda-checkpoint is known not to work, or could harm others.

    MIG "isn't supported right now" (NVIDIA/cuda-checkpoint#42, 2025-12). Of MPS NVIDIA says nothing; the
    tool "does not attempt to keep the process in a good state" where it fails (its README), and a
    client's fault ends the work of all on its server.
    """
    if is_mps_client(inventory, pid):
        raise Refused(
            f"process {pid} is a client of MPS: that cuda-checkpoint works for one is not documented, "
            "and a fault of it would end the work of others; use another lever, or no MPS"
        )
    if any(p.pid == pid and p.mig for p in inventory.gpu_processes or ()):
        raise Refused(
            f"process {pid} runs in a MIG instance, and cuda-checkpoint does not support MIG: use "
            "another lever"
        )
