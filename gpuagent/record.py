"""Frames as bytes and back: what a crash leaves behind, and what a replay turns into plans again."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gpuagent.decide.merge import merge
from gpuagent.errors import Corrupt
from gpuagent.model.declare import Knob, Signal
from gpuagent.model.plan import Plan, Setting
from gpuagent.model.state import Frame, Key, NodeState, Reading, Sensed, fold
from gpuagent.model.text import wired
from gpuagent.model.vocab import KNOB, SIGNAL
from gpuagent.ports import Policy


def _names(value: Any) -> Any:
    """Signals and knobs are declared once; a record names them."""
    if isinstance(value, Signal | Knob):
        return value.name
    raise TypeError(f"{type(value).__name__} has no place in a record")


def _declared(kind: type, name: Any) -> Any:
    declared: Mapping[str, Any] = SIGNAL if kind is Signal else KNOB
    if not isinstance(name, str) or name not in declared:
        raise ValueError(f"no {kind.__name__.lower()} is called {name!r}")
    return declared[name]


# msgpack, because JSON has no infinity and an unlimited cpu.max is one.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_names)
_DECODER = msgspec.msgpack.Decoder(list[Frame], dec_hook=_declared)


def encode(frames: Iterable[Frame]) -> bytes:
    """What `decode` reads; bytes in names that were not UTF-8 become escapes."""
    listed = list(frames)
    try:
        return _ENCODER.encode(listed)
    except UnicodeEncodeError:
        return _ENCODER.encode(wired(msgspec.to_builtins(listed, enc_hook=_names)))


def decode(data: bytes) -> list[Frame]:
    """Raises Corrupt where `data` is not a record of this version's frames."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"not a record of frames: {error}") from error


def replay(frames: Sequence[Frame], policies: Sequence[Policy[Any]]) -> list[Plan]:
    """The plans that these policies make of these frames. Same frames, same plans."""
    state = NodeState(frames[0].now) if frames else None
    memories: dict[str, Any] = {p.name: p.begin() for p in policies}
    plans: list[Plan] = []
    for frame in frames:
        assert state is not None
        state = fold(state, frame)
        settings: list[Setting] = []
        for policy in policies:
            memories[policy.name], decision = policy.decide(memories[policy.name], state)
            settings += decision.settings
        plans.append(merge(settings, state))
    return plans


class FlightRecorder:
    """The last frames, as many as hold so many values, and what was known before the first of them.

    A replay of a dump starts with that knowledge and with policies that remember nothing: what they
    did remember is in the dump as text.
    """

    def __init__(self, values: int = 20_000) -> None:
        self._room = values
        self._frames: deque[tuple[Frame, int]] = deque()
        self._size = 0
        self._before = _Knowledge()
        self._tenants: object = None
        self._memories: Mapping[str, Any] = {}

    def before(self, state: NodeState, memories: Mapping[str, Any], frame: Frame) -> None:
        """Note the input of the decision that is about to be made."""
        self._memories = dict(memories)
        size = self._size_of(frame)
        self._frames.append((frame, size))
        self._size += size
        while self._size > self._room and len(self._frames) > 1:
            old, size = self._frames.popleft()
            self._size -= size
            self._before.take(old)

    def dump(self) -> tuple[bytes, str]:
        """(the frames as `decode` reads them, the memories as text for people)."""
        frames = [f for f, _ in self._frames]
        if self._before.anything:
            first = frames[0]
            known = self._before.sensed(first.now.mono)
            frames[0] = msgspec.structs.replace(first, sensed=(known, *first.sensed))
        return encode(frames), "\n".join(
            f"{name}: {memory!r}" for name, memory in self._memories.items()
        )

    def _size_of(self, frame: Frame) -> int:
        """How many values a frame adds, readings and processes mostly.

        Tenants are said in every frame and are the same objects while nothing changes.
        """
        size = 1 + len(frame.outcomes) + len(frame.health) + len(frame.leases)
        for said in frame.sensed:
            size += len(said.readings) + len(said.events)
            size += len(said.gpus or ()) + len(said.gpu_processes or ())
            if said.tenants is not None and said.tenants is not self._tenants:
                self._tenants = said.tenants
                size += sum(1 + len(t.processes) + len(t.seats) for t in said.tenants)
        return size


class _Knowledge:
    """What frames that are no longer kept have told: the latest of each."""

    _PRUNE_ABOVE = 4096

    def __init__(self) -> None:
        self._readings: dict[Key, Reading] = {}
        self._inventory = Sensed()
        self.anything = False

    def take(self, frame: Frame) -> None:
        self.anything = True
        for said in frame.sensed:
            self._readings.update((r.key, r) for r in said.readings)
            known = self._inventory
            self._inventory = Sensed(
                gpus=known.gpus if said.gpus is None else said.gpus,
                gpu_processes=known.gpu_processes
                if said.gpu_processes is None
                else said.gpu_processes,
                tenants=known.tenants if said.tenants is None else said.tenants,
            )
        if len(self._readings) > self._PRUNE_ABOVE:
            self._readings = self._live(frame.now.mono)

    def sensed(self, now: float) -> Sensed:
        readings = tuple(self._live(now).values())
        return msgspec.structs.replace(self._inventory, readings=readings)

    def _live(self, now: float) -> dict[Key, Reading]:
        return {k: r for k, r in self._readings.items() if now - r.at <= r.signal.expires}
