"""What the NVML child sends: checked as it is decoded, and turned into the model's values."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpuagent.model.inventory import Gpu, GpuProcess, Link, MigInstance, Subject, on_gpu, on_mig
from gpuagent.model.state import Reading
from gpuagent.model.vocab import SIGNAL

Text = Annotated[str, Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """There is a driver, and this many cards."""

    driver: Text
    count: Annotated[int, Meta(ge=0, le=1024)]


class MigPart(msgspec.Struct, frozen=True):
    """A MIG instance within `CardFrame`."""

    uuid: Text
    gi: Number
    ci: Number
    name: Text
    memory: Number | None


class CardFrame(msgspec.Struct, frozen=True, tag_field="t", tag="card"):
    """Who a card is. Sent when it is found, and again now and then."""

    i: Number
    uuid: Text
    name: Text
    pci: Text
    memory: Number | None
    power_mw: tuple[Number, Number] | None
    default_mw: Number | None
    numa: Number | None
    minor: Number | None
    mig_enabled: bool | None
    mig: tuple[MigPart, ...]
    links: tuple[tuple[Text, Literal["nvlink", "pcie"], Number | None, Text], ...]

    def gpu(self, driver: str) -> Gpu:
        """The card as the inventory holds it; `driver` is the driver's version."""
        low, high = self.power_mw or (None, None)
        parts = tuple(
            MigInstance(
                uuid=m.uuid,
                gpu=self.uuid,
                gpu_instance=m.gi,
                compute_instance=m.ci,
                name=m.name,
                memory_bytes=m.memory,
            )
            for m in self.mig
        )
        return Gpu(
            uuid=self.uuid,
            index=self.i,
            name=self.name,
            pci_bus_id=self.pci,
            memory_bytes=self.memory,
            power_min_watts=_watts(low),
            power_max_watts=_watts(high),
            power_default_watts=_watts(self.default_mw),
            driver=driver,
            numa_node=self.numa,
            minor=self.minor,
            mig_enabled=self.mig_enabled,
            mig=parts,
            links=tuple(Link(*link) for link in self.links),
        )


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One reading within `RowsFrame`."""

    signal: str
    value: float
    dim: Text = ""
    exact: bool = True

    def reading(self, subject: Subject, at: float) -> Reading:
        """Raises KeyError on a signal that nobody declared."""
        dims = (self.dim,) if self.dim else ()
        return Reading(SIGNAL[self.signal], subject, self.value, at, self.exact, dims)


class RowsFrame(msgspec.Struct, frozen=True, tag_field="t", tag="rows"):
    """Readings of a card, and of its MIG instances by UUID."""

    at: float
    uuid: Text
    r: tuple[Row, ...]
    mig: dict[Text, tuple[Row, ...]]

    def subjects(self) -> list[tuple[Subject, tuple[Row, ...]]]:
        """The card and its MIG instances, each with what was read of it."""
        parts = [(on_mig(uuid), rows) for uuid, rows in self.mig.items()]
        return [(on_gpu(self.uuid), self.r), *parts]


class ProcessRow(msgspec.Struct, frozen=True, array_like=True):
    """One process within `ProcessesFrame`."""

    pid: Number
    kind: Literal["compute", "graphics", "mps"]
    memory: Number | None
    mig: Text
    utilization: float | None


class ProcessesFrame(msgspec.Struct, frozen=True, tag_field="t", tag="procs"):
    """All processes that have a context on a card."""

    at: float
    """Monotonic seconds at which it began to be read."""
    uuid: Text
    p: tuple[ProcessRow, ...]

    def processes(self) -> tuple[GpuProcess, ...]:
        return tuple(
            GpuProcess(
                pid=p.pid,
                gpu=self.uuid,
                kind=p.kind,
                memory_bytes=p.memory,
                mig=p.mig,
                utilization_ratio=p.utilization,
            )
            for p in self.p
        )


class XidFrame(msgspec.Struct, frozen=True, tag_field="t", tag="xid"):
    """The driver has reported an XID."""

    at: float
    uuid: Text
    xid: Number


class BlindFrame(msgspec.Struct, frozen=True, tag_field="t", tag="blind"):
    """A card does not answer; its UUID is empty where it never said it to this child."""

    i: Number
    uuid: Text
    why: Text


class Introduced(msgspec.Struct, frozen=True, tag_field="t", tag="introduced"):
    """A card was found, and everything that can be read of it was sent once."""

    i: Number


class Answer(msgspec.Struct, frozen=True, tag_field="t", tag="answer"):
    """What became of a command. `code` is NVML's, 0 for success, and `value` is in NVML's unit."""

    id: int
    value: Number | None
    code: int
    why: Text


class Bye(msgspec.Struct, frozen=True, tag_field="t", tag="bye"):
    """Why the child ends by itself. `code` is NVML's, 0 if nothing is wrong."""

    why: Text
    code: int
    missing: tuple[Text, ...]


Frame = (
    Hello
    | CardFrame
    | RowsFrame
    | ProcessesFrame
    | XidFrame
    | BlindFrame
    | Introduced
    | Answer
    | Bye
)

decode = msgspec.json.Decoder(Frame).decode
"""Raises msgspec.DecodeError (ValidationError is one) on what is no frame."""


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
