"""One card of the fake driver, as tests handle it."""

import errno
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Unpack

from tests.fakes.nvml import layout, power
from tests.fakes.nvml.cards import lay_out_migs
from tests.fakes.nvml.profiles import Dynamics, MigInstance, Profile

if TYPE_CHECKING:
    from tests.fakes.nvml.driver import FakeNvml

ProcessKind = Literal["compute", "graphics", "compute+graphics", "mps"]
"""In which of NVML's process lists it appears."""

EccLocation = Literal["l1", "l2", "dram", "registers", "texture", "shared", "cbu", "sram"]
"""In the order of nvmlMemoryLocation_t."""

LinkError = Literal["replay", "recovery", "crc_flit", "crc_data", "ecc_data"]
"""In the order of nvmlNvLinkErrorCounter_t."""

XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
_KINDS = {"compute": 1, "graphics": 2, "compute+graphics": 3, "mps": 4}
_ECC_LOCATIONS = ("l1", "l2", "dram", "registers", "texture", "shared", "cbu", "sram")
_LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
_HEALTHY, _LOST, _NEEDS_RESET = 0, 1, 2

# Keyword of set() -> field of the state and what one unit of the keyword is there.
_FIELDS: dict[str, tuple[str, float]] = {
    "utilization": ("utilization", 100),
    "memory_utilization": ("memory_utilization", 100),
    "encoder_utilization": ("encoder_utilization", 100),
    "decoder_utilization": ("decoder_utilization", 100),
    "encoder_sessions": ("encoder_sessions", 1),
    "encoder_frames_per_second": ("encoder_fps", 1),
    "encoder_latency_seconds": ("encoder_latency_us", 1e6),
    "memory_used_bytes": ("memory_used_bytes", 1),
    "bar1_used_bytes": ("bar1_used_bytes", 1),
    "demand_watts": ("demand_mw", 1e3),
    "board_cap_watts": ("board_cap_mw", 1e3),
    "temperature_celsius": ("temperature", 1),
    "memory_temperature_celsius": ("memory_temperature", 1),
    "performance_state": ("performance_state", 1),
    "fan_ratio": ("fan_percent", 100),
    "pcie_tx_bytes_per_second": ("pcie_tx_kbps", 1 / 1024),
    "pcie_rx_bytes_per_second": ("pcie_rx_kbps", 1 / 1024),
    "pcie_replays": ("pcie_replays", 1),
    "pcie_generation": ("pcie_gen", 1),
    "pcie_width": ("pcie_width", 1),
    "event_reasons": ("event_reasons", 1),
}
_CLOCKS: dict[str, tuple[int, ...]] = {
    "graphics_clock_hertz": (0, 1),
    "memory_clock_hertz": (2,),
    "video_clock_hertz": (3,),
}
_POWER = {"demand_watts", "board_cap_watts"}


