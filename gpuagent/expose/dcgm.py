"""/metrics/dcgm: what was measured, under the names and units of dcgm-exporter up to 4.8 (FACTS 6).

A name appears only where our value means the same. These names cannot mark an estimate, so an
estimate is left out: memory in use as read from a driver before 510 counts the reserve, for one.
`DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL` is never here: despite its name and declared type it is a rate,
in thousands of KiB per second over an interval of DCGM's (dcgm-exporter#658); we count bytes.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from gpuagent.model import vocab
from gpuagent.model.declare import Signal
from gpuagent.model.inventory import Gpu, Subject, on_gpu, on_mig
from gpuagent.model.plan import Snapshot
from gpuagent.model.state import NodeState
from gpuagent.model.text import wire

_PER_MIB = 1 / 1024**2
_PROFILE = re.compile(r"\d+g\.\d+gb\S*")
"""In the name of a MIG instance; "1c.3g.20gb" is a compute instance of the profile "3g.20gb"."""


class Field(NamedTuple):
    """One of DCGM's names, and the signal that means the same."""

    name: str
    help: str
    signal: Signal
    factor: float
    """From our base unit to DCGM's."""
    kind: Literal["gauge", "counter"] = "gauge"
    dims: tuple[str, ...] = ()


FIELDS: tuple[Field, ...] = (
    Field("DCGM_FI_DEV_SM_CLOCK", "SM clock (in MHz).", vocab.GPU_CLOCK_HERTZ, 1e-6, dims=("sm",)),
    Field(
        "DCGM_FI_DEV_MEM_CLOCK",
        "Memory clock (in MHz).",
        vocab.GPU_CLOCK_HERTZ,
        1e-6,
        dims=("memory",),
    ),
    Field(
        "DCGM_FI_DEV_MEMORY_TEMP",
        "Memory temperature (in C).",
        vocab.GPU_MEMORY_TEMPERATURE_CELSIUS,
        1,
    ),
    Field("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", vocab.GPU_TEMPERATURE_CELSIUS, 1),
    Field("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", vocab.GPU_POWER_WATTS, 1),
    Field(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy used since the driver was loaded (in mJ).",
        vocab.GPU_ENERGY_JOULES,
        1000,
        "counter",
    ),
    Field("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe retries.", vocab.GPU_PCIE_REPLAYS, 1, "counter"),
    Field("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", vocab.GPU_UTILIZATION_RATIO, 100),
    Field(
        "DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).", vocab.GPU_MEMORY_BUSY_RATIO, 100
    ),
)
"""Of a whole card."""

MEMORY: tuple[Field, ...] = (
    Field(
        "DCGM_FI_DEV_FB_FREE", "Framebuffer free (in MiB).", vocab.GPU_MEMORY_FREE_BYTES, _PER_MIB
    ),
    Field(
        "DCGM_FI_DEV_FB_USED", "Framebuffer used (in MiB).", vocab.GPU_MEMORY_USED_BYTES, _PER_MIB
    ),
)
"""Of a whole card, or of each GPU instance of one that MIG has partitioned."""

XID_NAME = "DCGM_FI_DEV_XID_ERRORS"
_XID_HELP = "Code of the last XID error."

Series = tuple[str, float]
"""The labels as text, and the value."""


def render(snapshot: Snapshot, hostname: str) -> bytes:
    """The exposition of `snapshot` in format 0.0.4; a reading that has expired has no series."""
    state = snapshot.state
    cards = sorted(state.inventory.gpus or (), key=lambda g: (g.index, g.uuid))
    mark = {"simulated": "true"} if snapshot.posture.simulated else {}
    named = [(card, {**_labels(card, hostname), **mark}) for card in cards]
    lines: list[str] = []
    for field in FIELDS:
        found = (_one(state, field, on_gpu(card.uuid), labels) for card, labels in named)
        lines += _family(field.name, field.help, field.kind, (s for s in found if s))
    for field in MEMORY:
        each = (s for card, labels in named for s in _memory(state, field, card, labels))
        lines += _family(field.name, field.help, field.kind, each)
    by_uuid = {card.uuid: labels for card, labels in named}
    lines += _family(XID_NAME, _XID_HELP, "gauge", _last_xids(state, by_uuid))
    return "".join(lines).encode()


def _labels(card: Gpu, hostname: str) -> dict[str, str]:
    """As dcgm-exporter names a card. Its `device` is the index, whatever the device node's number."""
    return {
        "gpu": str(card.index),
        "UUID": card.uuid,
        "pci_bus_id": card.pci_bus_id,
        "device": f"nvidia{card.index}",
        "modelName": card.name,
        "Hostname": hostname,
    }


def _one(state: NodeState, field: Field, subject: Subject, labels: dict[str, str]) -> Series | None:
    reading = state.reading(field.signal, subject, field.dims)
    if reading is None or not reading.exact:
        return None
    return _written(labels), round(reading.value * field.factor, 6)  # 75.0, not 75.00000001


def _memory(state: NodeState, field: Field, card: Gpu, labels: dict[str, str]) -> Iterator[Series]:
    """A partitioned card has no series of its own beside its parts': a sum would count it twice."""
    if not card.mig:
        whole = _one(state, field, on_gpu(card.uuid), labels)
        if whole is not None:
            yield whole
        return
    told: set[int] = set()
    for part in card.mig:
        profile = _PROFILE.search(part.name)
        # Compute instances of one GPU instance share its memory.
        if profile is None or part.gpu_instance in told:
            continue
        mig = {"GPU_I_PROFILE": profile[0], "GPU_I_ID": str(part.gpu_instance)}
        found = _one(state, field, on_mig(part.uuid), {**labels, **mig})
        if found is not None:
            told.add(part.gpu_instance)
            yield found


def _last_xids(state: NodeState, named: dict[str, dict[str, str]]) -> Iterator[Series]:
    """A card without an XID since the agent started has no series: nothing is known of before."""
    last: dict[str, tuple[float, int]] = {}
    for reading in state.live():
        uuid = reading.subject.gpu
        if reading.signal is vocab.GPU_XID_LAST_SECONDS and uuid in named:
            last[uuid] = max(last.get(uuid, (0.0, 0)), (reading.value, int(reading.dims[0])))
    for uuid, labels in named.items():
        if uuid in last:
            yield _written(labels), last[uuid][1]


def _family(name: str, text: str, kind: str, series: Iterable[Series]) -> Iterator[str]:
    """Written by hand: prometheus_client would end a counter's name in _total."""
    lines = [f"{name}{{{labels}}} {value}\n" for labels, value in series]
    if lines:
        yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        yield from lines


def _written(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return wire(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
