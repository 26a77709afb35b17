"""How the values of CUDA MPS are read, encoded and written: a tenant's, and a control daemon's.

None of them reaches a client that runs (FACTS 3): what is set here is what the next one gets.
"""

from gpuagent.act.targets import OfTenant
from gpuagent.errors import Refused, Unavailable
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import MPS_DAEMON, MPS_DEFAULT_THREADS, MPS_THREADS
from gpuagent.ports import Mps, Real

_WHOLE = Real(1.0, "100.0")


def _percent(value: float, original: Real) -> Real:
    """In tenths of a percent, which is as fine as MPS keeps it, rounded down; never looser."""
    # Written so that not-a-number, too, asks for nothing.
    if not 0 < value < original.value:
        return original
    return _real(max(1, int(round(value * 1000, 6))))


def _real(tenths: int) -> Real:
    return Real(tenths / 1000, f"{tenths / 10:.1f}")


def _ratio(raw: str) -> float:
    """Raises Refused where the text is not one that `encode` makes."""
    try:
        percent = float(raw)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise Refused(f"{raw[:80]!r} is no thread percentage of MPS")
    return percent / 100


class MpsThreads(OfTenant):
    """A tenant's ceiling: kept here, and told in its launch environment by the next snapshot.

    Nothing of it is on the host, so that an agent that has died leaves nothing to put back.
    """

    knob: Knob = MPS_THREADS

    def __init__(self) -> None:
        self._set: dict[str, Real] = {}

    async def get(self, subject: Subject) -> Real:
        return self._set.get(subject.tenant, _WHOLE)

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        return _percent(value, original)

    async def set(self, subject: Subject, raw: str) -> None:
        real = _real(round(_ratio(raw) * 1000))
        if real == _WHOLE:
            self._set.pop(subject.tenant, None)
        else:
            self._set[subject.tenant] = real


class _OfDaemon:
    """What belongs to a control daemon: known by where it is reached, whatever it is called by now."""

    def __init__(self, mps: Mps) -> None:
        self._mps = mps

    async def identity(self, subject: Subject) -> str:
        return self._mps.place(subject.gpu)

    async def verify(self, subject: Subject, identity: str) -> None:
        self._mps.recall(subject.gpu, identity)
        place = self._mps.place(subject.gpu)
        if place != identity:
            raise Unavailable(
                f"the MPS group {subject.gpu} was held in {identity} and is now in {place}; "
                "set pipe_directory as it was, so that the original can be put back"
            )

    async def owner(self, subject: Subject) -> int:
        """Root: a daemon takes orders of nobody else."""
        return 0


class MpsDefaultThreads(_OfDaemon):
    """The ceiling of every client of a daemon's next server."""

    knob: Knob = MPS_DEFAULT_THREADS

    async def get(self, subject: Subject) -> Real:
        return _real(round(await self._mps.default_threads(subject.gpu) * 1000))

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        return _percent(value, original)

    async def set(self, subject: Subject, raw: str) -> None:
        await self._mps.set_default_threads(subject.gpu, _ratio(raw))


class MpsOwnDaemon(_OfDaemon):
    """Whether a control daemon of our own runs. One that was there before is never ended."""

    knob: Knob = MPS_DAEMON

    async def get(self, subject: Subject) -> Real:
        running = await self._mps.running(subject.gpu)
        return Real(1.0, "1") if running else Real(0.0, "0")

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        return Real(1.0, "1") if value >= 1.0 else original

    async def set(self, subject: Subject, raw: str) -> None:
        """Ending it is Refused while it has clients."""
        if raw == "1":
            await self._mps.start(subject.gpu)
        elif raw == "0":
            await self._mps.stop(subject.gpu)
        else:
            raise Refused(f"{raw[:80]!r} is neither 1 nor 0")
