"""Frames as bytes and back: what a crash leaves behind, and what a replay turns into plans again."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gpuagent.decide.merge import merge
from gpuagent.errors import Corrupt
from gpuagent.model.plan import Plan, Setting
from gpuagent.model.state import Frame, NodeState, fold
from gpuagent.model.vocab import KNOB, SIGNAL, Knob, Signal
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
        return _ENCODER.encode(_plain(msgspec.to_builtins(listed, enc_hook=_names)))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


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
    """The last frames, as many as hold so many values, and what the policies remembered."""

    def __init__(self, readings: int = 20_000) -> None:
        self._room = readings
        self._frames: list[Frame] = []
        self._size = 0
        self._memories: Mapping[str, Any] = {}

    def before(self, state: NodeState, memories: Mapping[str, Any], frame: Frame) -> None:
        """Note the input of the decision that is about to be made."""
        self._memories = dict(memories)
        self._frames.append(frame)
        self._size += _size(frame)
        while self._size > self._room and len(self._frames) > 1:
            self._size -= _size(self._frames.pop(0))

    def dump(self) -> tuple[bytes, str]:
        """(the frames as `decode` reads them, the memories as text for people)."""
        return encode(self._frames), "\n".join(
            f"{name}: {memory!r}" for name, memory in self._memories.items()
        )


def _size(frame: Frame) -> int:
    """How many values a frame holds, readings mostly."""
    said = sum(
        len(s.readings)
        + len(s.events)
        + len(s.gpus or ())
        + len(s.gpu_processes or ())
        + len(s.tenants or ())
        for s in frame.sensed
    )
    return 1 + said + len(frame.outcomes) + len(frame.health)
