"""The cards as the NVML child last described them, and what it has said since the last drain."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from gpuagent.host.nvml_frames import CardFrame, ProcessesFrame, Row, RowsFrame, XidFrame
from gpuagent.model.declare import On
from gpuagent.model.inventory import Gpu, GpuProcess, Subject, on_gpu
from gpuagent.model.state import Event, Reading, Sensed
from gpuagent.model.vocab import GPU_MEMORY_TOTAL_BYTES, GPU_MEMORY_USED_BYTES, SIGNAL

MEMORY_RATIO = "gpu_memory_used_ratio"
"""A mark's name for used over total memory, which is no signal."""

_KEPT_FRAMES = 64
"""Of each card between two drains: ten seconds at 5 Hz, after which the oldest are lost."""
_KEPT_EVENTS = 256
_UNKNOWN = "unknown-"
_BACK = ("gpu-recovered", "answers again")


class Picture:
    """Owned by the event loop; everything it hands out is immutable."""

    def __init__(self) -> None:
        self._gpus: dict[str, Gpu] = {}
        self._processes: dict[str, tuple[GpuProcess, ...]] = {}
        self._listed_at: dict[str, float] = {}
        """When the list of each card's processes was read, in monotonic seconds."""
        self._free: dict[str, tuple[float, float]] = {}
        """Bytes of each card that nobody has, and when that was last sampled, in monotonic seconds."""
        self._frames: dict[str, deque[RowsFrame]] = {}
        """By card. Made into readings only when they are asked for, and then no more than needed."""
        self._readings: deque[Reading] = deque(maxlen=_KEPT_EVENTS)
        """What was read by the way."""
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._known = False
        """Whether a driver has ever said which cards there are."""
        self._changed = False
        """Whether the cards are no longer those of the last drain ..."""
        self._relisted = False
        """... and whether a list of processes has come since."""
        self._heard: set[str] = set()
        """Cards that the present child has spoken of, or was told to leave out."""
        self._marks: dict[str, float] = {}
        self._above: set[tuple[str, Subject, str]] = set()

    # -- what others ask ------------------------------------------------------------------------------

    def drain(self) -> Sensed | None:
        """All that is new since the last call; None where nothing is."""
        if not (self._frames or self._readings or self._events or self._changed or self._relisted):
            return None
        listed = self._relisted and self._known
        said = Sensed(
            readings=(*(r for kept in self._frames.values() for r in _news(kept)), *self._readings),
            gpus=self.gpus() if self._changed and self._known else None,
            gpu_processes=self._listed() if listed else None,
            events=tuple(self._events),
        )
        self._frames.clear()
        self._readings.clear()
        self._events.clear()
        self._changed &= not self._known
        self._relisted &= not listed
        return said

    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(sorted(self._gpus.values(), key=lambda gpu: gpu.index))

    def _listed(self) -> tuple[GpuProcess, ...]:
        """Processes of all cards; of one that is blind, those that were last seen there."""
        return tuple(p for uuid in sorted(self._processes) for p in self._processes[uuid])

    def gpu(self, uuid: str) -> Gpu | None:
        return self._gpus.get(uuid)

    def memory_of(self, pid: int, since: float) -> Mapping[str, int] | None:
        """Device memory of a process by card, in bytes, as lists read since then show it.

        None while a card that answers has no such list, and where the driver does not say.
        """
        found: dict[str, int] = {}
        for uuid, gpu in self._gpus.items():
            if not gpu.blind and self._listed_at.get(uuid, float("-inf")) < since:
                return None
            for process in self._processes.get(uuid, ()):
                if process.pid != pid:
                    continue
                if process.memory_bytes is None:
                    return None
                found[uuid] = found.get(uuid, 0) + process.memory_bytes
        return found if self._known else None

    def memory_free(self, uuid: str, since: float) -> float | None:
        """Bytes of a card that nobody has, as sampled since then; None where that is not known."""
        gpu, sampled = self._gpus.get(uuid), self._free.get(uuid)
        if gpu is None or gpu.blind or sampled is None or sampled[1] < since:
            return None
        return sampled[0]

    @property
    def complete(self) -> bool:
        """Whether every card has said who it is."""
        return self._known and not any(uuid.startswith(_UNKNOWN) for uuid in self._gpus)

    def label(self, index: int) -> str:
        """A card as people call it: index and name."""
        gpu = self._at(index)
        return f"GPU {index}" if gpu is None else f"GPU {index} ({gpu.name or gpu.uuid})"

    def _at(self, index: int) -> Gpu | None:
        """The card of this index; while indices shift, the one that was heard of last."""
        found = [gpu for gpu in self._gpus.values() if gpu.index == index]
        return max(found, key=lambda gpu: gpu.uuid in self._heard, default=None)

    def watch(self, marks: Mapping[str, float]) -> None:
        """From now on, `rows` tells of rises over these marks."""
        self._marks = dict(marks)
        self._above = {each for each in self._above if each[0] in self._marks}

    # -- what the child says --------------------------------------------------------------------------

    def begin(self, skipped: Collection[int]) -> None:
        """A child has found a driver, and will speak of all cards but these."""
        self._heard = {gpu.uuid for gpu in self._gpus.values() if gpu.index in skipped}

    def settle(self, at: float) -> None:
        """The child has spoken of every card: what it did not speak of is no longer there."""
        for gpu in [g for g in self.gpus() if g.uuid not in self._heard]:
            del self._gpus[gpu.uuid]
            for table in (self._processes, self._listed_at, self._free):
                table.pop(gpu.uuid, None)
            self._changed = self._relisted = True
            if not gpu.uuid.startswith(_UNKNOWN):
                text = f"{gpu.name} ({gpu.uuid}), which was GPU {gpu.index}, is no longer there"
                self._event("gpu-removed", at, text, gpu.uuid)
        self._changed |= not self._known
        self._known = True

    def card(self, frame: CardFrame, driver: str, at: float) -> bool:
        """Take a card's description. Says whether the card is new or back."""
        self._heard.add(frame.uuid)
        self._gpus.pop(f"{_UNKNOWN}{frame.i}", None)
        before = self._gpus.get(frame.uuid)
        gpu = self._gpus[frame.uuid] = frame.gpu(driver)
        self._changed |= gpu != before
        if before is not None and not before.blind:
            return False
        kind, verb = ("gpu-found", "was found") if before is None else _BACK
        self._event(kind, at, f"{self.label(frame.i)} {verb}", gpu.uuid)
        return True

    def blind(self, index: int, why: str, at: float) -> bool:
        """Nothing can be read from this card, and why. Says whether that is new.

        A card that never said who it is gets a name that is no UUID, so that it is not overlooked.
        """
        before = self._at(index) or Gpu(uuid=f"{_UNKNOWN}{index}", index=index, name="")
        self._heard.add(before.uuid)
        if before.blind == why:
            return False
        self._gpus[before.uuid] = msgspec.structs.replace(before, blind=why)
        self._changed = True
        if listed := self._processes.get(before.uuid):
            self._relisted = True
            self._processes[before.uuid] = tuple(
                msgspec.structs.replace(p, memory_bytes=None, utilization_ratio=None)
                for p in listed
            )
        self._event("gpu-blind", at, f"{self.label(index)} cannot be read: {why}", before.uuid)
        return True

    def all_blind(self, why: str, at: float) -> None:
        """The child is gone: nothing can be read, except what was blind before for its own reason."""
        for gpu in self.gpus():
            if not gpu.blind:
                self.blind(gpu.index, why, at)

    def processes(self, frame: ProcessesFrame) -> None:
        """Take a card's list. It is news also when it says the same: the numbers are fresh."""
        self._processes[frame.uuid] = frame.processes()
        self._listed_at[frame.uuid] = frame.at
        self._relisted = True

    def xid(self, frame: XidFrame) -> None:
        gpu = self.gpu(frame.uuid)
        where = frame.uuid if gpu is None else self.label(gpu.index)
        self._event("xid", frame.at, f"XID {frame.xid} on {where}", frame.uuid, xid=frame.xid)

    def rows(self, frame: RowsFrame) -> str:
        """Take readings. Says which mark one of them has risen over; empty for none.

        Raises msgspec.DecodeError on a signal that nobody declared.
        """
        risen = ""
        for subject, rows in frame.subjects():
            risen = self._risen(subject, rows, frame.at) or risen
        self._frames.setdefault(frame.uuid, deque(maxlen=_KEPT_FRAMES)).append(frame)
        return risen

    def reading(self, reading: Reading) -> None:
        """Take what was read by the way, when a command was obeyed."""
        self._readings.append(reading)

    def _risen(self, subject: Subject, rows: tuple[Row, ...], at: float) -> str:
        risen, marks = "", self._marks
        used = total = None
        for row in rows:
            name = row.signal
            if name not in SIGNAL:
                raise msgspec.DecodeError(f"no signal is called {name[:80]!r}")
            if name in marks and self._rises(name, subject, row.dim, row.value > marks[name]):
                risen = f"{name} of {subject} is {row.value:g}, over {marks[name]:g}"
            if name == GPU_MEMORY_USED_BYTES.name:
                used = row.value
            elif name == GPU_MEMORY_TOTAL_BYTES.name:
                total = row.value
        if used is not None and total and subject.on is On.GPU:
            self._free[subject.gpu] = total - used, at
        if MEMORY_RATIO in marks and used is not None and total:
            ratio, mark = used / total, marks[MEMORY_RATIO]
            if self._rises(MEMORY_RATIO, subject, "", ratio > mark):
                risen = f"{MEMORY_RATIO} of {subject} is {ratio:g}, over {mark:g}"
        return risen

    def _rises(self, name: str, subject: Subject, dim: str, above: bool) -> bool:
        """Whether a value is above its mark and was not before."""
        key = (name, subject, dim)
        was = key in self._above
        (self._above.add if above else self._above.discard)(key)
        return above and not was

    def _event(self, kind: str, at: float, text: str, uuid: str, *, xid: int | None = None) -> None:
        numbers = () if xid is None else (("xid", float(xid)),)
        alert = kind in ("gpu-blind", "xid")
        self._events.append(Event(kind, at, text, on_gpu(uuid), numbers, alert))


def _news(frames: Iterable[RowsFrame]) -> Iterator[Reading]:
    """Every sample of what has a history, and the last of anything else."""
    last: dict[tuple[str, Subject, str], tuple[Row, float]] = {}
    for frame in frames:
        for subject, rows in frame.subjects():
            for row in rows:
                if SIGNAL[row.signal].history:
                    yield row.reading(subject, frame.at)
                else:
                    last[row.signal, subject, row.dim] = (row, frame.at)
    for (_, subject, _), (row, at) in last.items():
        yield row.reading(subject, at)
