"""sense.gpus and sense.xids: the node's power, and every XID counted once."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import AgentError, Refused, Unavailable
from gpuagent.model.inventory import NODE, Gpu, Inventory, on_gpu
from gpuagent.model.state import Event, Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import (
    GPU_POWER_WATTS,
    GPU_TEMPERATURE_CELSIUS,
    GPU_XID_ERRORS,
    GPU_XID_LAST_SECONDS,
    NODE_POWER_WATTS,
)
from gpuagent.ports import KernelXid
from gpuagent.sense.gpus import GpuReadings
from gpuagent.sense.xids import KernelXids, XidCounts, describe, pci_address

A = Gpu(uuid="GPU-a", index=0, name="L40S", pci_bus_id="00000000:3B:00.0")
B = Gpu(uuid="GPU-b", index=1, name="L40S", pci_bus_id="00010000:5E:00.0")
LOST_B = Gpu(uuid="GPU-b", index=1, name="L40S", pci_bus_id="00010000:5E:00.0", blind="lost")


class FakeGpus:
    """Says what the test has put there, or raises it."""

    def __init__(self) -> None:
        self.says: Sensed | AgentError = Sensed()

    def drain(self) -> Sensed:
        if isinstance(self.says, AgentError):
            raise self.says
        return self.says

    def watch(self, marks: Mapping[str, float]) -> None:
        """No sample is ever taken here."""

    async def power_limit(self, uuid: str) -> float:
        return 300.0

    async def set_power_limit(self, uuid: str, watts: float) -> None:
        """Nothing listens."""

    async def release(self) -> None:
        """Nothing is held."""

    async def resume(self) -> None:
        """Nothing was let go."""


class FakeLog:
    def __init__(self) -> None:
        self.lines: list[KernelXid] = []
        self.broken: AgentError | None = None

    def take(self) -> list[KernelXid]:
        if self.broken is not None:
            raise self.broken
        lines, self.lines = self.lines, []
        return lines


def at(mono: float) -> Instant:
    return Instant(mono, 1_700_000_000 + mono)


def state(now: Instant, *gpus: Gpu) -> NodeState:
    return NodeState(now, inventory=Inventory(gpus=gpus))


def power(uuid: str, watts: float, when: float) -> Reading:
    return Reading(GPU_POWER_WATTS, on_gpu(uuid), watts, when)


async def node_watts(sensor: GpuReadings, now: Instant) -> tuple[float, float] | None:
    said = await sensor.read(now, NodeState(now))
    found = [r for r in said.readings if r.signal is NODE_POWER_WATTS]
    assert all(r.subject == NODE for r in found)
    return (found[0].value, found[0].at) if found else None


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus()


async def test_the_nodes_power_is_the_sum_and_as_old_as_its_oldest_part(gpus: FakeGpus) -> None:
    sensor = GpuReadings(gpus, XidCounts())
    gpus.says = Sensed(
        gpus=(A, B), readings=(power("GPU-a", 90, 8), power("GPU-a", 100, 9), power("GPU-b", 50, 7))
    )
    assert await node_watts(sensor, at(10)) == (150, 7)
    gpus.says = Sensed(readings=(power("GPU-b", 70, 10.5),))
    assert await node_watts(sensor, at(11)) == (170, 9)


async def test_without_one_card_there_is_no_sum(gpus: FakeGpus) -> None:
    sensor = GpuReadings(gpus, XidCounts())
    gpus.says = Sensed(gpus=(A, B), readings=(power("GPU-a", 100, 1),))
    assert await node_watts(sensor, at(1)) is None
    gpus.says = Sensed(readings=(power("GPU-b", 50, 1.5),))
    assert await node_watts(sensor, at(2)) == (150, 1)
    gpus.says = Sensed(gpus=(A, LOST_B), readings=(power("GPU-a", 100, 3),))
    assert await node_watts(sensor, at(3)) is None, "a blind card"
    gpus.says = Sensed(gpus=(A, B), readings=(power("GPU-a", 100, 9),))
    assert await node_watts(sensor, at(9)) is None, "what is known of the other is too old"
    gpus.says = Sensed(gpus=(A,), readings=(power("GPU-a", 100, 9),))
    assert await node_watts(sensor, at(9)) == (100, 9), "the other is no longer there"
    gpus.says = Sensed(gpus=())
    assert await node_watts(sensor, at(10)) is None, "no card at all"


async def test_what_the_driver_says_is_passed_on_and_so_is_its_silence(gpus: FakeGpus) -> None:
    sensor = GpuReadings(gpus, XidCounts())
    reading = Reading(GPU_TEMPERATURE_CELSIUS, on_gpu("GPU-a"), 50, 1)
    event = Event("gpu-found", 1, "GPU 0 was found", on_gpu("GPU-a"))
    gpus.says = Sensed(gpus=(A,), gpu_processes=(), readings=(reading,), events=(event,))
    said = await sensor.read(at(1), NodeState(at(1)))
    assert said == gpus.says
    gpus.says = Unavailable("the GPU reader starts again")
    with pytest.raises(Unavailable, match="starts again"):
        await sensor.read(at(2), NodeState(at(2)))


# -- XIDs ---------------------------------------------------------------------------------------------


class Xids:
    """Both sensors that hear of XIDs, over one count."""

    def __init__(self) -> None:
        self.counts = XidCounts()
        self.gpus = FakeGpus()
        self.log = FakeLog()
        self.nvml = GpuReadings(self.gpus, self.counts)
        self.kernel = KernelXids(self.log, self.counts)
        self.total: dict[tuple[str, str], float] = {}
        self.events: list[Event] = []

    async def from_nvml(self, now: float, uuid: str, *codes: int) -> None:
        self.gpus.says = Sensed(
            events=tuple(
                Event("xid", now, f"XID {c} on GPU", on_gpu(uuid), (("xid", float(c)),))
                for c in codes
            )
        )
        self._note(await self.nvml.read(at(now), state(at(now), A, B)))

    async def from_kernel(self, now: float, pci: tuple[int, int, int], *codes: int) -> None:
        self.log.lines = [KernelXid(pci, c, f"NVRM: Xid {c}") for c in codes]
        self._note(await self.kernel.read(at(now), state(at(now), A, B)))

    def _note(self, said: Sensed) -> None:
        self.events += said.events
        for r in said.readings:
            if r.signal is GPU_XID_ERRORS:
                self.total[r.subject.gpu, r.dims[0]] = r.value


async def test_each_xid_counts_although_several_come_at_once() -> None:
    xids = Xids()
    await xids.from_nvml(1, "GPU-a", 31, 31, 43)
    await xids.from_nvml(2, "GPU-b", 31)
    assert xids.total == {("GPU-a", "31"): 2, ("GPU-a", "43"): 1, ("GPU-b", "31"): 1}
    assert len(xids.events) == 4
    assert "page fault" in xids.events[0].text


async def test_the_time_of_the_last_one_is_wall_clock(gpus: FakeGpus) -> None:
    sensor = GpuReadings(gpus, XidCounts())
    gpus.says = Sensed(events=(Event("xid", 3, "XID 48 on", on_gpu("GPU-a"), (("xid", 48.0),)),))
    said = await sensor.read(at(3), NodeState(at(3)))
    last = [r for r in said.readings if r.signal is GPU_XID_LAST_SECONDS]
    assert [(r.value, r.dims) for r in last] == [(1_700_000_003, ("48",))]


async def test_what_both_tell_counts_once_whoever_is_first() -> None:
    xids = Xids()
    await xids.from_nvml(10, "GPU-a", 79)
    await xids.from_kernel(11, (0, 0x3B, 0), 79)
    assert xids.total == {("GPU-a", "79"): 1}
    await xids.from_kernel(100, (0x10000, 0x5E, 0), 119, 119, 119)
    assert xids.total["GPU-b", "119"] == 1, "one error fills several lines"
    await xids.from_nvml(101, "GPU-b", 119)
    assert xids.total["GPU-b", "119"] == 1
    await xids.from_nvml(101.5, "GPU-b", 119)
    assert xids.total["GPU-b", "119"] == 2, "NVML tells each one"
    await xids.from_kernel(200, (0x10000, 0x5E, 0), 119)
    assert xids.total["GPU-b", "119"] == 3, "the kernel alone, much later"
    assert len(xids.events) == 4


async def test_an_endless_burst_of_lines_counts_now_and_then() -> None:
    xids = Xids()
    for second in range(130):
        await xids.from_kernel(second, (0, 0x3B, 0), 120)
    assert xids.total == {("GPU-a", "120"): 3}


async def test_an_xid_of_a_card_we_do_not_know_is_told_and_not_counted() -> None:
    xids = Xids()
    await xids.from_kernel(1, (0, 0x99, 0), 79)
    assert xids.total == {}
    assert "no card we know" in xids.events[0].text


async def test_of_many_xids_of_cards_we_do_not_know_few_are_told_and_the_rest_is_a_number() -> None:
    xids = Xids()
    for second in range(60):
        for bus in range(20):
            await xids.from_kernel(second, (0, bus, 1), 31)
    assert [e.text.partition(" on no card")[0] for e in xids.events] == [
        f"the kernel log tells of {describe(31)}"
    ] * 10
    await xids.from_kernel(60, (0, 0x3B, 0), 79)
    more, known = xids.events[10:]
    assert "1190 more XIDs on no card we know, within 60 s" in more.text
    assert dict(known.numbers) == {"xid": 79.0}, "what is known is not drowned"
    await xids.from_kernel(120, (0, 0x99, 0), 43)
    assert len(xids.events) == 13
    assert "XID 43" in xids.events[-1].text


async def test_a_log_that_cannot_be_read_is_the_sensors_health() -> None:
    xids = Xids()
    xids.log.broken = Refused("/dev/kmsg: Permission denied")
    with pytest.raises(Refused, match="kmsg"):
        await xids.kernel.read(at(1), NodeState(at(1)))


@pytest.mark.parametrize(
    ("bus_id", "expected"),
    [("00000000:3B:00.0", (0, 0x3B, 0)), ("", None), ("0000:3b:00", None), ("x:y:z.0", None)],
)
def test_pci_addresses(bus_id: str, expected: tuple[int, int, int] | None) -> None:
    assert pci_address(Gpu(uuid="u", index=0, name="n", pci_bus_id=bus_id)) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from(["nvml", "kernel"]), st.sampled_from([31, 79]), st.floats(0, 20)),
        max_size=30,
    )
)
def test_a_count_only_grows_and_never_exceeds_what_was_told(
    told: Sequence[tuple[str, int, float]],
) -> None:
    counts = XidCounts()
    now, last, nvml_told = 0.0, {31: 0.0, 79: 0.0}, {31: 0, 79: 0}
    for source, xid, gap in told:
        now += gap
        nvml_told[xid] += source == "nvml"
        if source == "nvml":
            news = counts.from_nvml("GPU-a", xid, at(now), now)
        else:
            news = counts.from_kernel("GPU-a", xid, at(now))
        for reading in news:
            if reading.signal is GPU_XID_ERRORS:
                assert reading.value == last[xid] + 1
                last[xid] = reading.value
    for xid, total in last.items():
        assert nvml_told[xid] <= total <= len([1 for _, x, _ in told if x == xid])
