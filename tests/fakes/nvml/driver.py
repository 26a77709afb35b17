"""The fake driver as a whole: its state in a mapped file, its cards, its faults and counts."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from tests.fakes.nvml import build, layout, power
from tests.fakes.nvml.cards import describe, forget_settings
from tests.fakes.nvml.gpu import FakeGpu
from tests.fakes.nvml.profiles import Profile

STATE_VARIABLE = "GPUAGENT_FAKE_NVML"

TOPOLOGY = {"internal": 0, "single": 10, "multiple": 20, "hostbridge": 30, "node": 40, "system": 50}
"""nvmlGpuTopologyLevel_t by name."""

# Driver, NVML and CUDA version of each variant: the H100's capture, and Debian's 550 package.
_VERSIONS = {
    "590": ("590.48.01", "13.590.48.01", 13010),
    "550": ("550.163.01", "12.550.163.01", 12040),
}

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_FUTEX_WAKE = 1
_EVERYBODY = 0x7FFFFFFF


class FakeNvml:
    """The driver's state, which this process writes and any number of libraries read."""

    def __init__(self, path: Path, library: Path) -> None:
        """Map an existing state; tests use ``create``."""
        self.path = path
        self.library = library
        self.gpus: list[FakeGpu] = []
        """Every card ever added, by slot; those removed keep their place."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._owner = os.getpid()
        self._mutex = threading.RLock()
        self._depth = 0
        self.state = layout.State.from_buffer(mmap.mmap(self._descriptor, 0))
        """The state itself, for what has no method; change it within ``writing()``."""

    @classmethod
    def create(
        cls,
        folder: Path,
        profiles: Sequence[Profile],
        *,
        variant: build.Variant = "590",
        clock_us: int = 0,
        privileged: bool = True,
    ) -> Self:
        """A driver with these cards, idle, in ``folder/nvml.state``; builds the library if needed.

        ``clock_us`` other than 0 makes time stand still there until the test sets it. Without
        ``privileged`` setters answer NO_PERMISSION, as they do to any process that is not root.
        """
        library = build.library(variant)
        path = folder / "nvml.state"
        path.write_bytes(bytes(ctypes.sizeof(layout.State)))
        fake = cls(path, library)
        fake._describe_host(variant, clock_us=clock_us, privileged=privileged)
        for profile in profiles:
            fake.add_gpu(profile)
        fake.state.magic = layout.MAGIC  # last: a library that comes too early finds no driver
        return fake

    def _describe_host(self, variant: build.Variant, *, clock_us: int, privileged: bool) -> None:
        state = self.state
        driver, nvml, cuda = _VERSIONS[variant]
        state.size = ctypes.sizeof(layout.State)
        state.clock_us = clock_us
        state.driver_loaded = 1
        state.privileged = privileged
        state.driver_version = driver.encode()
        state.nvml_version = nvml.encode()
        state.cuda_version = cuda
        for place, name in enumerate(build.symbols(self.library)):
            state.symbols[place].name = name.encode()

    # ---- where it is ----

    @property
    def env(self) -> dict[str, str]:
        """What a child process needs in its environment to load and use the fake."""
        searched = [str(self.library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {STATE_VARIABLE: str(self.path), "LD_LIBRARY_PATH": ":".join(searched)}

    # ---- time and writing ----

    @property
    def now_us(self) -> int:
        """The clock that energy and actuation go by: monotonic, or the test's."""
        return int(self.state.clock_us) or time.monotonic_ns() // 1_000

    @property
    def stamp_us(self) -> int:
        """The clock that samples are stamped with: since the epoch, or the test's."""
        return int(self.state.clock_us) or time.time_ns() // 1_000

    @property
    def clock_us(self) -> int:
        """The test's clock, or 0 where the machine's is used."""
        return int(self.state.clock_us)

    @clock_us.setter
    def clock_us(self, now_us: int) -> None:
        with self.writing() as before_us:
            exchanged = bool(self.state.clock_us) != bool(now_us)
            self.state.clock_us = now_us
            if exchanged:
                for gpu in self.gpus:
                    power.restart_clock(gpu.raw, before_us, self.now_us)

    @contextlib.contextmanager
    def writing(self) -> Iterator[int]:
        """Hold the lock that all libraries respect; gives the time. What is written within is seen
        at once or not at all. May be nested."""
        with self._mutex:
            if self._owner != os.getpid():
                self._reopen()
            if self._depth == 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield self.now_us
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _reopen(self) -> None:
        """A forked child takes a descriptor of its own, or it would share its parent's lock."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._owner = os.getpid()

    def wake(self) -> None:
        """Make everybody who waits for events look again."""
        with self.writing():
            self.state.wake = (self.state.wake + 1) % 2**32
        word = ctypes.addressof(self.state) + layout.State.wake.offset
        syscall = ctypes.CDLL(None).syscall
        syscall(_SYS_FUTEX, ctypes.c_void_p(word), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def raise_event(self, slot: int, event_type: int, data: int, instance: tuple[int, int]) -> None:
        """See ``FakeGpu.event``."""
        with self.writing():
            event = layout.Event(
                type=event_type,
                data=data,
                gpu=slot,
                gpu_instance=instance[0],
                compute_instance=instance[1],
            )
            self.state.events[self.state.event_count % layout.EVENTS] = event
            self.state.event_count += 1
        self.wake()

    # ---- cards ----

    def add_gpu(self, profile: Profile) -> FakeGpu:
        """A card appears, idle; libraries see it once they are initialised anew."""
        slot = len(self.gpus)
        if slot == layout.GPUS:
            raise ValueError(f"the fake has room for {layout.GPUS} cards")
        gpu = FakeGpu(self, slot, profile)
        with self.writing() as now_us:
            self.gpus.append(gpu)
            for other in range(slot):
                self._relate(slot, other, TOPOLOGY["node"])
            describe(gpu.raw, profile, slot, now_us)
            gpu.idle()
        return gpu

    def remove_gpu(self, gpu: FakeGpu) -> None:
        """The card is gone: lost to those who see it, not there for those who look anew."""
        with self.writing():
            gpu.raw.present = 0
        self.wake()

    def connect(self, one: FakeGpu, two: FakeGpu, *, level: str = "node", nvlinks: int = 0) -> None:
        """Say how near two cards are (a key of TOPOLOGY) and link their first free NVLinks."""
        with self.writing():
            self._relate(one.slot, two.slot, TOPOLOGY[level])
            for number in range(nvlinks):
                for here, there in ((one, two), (two, one)):
                    link = here.raw.links[number]
                    link.remote_type = 0  # a GPU
                    link.remote_domain = there.raw.pci_domain
                    link.remote_bus = there.raw.pci_bus
                    link.remote_device = there.raw.pci_device
                    link.remote_pci_device_id = there.raw.pci_device_id

    def _relate(self, one: int, two: int, level: int) -> None:
        for here, there in ((one, two), (two, one)):
            self.state.topology[here][there] = level

    # ---- the driver as a whole ----

    @property
    def privileged(self) -> bool:
        """Whether root may change settings here."""
        return bool(self.state.privileged)

    @privileged.setter
    def privileged(self, value: bool) -> None:
        with self.writing():
            self.state.privileged = value

    def unload_driver(self, *, force: bool = False) -> None:
        """rmmod: every setting is lost. Raises OSError (EBUSY) while somebody holds the library;
        with ``force`` their calls answer DRIVER_NOT_LOADED from now on."""
        if not force and self.holders:
            raise OSError(errno.EBUSY, f"in use by {self.holders}")
        with self.writing() as now_us:
            self.state.driver_loaded = 0
            for gpu in self.gpus:
                gpu.raw.persistence = 0
                forget_settings(gpu.raw, now_us)
        self.wake()

    def load_driver(self) -> None:
        with self.writing():
            self.state.driver_loaded = 1

    def deinitialise_idle_gpus(self) -> list[FakeGpu]:
        """What the driver does once the last client has left: cards without persistence mode lose
        their settings. Gives those cards; none while somebody holds the library."""
        if self.holders:
            return []
        idle = [gpu for gpu in self.gpus if not gpu.persistence and not gpu.pids]
        with self.writing() as now_us:
            for gpu in idle:
                forget_settings(gpu.raw, now_us)
        return idle

    @property
    def holders(self) -> list[int]:
        """The live processes that have the library initialised; a killed one does not count."""
        return sorted(
            holder.pid
            for holder in self.state.holders
            if holder.pid and _start_ticks(holder.pid) == holder.start_ticks
        )

    # ---- faults and counts, by symbol ----

    def fail(self, symbol: str, code: int, *, gpu: int | FakeGpu | None = None) -> None:
        """The function answers this error, on one card or everywhere; 0 heals it."""
        with self.writing():
            for column in _columns(gpu):
                self._symbol(symbol).fault[column] = code

    def hang(self, symbol: str, *, gpu: int | FakeGpu | None = None) -> None:
        """Calls of the function never return, whatever signal is caught, until ``unhang``."""
        with self.writing():
            for column in _columns(gpu):
                self._symbol(symbol).hang |= 1 << column

    def unhang(self, symbol: str, *, gpu: int | FakeGpu | None = None) -> None:
        with self.writing():
            for column in _columns(gpu):
                self._symbol(symbol).hang &= ~(1 << column)

    def slow(self, symbol: str, seconds: float) -> None:
        """Every call of the function takes so much longer."""
        with self.writing():
            self._symbol(symbol).latency_us = round(seconds * 1e6)

    def calls(self, symbol: str, *, gpu: int | FakeGpu | None = None) -> int:
        """How often the function was called by all processes, on one card or in all."""
        counts = self._symbol(symbol).calls
        return sum(counts[column] for column in _columns(gpu))

    def all_calls(self) -> dict[str, int]:
        """The functions that were called, and how often."""
        counted = ((symbol.name.decode(), sum(symbol.calls)) for symbol in self.state.symbols)
        return {name: count for name, count in counted if count}

    def reset_calls(self) -> None:
        for symbol in self.state.symbols:
            symbol.calls = type(symbol.calls)()

    def _symbol(self, name: str) -> layout.Symbol:
        for symbol in self.state.symbols:
            if symbol.name == name.encode():
                found: layout.Symbol = symbol
                return found
        raise KeyError(f"{self.library} has no {name}")


def _columns(gpu: int | FakeGpu | None) -> Sequence[int]:
    """Columns of a per-card table: one, or with None all and the one for calls without a card."""
    if gpu is None:
        return range(layout.COLUMNS)
    return [gpu.slot if isinstance(gpu, FakeGpu) else gpu]


def _start_ticks(pid: int) -> int:
    """When the process began, or 0 if it is gone or only waits to be reaped (proc(5), field 22)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
