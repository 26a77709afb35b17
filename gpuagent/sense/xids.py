"""Sensor `kernel_log`, and the count of XID errors, each once, whoever told of it."""

import re
from collections.abc import Iterator

from gpuagent.model.inventory import Gpu, on_gpu
from gpuagent.model.state import Event, Instant, NodeState, Reading, Sensed
from gpuagent.model.vocab import GPU_XID_ERRORS, GPU_XID_LAST_SECONDS
from gpuagent.ports import KernelLog, KernelXid

_SAME_SECONDS = 5.0
"""NVML and the kernel log tell of one error within this, and one error fills lines within this."""
_LONGEST_BURST_SECONDS = 60.0
_MOST_SERIES = 2000
_STRANGERS_TOLD = 10
_STRANGERS_SECONDS = 60.0
"""Of XIDs on no card we know, so many are told of one by one within this, the others as a number."""

MEANINGS = {
    13: "graphics engine exception, mostly an error of the program",
    31: "GPU memory page fault, mostly an error of the program",
    43: "GPU stopped processing, mostly an error of the program",
    45: "preemptive cleanup after an earlier error",
    48: "double-bit ECC error",
    63: "row remapping or page retirement was recorded",
    64: "row remapping or page retirement has failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP did not answer in time",
    120: "GSP error",
}
"""NVIDIA's XID catalogue, in few words, for the codes an operator meets."""


class _Seen:
    """What has been told of one code on one card."""

    def __init__(self) -> None:
        self.count = 0
        self.wall = 0.0
        self.told_by_nvml = float("-inf")
        self.burst_began = float("-inf")
        self.last_line = float("-inf")
        self.ahead_of_nvml = False
        """The burst was counted, and NVML has not told of it."""


class XidCounts:
    """Counts since the agent started. The sensors that hear of XIDs share one."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _Seen] = {}

    def from_nvml(self, uuid: str, xid: int, now: Instant, at: float) -> tuple[Reading, ...]:
        """Take one event of NVML's, which tells each error once. Readings if it is news."""
        seen = self._of(uuid, xid)
        if seen is None:
            return ()
        known = seen.ahead_of_nvml and at - seen.last_line <= _SAME_SECONDS
        seen.ahead_of_nvml = False
        seen.told_by_nvml = at
        return () if known else self._count(seen, uuid, xid, now)

    def from_kernel(self, uuid: str, xid: int, now: Instant) -> tuple[Reading, ...]:
        """Take one line of the kernel log, where one error may fill many. Readings if it is news."""
        seen = self._of(uuid, xid)
        if seen is None:
            return ()
        same = now.mono - seen.last_line <= _SAME_SECONDS
        seen.last_line = now.mono
        if same and now.mono - seen.burst_began <= _LONGEST_BURST_SECONDS:
            return ()
        seen.burst_began = now.mono
        if now.mono - seen.told_by_nvml <= _SAME_SECONDS:
            return ()
        seen.ahead_of_nvml = True
        return self._count(seen, uuid, xid, now)

    def _of(self, uuid: str, xid: int) -> _Seen | None:
        seen = self._seen.get((uuid, xid))
        if seen is None and len(self._seen) < _MOST_SERIES:
            seen = self._seen[uuid, xid] = _Seen()
        return seen

    def _count(self, seen: _Seen, uuid: str, xid: int, now: Instant) -> tuple[Reading, ...]:
        seen.count += 1
        seen.wall = now.wall
        subject, dims = on_gpu(uuid), (str(xid),)
        return (
            Reading(GPU_XID_ERRORS, subject, float(seen.count), now.mono, dims=dims),
            Reading(GPU_XID_LAST_SECONDS, subject, seen.wall, now.mono, dims=dims),
        )


class _Strangers:
    """What is told of XIDs on cards that nobody knows: a log can be full of them."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._told = 0
        self._untold = 0

    def rest(self, now: Instant) -> Iterator[Event]:
        """At the end of each minute, how many were not told of one by one."""
        if now.mono - self._since < _STRANGERS_SECONDS:
            return
        if self._untold:
            text = (
                f"the kernel log tells of {self._untold} more XIDs on no card we know, within "
                f"{now.mono - self._since:.0f} s"
            )
            yield Event("xid", now.mono, text, None, alert=True)
        self._since, self._told, self._untold = now.mono, 0, 0

    def tell(self, told: KernelXid, now: Instant) -> Iterator[Event]:
        if self._told >= _STRANGERS_TOLD:
            self._untold += 1
            return
        self._told += 1
        text = f"the kernel log tells of {describe(told.xid)} on no card we know: {told.text}"
        yield Event("xid", now.mono, text, None, (("xid", float(told.xid)),), alert=True)


class KernelXids:
    """XIDs of the kernel log that NVML did not report. Its health is that of the log."""

    name = "kernel_log"
    interval = 1.0

    def __init__(self, log: KernelLog, counts: XidCounts) -> None:
        self._log = log
        self._counts = counts
        self._strangers = _Strangers()

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Raises Unsupported and Refused where the log cannot be read."""
        by_pci = {pci_address(g): g for g in state.inventory.gpus or ()}
        readings: list[Reading] = []
        events: list[Event] = []
        found = self._log.take()
        events += self._strangers.rest(now)
        for told in found:
            gpu = by_pci.get(told.pci)
            if gpu is None:
                events += self._strangers.tell(told, now)
                continue
            numbers = (("xid", float(told.xid)),)
            news = self._counts.from_kernel(gpu.uuid, told.xid, now)
            readings += news
            if news:
                text = f"{describe(told.xid)} on GPU {gpu.index} ({gpu.name}): {told.text}"
                events.append(Event("xid", now.mono, text, on_gpu(gpu.uuid), numbers, alert=True))
        return Sensed(readings=tuple(readings), events=tuple(events))


def describe(xid: int) -> str:
    meaning = MEANINGS.get(xid)
    return f"XID {xid}" if meaning is None else f"XID {xid} ({meaning})"


def pci_address(gpu: Gpu) -> tuple[int, int, int] | None:
    """Domain, bus and device of a card; None where the driver does not say."""
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.[0-7]", gpu.pci_bus_id.lower())
    if found is None:
        return None
    domain, bus, device = (int(part, 16) for part in found.groups())
    return domain, bus, device
