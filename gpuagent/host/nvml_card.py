"""One card as the NVML child sees it: who it is, what it reads, which processes it serves.

Standard library and pynvml only. Everything is returned ready to be sent as JSON.
"""

import ctypes
import time
from typing import Any

import pynvml

from gpuagent.host.nvml_driver import CardLost, Driver, DriverGone, Never, NoValue
from gpuagent.host.nvml_fields import POWER, POWER_GA100, READS, SAMPLE, Read, Row

_ASK_AGAIN_SECONDS = 600.0
"""A card that did not support a question is asked again after this: modes change."""
_GA100 = (8, 0)
_DISTANCES = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node"}
_KINDS = ("graphics", "compute", "mps")
"""A process that is on several lists is one process, of the last of these kinds."""
_LISTS = {"graphics": "Graphics", "compute": "Compute", "mps": "MPSCompute"}

Frame = dict[str, Any]


class Slice:
    """A MIG instance that exists."""

    def __init__(self, handle: Any, uuid: str, place: tuple[int, int], frame: Frame) -> None:
        self.handle = handle
        self.uuid = uuid
        self.place = place
        self.frame = frame


class Card:
    """A card that answered when it was asked who it is."""

    def __init__(self, driver: Driver, index: int) -> None:
        """Raises NoValue or one of its kinds where the card does not even say its UUID, or has none."""
        self.index = index
        self._driver = driver
        self.handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        self.uuid = str(self._ask("nvmlDeviceGetUUID", self.handle))
        if not self.uuid:
            raise NoValue(pynvml.NVML_ERROR_UNKNOWN, "nvmlDeviceGetUUID answers an empty text")
        self.bus_id = str(self._maybe("nvmlDeviceGetPciInfo_v3", lambda pci: pci.busId) or "")
        self.mig_enabled: bool | None = None
        self.slices: list[Slice] = []
        capability = self._maybe("nvmlDeviceGetCudaComputeCapability", tuple)
        power = POWER_GA100 if capability == _GA100 else POWER
        self._reads: dict[str, list[Read]] = {}
        for read in READS:
            self._reads.setdefault(read.rate, []).append(power if read is POWER else read)
        self._not_before: dict[tuple[str, tuple[Any, ...], bool], float] = {}
        """When a question that was not supported is asked again: call, arguments, of the whole card."""
        self._seen_us = 0
        self._direct: dict[str, int] = {}
        self.switched = 0

    @property
    def address(self) -> int:
        """The driver's handle as a number."""
        return address_of(self.handle)

    def _ask(self, call: str, *args: Any) -> Any:
        return self._driver.call(self.index, call, *args)

    def ask(self, call: str, *args: Any) -> Any:
        """What a call on this card returns. Raises NoValue or one of its kinds."""
        return self._ask(call, self.handle, *args)

    def _maybe(self, call: str, take: Any, *args: Any) -> Any:
        """`take` of the answer of a call on this card, or None where it has none."""
        try:
            return take(self._ask(call, self.handle, *args))
        except (CardLost, DriverGone):
            raise
        except NoValue:
            return None

    # -- readings -------------------------------------------------------------------------------------

    def read(self, rate: str) -> tuple[list[Row], dict[str, list[Row]]]:
        """Readings of one rate: of the card, and of its MIG instances by UUID.

        Raises CardLost also where each question of the sample rate ends in an error.
        """
        rows: list[Row] = []
        sliced: dict[str, list[Row]] = {}
        failure: NoValue | None = None
        reads = self._reads[rate]
        for read in reads:
            try:
                rows += self._rows(read, self.handle)
            except (CardLost, DriverGone):
                raise
            except NoValue as error:
                failure = error
        if rate == SAMPLE and failure is not None and not rows:
            raise CardLost(failure.code, f"the card answers nothing ({failure})") from failure
        for part in self.slices:
            for read in reads:
                if not read.mig:
                    continue
                try:
                    sliced[part.uuid] = list(self._rows(read, part.handle))
                except (CardLost, DriverGone):
                    raise
                except NoValue:
                    continue  # The instance is being taken down: the next identity shows it.
        return rows, sliced

    def _rows(self, read: Read, handle: Any) -> Any:
        whole = handle is self.handle
        for call, args in read.calls:
            key = (call, args, whole)
            not_before = self._not_before.get(key)
            if not_before is not None and not_before > time.monotonic():
                continue
            try:
                return read.rows(self._driver.call(self.index, call, handle, *args))
            except Never:
                self._not_before[key] = time.monotonic() + _ASK_AGAIN_SECONDS
        return ()

    # -- identity -------------------------------------------------------------------------------------

    def identity(self, cards: list["Card"]) -> Frame:
        """Who the card is, its MIG instances, and how it reaches the other `cards`.

        Two cards on one switch reach each other with all links of the one that has fewer, as far as
        both have looked for theirs (`find_links`).
        """
        self._find_slices()
        power = self._maybe("nvmlDeviceGetPowerManagementLimitConstraints", tuple)
        memory = self._maybe("nvmlDeviceGetMemoryInfo", lambda m: m.total)
        return {
            "t": "card",
            "i": self.index,
            "uuid": self.uuid,
            "name": self._maybe("nvmlDeviceGetName", str) or "",
            "pci": self.bus_id,
            "memory": memory,
            "power_mw": power,
            "default_mw": self._maybe("nvmlDeviceGetPowerManagementDefaultLimit", int),
            "numa": self._numa_node(),
            "minor": self._maybe("nvmlDeviceGetMinorNumber", int),
            "mig_enabled": self.mig_enabled,
            "mig": [part.frame for part in self.slices],
            "links": self._links(cards),
        }

    def _numa_node(self) -> int | None:
        """Host node nearest to the card: by the driver, else as the kernel sees the PCI device."""
        words = self._maybe("nvmlDeviceGetMemoryAffinity", list, 16, 0)
        for number, word in enumerate(words or ()):
            if word:
                return int(number * 64 + (word & -word).bit_length() - 1)
        domain, _, rest = self.bus_id.lower().partition(":")
        path = f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node"
        try:
            with open(path, encoding="ascii") as file:
                node = int(file.read())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _find_slices(self) -> None:
        mode = self._maybe("nvmlDeviceGetMigMode", list)
        self.mig_enabled = None if mode is None else bool(mode[0])
        self.slices = []
        if not self.mig_enabled:
            return
        for number in range(self._maybe("nvmlDeviceGetMaxMigDeviceCount", int) or 0):
            try:
                handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", self.handle, number)
                self.slices.append(self._slice(handle))
            except (CardLost, DriverGone):
                raise
            except NoValue:
                continue  # A place that no instance has taken.

    def _slice(self, handle: Any) -> Slice:
        uuid = str(self._ask("nvmlDeviceGetUUID", handle))
        place = (
            int(self._ask("nvmlDeviceGetGpuInstanceId", handle)),
            int(self._ask("nvmlDeviceGetComputeInstanceId", handle)),
        )
        try:
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle).total
        except Never:
            memory = None
        frame = {
            "uuid": uuid,
            "gi": place[0],
            "ci": place[1],
            "name": str(self._ask("nvmlDeviceGetName", handle)),
            "memory": memory,
        }
        return Slice(handle, uuid, place, frame)

    # -- topology -------------------------------------------------------------------------------------

    def _links(self, cards: list["Card"]) -> list[list[Any]]:
        """[peer, kind, lanes, distance] for each other card."""
        found = []
        for other in cards:
            if other is self:
                continue
            level = self._maybe("nvmlDeviceGetTopologyCommonAncestor", int, other.handle)
            distance = "" if level is None else _DISTANCES.get(level, "system")
            lanes = self._direct.get(_bus(other.bus_id), 0) + min(self.switched, other.switched)
            found.append([other.uuid, "nvlink" if lanes else "pcie", lanes or None, distance])
        return found

    def find_links(self) -> None:
        """See which NVLinks are active: those to other cards, by PCI address, and into a switch."""
        self._direct = {}
        self.switched = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not self._ask("nvmlDeviceGetNvLinkState", self.handle, link):
                    continue
                kind = self._maybe("nvmlDeviceGetNvLinkRemoteDeviceType", int, link)
                if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    self.switched += 1
                    continue
                peer = _bus(self._ask("nvmlDeviceGetNvLinkRemotePciInfo", self.handle, link).busId)
                self._direct[peer] = self._direct.get(peer, 0) + 1
            except (CardLost, DriverGone):
                raise
            except NoValue:
                break  # No link of this number, so none of a higher one.

    # -- processes ------------------------------------------------------------------------------------

    def processes(self) -> Frame | None:
        """Who has a context on the card: [pid, kind, memory, MIG UUID, utilisation].

        None where the driver shows none of its three lists, which is not the same as nobody.
        """
        began = time.monotonic()
        found: dict[tuple[int, str], list[Any]] = {}
        answered = False
        for kind in _KINDS:
            listed = self._list(_LISTS[kind])
            answered |= listed is not None
            for process, part in listed or ():
                known = found.setdefault((process.pid, part), [process.pid, kind, None, part, None])
                known[1] = kind
                if process.usedGpuMemory is not None:
                    known[2] = max(known[2] or 0, process.usedGpuMemory)
        for pid, ratio in self._utilization().items():
            if (pid, "") in found:
                found[pid, ""][4] = ratio
        if not answered:
            return None
        return {"t": "procs", "at": began, "uuid": self.uuid, "p": list(found.values())}

    def _list(self, kind: str) -> list[tuple[Any, str]] | None:
        """(process, MIG UUID) of one of the driver's three lists; None where it shows none."""
        listed = self._list_of(kind, self.handle)
        if listed is not None:
            by_place = {part.place: part.uuid for part in self.slices}
            return [(p, by_place.get((p.gpuInstanceId, p.computeInstanceId), "")) for p in listed]
        # Under MIG the list of the whole card is not for everybody: ask each instance.
        lists = [(part.uuid, self._list_of(kind, part.handle)) for part in self.slices]
        if all(each is None for _, each in lists):
            return None
        return [(p, uuid) for uuid, each in lists for p in each or ()]

    def _list_of(self, kind: str, handle: Any) -> list[Any] | None:
        call = f"nvmlDeviceGet{kind}RunningProcesses_v3"
        for _ in range(2):
            try:
                return list(self._ask(call, handle))
            except (CardLost, DriverGone):
                raise
            except NoValue as error:
                # The list may outgrow the room that pynvml leaves between its two calls.
                if error.code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                    return None
        return None

    def _utilization(self) -> dict[int, float]:
        """Share of time by PID since the last call; a PID without samples is unknown."""
        if self.mig_enabled:
            return {}
        try:
            samples = self._ask("nvmlDeviceGetProcessUtilization", self.handle, self._seen_us)
        except (CardLost, DriverGone):
            raise
        except NoValue:
            return {}
        first = not self._seen_us
        by_pid: dict[int, list[tuple[int, int]]] = {}
        for sample in samples:
            if sample.timeStamp > self._seen_us and sample.smUtil <= 100:
                by_pid.setdefault(sample.pid, []).append((sample.timeStamp, sample.smUtil))
        self._seen_us = max((s.timeStamp for s in samples), default=self._seen_us)
        # The first answer reaches back for as long as the driver remembers: only its end is now.
        taken = {pid: sorted(each)[-1:] if first else each for pid, each in by_pid.items()}
        return {pid: sum(u for _, u in each) / len(each) / 100 for pid, each in taken.items()}


def address_of(handle: Any) -> int:
    """A handle as a number, which compares."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _bus(bus_id: str) -> str:
    """A PCI address that compares: without the domain's leading zeros, lower case."""
    return bus_id.lower().lstrip("0")