class FakeGpu:
    """A card in its slot. Every change is one write that no reader sees half of."""

    def __init__(self, driver: "FakeNvml", slot: int, profile: Profile) -> None:
        self._driver = driver
        self.slot = slot
        self.profile = profile

    # ---- identity ----

    @property
    def raw(self) -> layout.Gpu:
        """The state itself, for what has no method; change it within ``driver.writing()``."""
        gpu: layout.Gpu = self._driver.state.gpus[self.slot]
        return gpu

    @property
    def uuid(self) -> str:
        return str(self.raw.uuid.decode())

    @property
    def pci_bus_id(self) -> str:
        """As NVML writes it: 00000000:01:00.0."""
        return f"{self.raw.pci_domain:08X}:{self.raw.pci_bus:02X}:{self.raw.pci_device:02X}.0"

    @property
    def mig_uuids(self) -> list[str]:
        return [mig.uuid.decode() for mig in self.raw.migs if mig.present]

    # ---- load, heat, power ----

    def set(self, **values: Unpack[Dynamics]) -> None:
        """Change any of what is dynamic, at one moment. The keywords are those of Dynamics."""
        with self._writing() as now_us:
            for name, value in values.items():
                self._set(name, value)
            if _POWER & values.keys():
                power.replan(self.raw, now_us)

    def _set(self, name: str, value: object) -> None:
        if name == "mig_memory_used_bytes":
            assert isinstance(value, tuple)
            for mig, used in zip(self.raw.migs, value, strict=False):
                mig.memory_used_bytes = used
            return
        assert isinstance(value, int | float)
        if name in _CLOCKS:
            for clock in _CLOCKS[name]:
                self.raw.clock_mhz[clock] = round(value / 1e6)
            return
        field, scale = _FIELDS[name]
        setattr(self.raw, field, round(value * scale))

    def idle(self) -> None:
        """Be as the profile's card is with nothing to do."""
        self.set(**self.profile.idle)

    def load(self) -> None:
        """Be as the profile's card was under load."""
        self.set(**self.profile.loaded)

    @property
    def power_limit_watts(self) -> float:
        """The limit last asked for. Setting it: somebody ran nvidia-smi -pl."""
        return float(self.raw.limit_mw / 1e3)

    @power_limit_watts.setter
    def power_limit_watts(self, watts: float) -> None:
        with self._writing() as now_us:
            power.set_limit_mw(self.raw, now_us, round(watts * 1e3))

    @property
    def actuation_seconds(self) -> float:
        """From a change of the power limit to its effect."""
        return float(self.raw.actuation_us / 1e6)

    @actuation_seconds.setter
    def actuation_seconds(self, seconds: float) -> None:
        with self._writing():
            self.raw.actuation_us = round(seconds * 1e6)

    @property
    def draw_watts(self) -> float:
        """At this moment: the demand, or less where the limit in force is less."""
        return power.draw_mw(self.raw, self._driver.now_us) / 1e3

    @property
    def energy_joules(self) -> float:
        """What the energy counter says."""
        used_mj = power.energy_nj(self.raw, self._driver.now_us) // 1_000_000
        return float((self.raw.energy_base_mj + used_mj) / 1e3)

    # ---- what others may have set ----

    @property
    def locked_clocks_hertz(self) -> tuple[int, int] | None:
        """Lowest and highest graphics clock allowed, or None; NVML itself cannot tell."""
        return _hertz(self.raw.graphics_lock_min_mhz, self.raw.graphics_lock_max_mhz)

    @property
    def locked_memory_clocks_hertz(self) -> tuple[int, int] | None:
        return _hertz(self.raw.memory_lock_min_mhz, self.raw.memory_lock_max_mhz)

    @property
    def persistence(self) -> bool:
        return bool(self.raw.persistence)

    @persistence.setter
    def persistence(self, on: bool) -> None:
        with self._writing():
            self.raw.persistence = on

    @property
    def compute_mode(self) -> int:
        """nvmlComputeMode_t."""
        return int(self.raw.compute_mode)

    @compute_mode.setter
    def compute_mode(self, mode: int) -> None:
        with self._writing():
            self.raw.compute_mode = mode

    @property
    def accounting(self) -> bool:
        return bool(self.raw.accounting)

    @accounting.setter
    def accounting(self, on: bool) -> None:
        with self._writing():
            self.raw.accounting = on

    # ---- processes ----

    def add_process(
        self,
        pid: int,
        *,
        kind: ProcessKind = "compute",
        memory_bytes: int | None = 0,
        mig: int | None = None,
    ) -> None:
        """A process appears in the card's lists, or changes there.

        ``memory_bytes`` None is NVML's "not available"; ``mig`` is the index of a MIG device. The
        card's own ``memory_used_bytes`` is not touched.
        """
        instance = (layout.NO_INSTANCE, layout.NO_INSTANCE)
        if mig is not None:
            device = self.raw.migs[mig]
            instance = (device.gpu_instance, device.compute_instance)
        process = layout.Process(
            memory_bytes=layout.NOT_AVAILABLE if memory_bytes is None else memory_bytes,
            pid=pid,
            kinds=_KINDS[kind],
            gpu_instance=instance[0],
            compute_instance=instance[1],
        )
        with self._writing():
            others = [p for p in self._processes() if p.pid != pid]
            self._put_processes([*others, process])

    def remove_process(self, pid: int) -> None:
        """The process leaves the card; raises KeyError if it is not there."""
        with self._writing():
            others = [p for p in self._processes() if p.pid != pid]
            if len(others) == self.raw.process_count:
                raise KeyError(pid)
            self._put_processes(others)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes()]

    def _processes(self) -> list[layout.Process]:
        """Copies: what is being rewritten must not change underneath."""
        return [
            layout.Process.from_buffer_copy(process)
            for process in self.raw.processes[: self.raw.process_count]
        ]

    def _put_processes(self, processes: Sequence[layout.Process]) -> None:
        if len(processes) > layout.PROCESSES:
            raise ValueError(f"a card holds at most {layout.PROCESSES} processes")
        for place, process in enumerate(processes):
            self.raw.processes[place] = process
        self.raw.process_count = len(processes)

    def utilization_sample(
        self,
        pid: int,
        *,
        sm: float = 0.0,
        memory: float = 0.0,
        encoder: float = 0.0,
        decoder: float = 0.0,
        at_us: int | None = None,
    ) -> None:
        """One sample of a process's utilisation (0 to 1), taken now or ``at_us`` since the epoch."""
        with self._writing():
            sample = layout.Sample(
                at_us=self._driver.stamp_us if at_us is None else at_us,
                pid=pid,
                sm=round(sm * 100),
                memory=round(memory * 100),
                encoder=round(encoder * 100),
                decoder=round(decoder * 100),
            )
            self.raw.samples[self.raw.sample_count % layout.SAMPLES] = sample
            self.raw.sample_count += 1

    def account(
        self,
        pid: int,
        *,
        utilization: float = 0.0,
        memory_utilization: float = 0.0,
        memory_bytes: int = 0,
        seconds: float = 0.0,
        running: bool = False,
    ) -> None:
        """An entry of the accounting buffer, which NVML shows while accounting is on."""
        with self._writing():
            if self.raw.account_count == layout.ACCOUNTED:
                raise ValueError(f"the fake accounts for at most {layout.ACCOUNTED} processes")
            self.raw.accounts[self.raw.account_count] = layout.Account(
                memory_bytes=memory_bytes,
                time_ms=round(seconds * 1e3),
                start_us=max(0, self._driver.stamp_us - round(seconds * 1e6)),
                pid=pid,
                utilization=round(utilization * 100),
                memory_utilization=round(memory_utilization * 100),
                running=running,
            )
            self.raw.account_count += 1

    # ---- errors and health ----

    def xid(self, code: int, *, mig: int | None = None) -> None:
        """An XID error occurs; every registered event set gets it once."""
        self.event(XID_EVENT, code, mig=mig)

    def event(self, event_type: int, data: int = 0, *, mig: int | None = None) -> None:
        """An event of any nvmlEventType."""
        instance = (layout.NO_INSTANCE, layout.NO_INSTANCE)
        if mig is not None:
            device = self.raw.migs[mig]
            instance = (device.gpu_instance, device.compute_instance)
        self._driver.raise_event(self.slot, event_type, data, instance)

    def lose(self) -> None:
        """The card falls off the bus: every call answers GPU_IS_LOST."""
        self._become(_LOST)

    def require_reset(self) -> None:
        """Every call answers RESET_REQUIRED."""
        self._become(_NEEDS_RESET)

    def recover(self) -> None:
        self._become(_HEALTHY)

    def _become(self, health: int) -> None:
        with self._writing():
            self.raw.health = health
        self._driver.wake()

    def ecc_errors(
        self, count: int, *, corrected: bool = False, location: EccLocation = "dram"
    ) -> None:
        """More memory errors, on the volatile and the aggregate counter."""
        with self._writing():
            for aggregate in (0, 1):
                counts = self.raw.ecc[0 if corrected else 1][aggregate]
                counts[_ECC_LOCATIONS.index(location)] += count

    def remap_rows(
        self,
        *,
        corrected: int = 0,
        uncorrected: int = 0,
        pending: bool = False,
        failure: bool = False,
    ) -> None:
        """Say that so many rows are remapped."""
        with self._writing():
            self.raw.remapped_corrected = corrected
            self.raw.remapped_uncorrected = uncorrected
            self.raw.remapped_pending = pending
            self.raw.remapped_failure = failure

    def add_link_traffic(
        self, *, tx_bytes: int = 0, rx_bytes: int = 0, links: Sequence[int] = (0,)
    ) -> None:
        """Data moves over each of the links; raw traffic is taken to be a tenth more."""
        with self._writing():
            for number in links:
                link = self.raw.links[number]
                link.data_tx_kib += tx_bytes // 1024
                link.data_rx_kib += rx_bytes // 1024
                link.raw_tx_kib += tx_bytes * 11 // 10240
                link.raw_rx_kib += rx_bytes * 11 // 10240

    def add_pcie_traffic(self, *, tx_bytes: int = 0, rx_bytes: int = 0) -> None:
        """Bytes on the counters (fields 197 and 198), beside the rates that set() takes."""
        with self._writing():
            self.raw.pcie_tx_bytes += tx_bytes
            self.raw.pcie_rx_bytes += rx_bytes

    def link_errors(self, number: int, error: LinkError, count: int) -> None:
        with self._writing():
            self.raw.links[number].errors[_LINK_ERRORS.index(error)] += count

    def set_link(self, number: int, *, active: bool) -> None:
        with self._writing():
            self.raw.links[number].active = active

    # ---- MIG ----

    def configure_mig(self, instances: Sequence[MigInstance], *, force: bool = False) -> None:
        """Partition the card anew, or not at all with no instances.

        Raises OSError (EBUSY), as nvidia-smi fails, while a process holds the library or runs on the
        card; ``force`` does it all the same.
        """
        if not force and (self._driver.holders or self.raw.process_count):
            raise OSError(errno.EBUSY, f"in use by {self._driver.holders or self.pids}")
        with self._writing():
            lay_out_migs(self.raw, self.uuid, instances)

    def _writing(self) -> AbstractContextManager[int]:
        return self._driver.writing()


def _hertz(low_mhz: int, high_mhz: int) -> tuple[int, int] | None:
    return (low_mhz * 1_000_000, high_mhz * 1_000_000) if high_mhz else None
