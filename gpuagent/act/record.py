"""What the ledger's lines say, how each is checked, and what they add up to. No I/O.

A line is `{"v":1,"crc":"9ae0daaf","e":{...}}`: the version, the CRC-32 of the bytes of `e`, and one
record. Every `intend` carries the original value again, so that a lost line never loses an original
that a later line needs. A field that has come later has a default, and an older version passes over
it: both read each other's lines.
"""

import zlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from gpuagent.errors import Corrupt
from gpuagent.model.declare import Knob, On
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import KNOB
from gpuagent.ports import Real

VERSION = 1
LINE_BYTES_MAX = 64 * 1024
_KEPT_MAX = 32
"""Values of ours remembered per target. Only the last few can still be on the host."""


class Target(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One value on the host. Unlike a subject it has no owner: a renamed tenant changes nothing."""

    knob: str
    subject: Subject

    def __str__(self) -> str:
        return f"{self.knob} of {self.subject}"


def target_of(knob: Knob, subject: Subject) -> Target:
    """The target a setting is about; the tenant's name is no part of a cgroup's or process's identity."""
    if subject.on in {On.CGROUP, On.PROCESS}:
        subject = msgspec.structs.replace(subject, tenant="")
    return Target(knob.name, subject)


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A `Real` as JSON can carry it: no number stands for "no limit"."""

    raw: str
    value: float | None

    @classmethod
    def of(cls, real: Real) -> "Kept":
        return cls(real.raw, None if real.value == float("inf") else real.value)

    @property
    def real(self) -> Real:
        return Real(float("inf") if self.value is None else self.value, self.raw)


class Entry(msgspec.Struct, frozen=True, tag="held"):
    """A target that we have changed, or have announced we would, and what it was before."""

    hold: int
    """Number of this hold: a target that was put back and is taken again gets a new one."""
    knob: str
    subject: Subject
    identity: str
    boot: str
    was: Kept
    wrote: tuple[Kept, ...]
    """Our writes and what they read back as, newest last."""
    pending: bool
    """Whether the newest write has not been read back, so may or may not have been made."""
    wall: float
    rule: str = ""
    """`Setting.rule` of the newest write; empty where an earlier version of ours wrote the line."""
    budget: Kept | None = None
    """What serves the budget without what passes; None where the newest write is that."""
    freed: tuple[tuple[str, int], ...] | None = None
    """Device memory that the target has given up, by card in bytes, and needs to be put back.

    None where it has begun to give up nothing, or that is not known.
    """

    @property
    def target(self) -> Target:
        subject = self.subject
        if subject.on in {On.CGROUP, On.PROCESS}:
            subject = msgspec.structs.replace(subject, tenant="")
        return Target(self.knob, subject)

    @property
    def original(self) -> Real:
        return self.was.real

    def explains(self, real: Real, deadband: float) -> bool:
        """Whether `real` is our doing: one of our writes, or a pending write made or not made.

        A pending write may have been rounded by the target before we could read it back, so a value
        within the deadband of it is ours too. So is what a value of ours is left as when whoever
        of ours maintained it has died.
        """
        knob = KNOB.get(self.knob)
        if any(k.raw == real.raw for k in self.wrote):
            return True
        if knob is not None and knob.leftover and real.raw == knob.leftover:
            return True
        if not self.pending:
            return False
        return real.raw == self.was.raw or abs(real.value - self.wrote[-1].real.value) < deadband


class Intend(msgspec.Struct, frozen=True, tag="intend"):
    """Written and durable before the value is."""

    hold: int
    knob: str
    subject: Subject
    identity: str
    boot: str
    was: Kept
    write: Kept
    wall: float
    rule: str = ""
    """`Setting.rule`: it decides what becomes of the value when the agent ends."""
    budget: Kept | None = None
    """`Setting.budget_value`, as it would be written."""


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """What the newest write of a hold read back as."""

    hold: int
    read: Kept


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The target is no longer ours."""

    hold: int
    what: str
    why: str
    wall: float


Record = Intend | Confirm | Done | Entry


class Book:
    """What is held, as the records seen so far add up."""

    def __init__(self) -> None:
        self._entries: dict[Target, Entry] = {}
        self._targets: dict[int, Target] = {}
        self._next_hold = 1

    @property
    def entries(self) -> Mapping[Target, Entry]:
        return MappingProxyType(self._entries)

    def new_hold(self) -> int:
        self._next_hold += 1
        return self._next_hold - 1

    def drop(self, targets: Iterable[Target]) -> None:
        for target in targets:
            self._targets.pop(self._entries.pop(target).hold, None)

    def apply(self, record: Record) -> None:
        """Take one record in. One about an unknown or older hold changes nothing."""
        self._next_hold = max(self._next_hold, record.hold + 1)
        match record:
            case Entry():
                self._put(record)
            case Intend():
                self._intend(record)
            case Confirm():
                entry = self._of(record.hold)
                if entry is not None:
                    wrote = _with(entry.wrote, record.read)
                    self._put(msgspec.structs.replace(entry, wrote=wrote, pending=False))
            case Done():
                entry = self._of(record.hold)
                if entry is not None:
                    self.drop([entry.target])

    def _of(self, hold: int) -> Entry | None:
        target = self._targets.get(hold)
        return None if target is None else self._entries[target]

    def _intend(self, record: Intend) -> None:
        known = self._of(record.hold)
        self._put(
            Entry(
                hold=record.hold,
                knob=record.knob,
                subject=record.subject,
                identity=record.identity,
                boot=record.boot,
                was=record.was,
                wrote=_with(known.wrote if known is not None else (), record.write),
                pending=True,
                wall=known.wall if known is not None else record.wall,
                rule=record.rule,
                budget=record.budget,
                freed=known.freed if known is not None else None,
            )
        )

    def renew(self, entry: Entry) -> None:
        """Take an entry in if its hold has not ended meanwhile."""
        if self._of(entry.hold) is not None:
            self._put(entry)

    def _put(self, entry: Entry) -> None:
        """A newer hold replaces an older one of the same target whose end was never written."""
        known = self._entries.get(entry.target)
        if known is not None:
            if known.hold > entry.hold:
                return
            del self._targets[known.hold]
        self._entries[entry.target] = entry
        self._targets[entry.hold] = entry.target


def _with(kept: tuple[Kept, ...], new: Kept) -> tuple[Kept, ...]:
    return (*(k for k in kept if k.raw != new.raw), new)[-_KEPT_MAX:]


class _Line(msgspec.Struct, frozen=True):
    v: int
    crc: str
    e: msgspec.Raw


class _Peek(msgspec.Struct, frozen=True):
    v: int


_lines = msgspec.json.Decoder(_Line)
_peeks = msgspec.json.Decoder(_Peek)
_records: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode_line(record: Record) -> bytes:
    """One line with its newline."""
    body = msgspec.json.encode(record)
    return b'{"v":%d,"crc":"%08x","e":%b}\n' % (VERSION, zlib.crc32(body), body)


def decode_line(line: bytes) -> Record | None:
    """The record of a line; None if a newer version wrote it. Raises Corrupt."""
    if len(line) > LINE_BYTES_MAX:
        raise Corrupt(f"{len(line)} bytes long")
    try:
        version = _peeks.decode(line).v
        if version > VERSION:
            return None
        if version < 1:
            raise Corrupt(f"version {version}")
        outer = _lines.decode(line)
        if outer.crc != f"{zlib.crc32(bytes(outer.e)):08x}":
            raise Corrupt("checksum does not match")
        return _records.decode(outer.e)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a ledger line ({error})") from error
