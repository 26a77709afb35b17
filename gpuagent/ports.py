"""The whole plug-in API: what a sensor, a policy and an actuator are, and what they need of a host.

`Sensor`, `Policy` and `Actuator` are what the loop runs; the lists of them are `sense.SENSORS`,
`decide.POLICIES` and `act.ACTUATORS`. `Gpus`, `Cgroups`, `Processes` and `Node` are what they ask
of the host; `host/` implements them for the real one. Errors are those of `errors.py`: `Gone`,
`Unsupported`, `Refused`, `Unavailable`.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from gpuagent.clock import Clock
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import MpsDaemon, Process, Subject
from gpuagent.model.plan import Decision
from gpuagent.model.run import Key, Reservation
from gpuagent.model.state import Health, Instant, NodeState, Sensed

Memory = TypeVar("Memory")

Wake = Callable[[str], None]
"""Asks for a tick at once; the argument says why. May be called from any coroutine."""


class Sensor(Protocol):
    """Reads one part of the host. The loop measures its duration and success, not the sensor."""

    @property
    def name(self) -> str: ...

    @property
    def interval(self) -> float:
        """Seconds between readings; 0 for every tick."""

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """What is true now. `state` is the last one published.

        May take as long as it must: the loop goes on without it. Raises any error of `errors.py`;
        the text becomes the sensor's health.
        """


class Policy(Protocol[Memory]):
    """Turns states into wishes. Pure: no clock, no I/O, no randomness, no logging."""

    @property
    def name(self) -> str: ...

    def begin(self) -> Memory:
        """The memory of a policy that has seen nothing."""

    def decide(self, memory: Memory, state: NodeState) -> tuple[Memory, Decision]:
        """What to remember, and what to wish. A wish that is no longer made is put back."""


class Real(msgspec.Struct, frozen=True):
    """The value of a knob on the host: comparable, and as text exactly as it is restored."""

    value: float
    raw: str


class Actuator(Protocol):
    """One family of knobs. Only `act.reconcile` calls `set`."""

    @property
    def knob(self) -> Knob: ...

    async def get(self, subject: Subject) -> Real:
        """The real value now. Raises Gone, Unsupported, Refused, Unavailable."""

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        """What setting `value` would write, never looser than `original`. Pure."""

    async def set(self, subject: Subject, raw: str) -> None:
        """Write `raw`, which came from `encode` or is an original. Raises as `get`."""

    async def identity(self, subject: Subject) -> str:
        """What makes the target itself and not its successor: an inode, a UUID. Raises Gone."""

    async def verify(self, subject: Subject, identity: str) -> None:
        """Return if the target is still the one of this identity.

        Raises Gone where that one has ceased to exist, Unavailable where it cannot be seen from here.
        """

    async def owner(self, subject: Subject) -> int:
        """The user who may turn this knob himself; 0 where only root may. Raises as `get`."""


@runtime_checkable
class Lingering(Protocol):
    """An actuator whose writes leave something behind that outlives the value, and the target."""

    async def let_go(self, subject: Subject, identity: str, ours: Sequence[str]) -> None:
        """A hold has ended, whoever's value is there now: undo what else came of our writes `ours`.

        May be asked again. The target may be gone. Raises Refused, Unsupported, Unavailable.
        """


@runtime_checkable
class Orderly(Protocol):
    """An actuator that lets some targets wait for others of higher rank."""

    def all_at_once(self) -> AbstractContextManager[None]:
        """Within, none waits for another: what is not put back now may stay as it is for long."""


# -- what they need of a host --------------------------------------------------------------------------


class Gpus(Protocol):
    """The NVIDIA driver, behind a child process that can be killed."""

    def drain(self) -> Sensed:
        """All that has been read since the last call; never waits.

        `gpus` is () when there is a driver and no card. Raises Unsupported where there is no driver
        or library, Unavailable while the child is down or released; the text says why.
        """

    def watch(self, marks: Mapping[str, float]) -> None:
        """Wake the loop when a sample of a signal, by name, rises over its mark.

        `gpu_memory_used_ratio` stands for used over total memory.
        """

    async def power_limit(self, uuid: str) -> float:
        """Power limit as set, in watts."""

    async def set_power_limit(self, uuid: str, watts: float) -> None: ...

    async def release(self) -> None:
        """Close every handle to the driver, so that it can be reconfigured or unloaded."""

    async def resume(self) -> None: ...


class Cgroups(Protocol):
    """The cgroup v2 tree. Paths start with a slash and are relative to its root. Blocking calls.

    Each raises Unavailable where the tree itself is not there.
    """

    def tree(self) -> str:
        """Identity of the tree: an inode says which cgroup it is only within one."""

    def inode(self, path: str) -> int:
        """Identity of a cgroup. Raises Gone."""

    def read(self, path: str, file: str) -> str:
        """Content without the final newline. Raises Gone, Unsupported (no such file), Refused."""

    def read_all(self, path: str, inode: int, files: Sequence[str]) -> dict[str, str]:
        """Content of these files of the cgroup with this inode; what it does not have is left out.

        Raises Refused; Gone also where another cgroup has taken the path.
        """

    def write(self, path: str, inode: int, file: str, text: str) -> None:
        """Write one control file of the cgroup with this inode. Raises as `read`.

        Gone also where another cgroup has taken the path.
        """

    def owner(self, path: str, file: str) -> int:
        """UID of the owner of a control file: not 0 in a delegated cgroup. Raises as `read`."""


class CardSettings(Protocol):
    """What a card is set to beside its power limit. Subjects are UUIDs."""

    async def set_clock_limit(self, uuid: str, hertz: float | None) -> None:
        """Lock the card's clocks below this, rounded to what it supports; None to unlock them.

        No call reads a lock back. Raises Gone, Unsupported, Refused, Unavailable, as all of these.
        """

    async def compute_mode(self, uuid: str) -> int:
        """NVML's number: 0 default, 2 prohibited, 3 exclusive process."""

    async def set_compute_mode(self, uuid: str, mode: int) -> None: ...

    async def persistence_mode(self, uuid: str) -> bool: ...

    async def set_persistence_mode(self, uuid: str, on: bool) -> None: ...


class Units(Protocol):
    """systemd, asked over D-Bus. Properties are set at runtime only: nothing outlives a reboot."""

    def manages(self, cgroup: str) -> str:
        """Unit through which the files of this cgroup are to be set; empty for none.

        A service, slice, or scope of our own making: systemd writes their files anew whenever it
        likes. Not a container's scope: to realise that would re-apply its device filter. Empty, too,
        where there is no systemd.
        """

    async def before(self, unit: str, cgroup: str, file: str) -> str:
        """What systemd has for a control file now, properties and drop-ins: for `give_back`.

        Raises Gone, Unsupported (no property for that file), Refused, Unavailable.
        """

    async def write(self, unit: str, file: str, text: str) -> None:
        """Have systemd write `text` to a control file (`cpu.max`, `cpu.weight`, ...) of a unit.

        Raises as `before`.
        """

    async def give_back(self, unit: str, file: str, before: str, ours: Sequence[str]) -> None:
        """Make it as it was `before` us, drop-ins too, as far as it still says what we wrote.

        `ours` are the texts that were written. A unit that is not loaded is no error. Raises
        Unsupported, Refused, Unavailable.
        """


class FreezeState(msgspec.Struct, frozen=True):
    """Whether a cgroup is frozen, and by whom."""

    running_ratio: float
    """Share of time in which it runs: 1 where it is left alone, 0 where it is frozen and not by us."""
    by: Literal["nobody", "us", "another", "unknown"]
    """unknown: an earlier run of ours may have left it so, or somebody else has done it."""
    pulses: int = 0
    """How often this freezer has frozen it so far, each time seen."""
    frozen_seconds: float = 0.0
    """Sum of the seconds for which it did."""


class ScopeWish(msgspec.Struct, frozen=True, kw_only=True):
    """A transient scope, and the process that is to be moved into it."""

    unit: str
    slice: str
    description: str
    pid: int
    started: int
    uid: int
    """Of that process, whatever it was to become: one that is another user's by now is left alone."""
    devices: tuple[str, ...] | None = None
    """The device nodes that it may open, beside the standard pseudo devices; None for any."""
    cpu_weight: int | None = None
    memory_max_bytes: int | None = None


class Scopes(Protocol):
    """Scopes of our own making, by systemd."""

    async def start(self, wish: ScopeWish) -> str:
        """The cgroup of the scope, with the process in it. It ends with its last process.

        Raises Gone (the process), Unsupported (no systemd), Refused, Unavailable.
        """


class Freezer(Protocol):
    """Freezes control groups in pulses, by a process of its own that thaws them when we die."""

    @property
    def least_ratio(self) -> float:
        """The smallest share that a cgroup can be left with."""

    async def state(self, path: str, inode: int) -> FreezeState:
        """How it is now. Raises Gone, Unsupported; Unavailable while what froze it has died."""

    async def set(self, path: str, inode: int, ratio: float) -> None:
        """Let it run this share of the time from now on, seen frozen once; 1 thaws it for good.

        Takes over one that is frozen by nobody knows whom. Raises Gone, Unsupported, Refused,
        Unavailable.
        """


CudaState = Literal["runs", "locked", "suspended", "unconfirmed"]
"""A locked one is at rest, and still holds its memory. One that is unconfirmed is suspended as the tool
says, and the driver has not said yet that its memory is free."""

Freed = Mapping[str, int]
"""Device memory that a process gives up, by card in bytes."""

Keep = Callable[[Freed | None], Awaitable[None]]
"""Remembers durably what is given up, or, with None, that nothing is. Raises Refused."""


class Checkpoint(Protocol):
    """NVIDIA's cuda-checkpoint: one call at a time, of a process found by (pid, start time)."""

    async def state(self, pid: int, started: int) -> CudaState:
        """How its CUDA state is.

        Raises Gone, Unsupported (no such tool, no CUDA process), Refused (it has failed for good),
        Unavailable.
        """

    async def suspend(self, pid: int, started: int, keep: Keep) -> None:
        """Lock within its timeout, `keep` what it holds, checkpoint, and see its device memory freed.

        Raises Gone, Unsupported, Refused (also where it is not we who have suspended it),
        Unavailable; then it runs as before, or the text says that it does not.
        """

    async def resume(self, pid: int, started: int, freed: Freed | None) -> None:
        """Restore and unlock, once there is room for what it has `freed`; None where that is not known.

        Raises as `suspend`; NoRoom where its cards have too little free.
        """


class Ender(Protocol):
    """Ends processes, each through a pidfd, so that no other is ever hit."""

    async def alive(self, pid: int, started: int) -> bool: ...

    async def catches(self, pid: int, started: int, signal: int) -> bool:
        """Whether it catches the signal: one that does not would be ended by it. Raises Gone."""

    async def send(self, pid: int, started: int, signal: int) -> None:
        """Raises Gone, Refused."""

    async def ended(self, pid: int, started: int, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""

    async def run_as(
        self,
        uid: int,
        command: Sequence[str],
        seconds: float,
        *,
        cgroup: str = "",
        inode: int = 0,
    ) -> None:
        """Run a command as this user with nothing of ours, for so long at most.

        In this cgroup where it can be, else in ours. Raises Refused (no such user, not found, not
        executable, not safe for root), Unavailable (no success, out of time).
        """


class Mps(Protocol):
    """CUDA MPS, by the control daemons that are configured."""

    async def daemons(self) -> Sequence[MpsDaemon]:
        """All of them, each as it is now. Never raises: `MpsDaemon.why` says what is amiss."""

    async def default_threads(self, name: str) -> float:
        """Ceiling on each client of the next server, as a ratio.

        Raises Gone (no such daemon, or it does not run), Unsupported, Refused, Unavailable.
        """

    async def set_default_threads(self, name: str, ratio: float) -> None:
        """Raises as `default_threads`; Refused also where the daemon keeps another value."""

    async def running(self, name: str) -> bool:
        """Whether the daemon of a group that is configured as our own runs.

        Raises Gone (no group of ours has the name), Refused, Unavailable.
        """

    async def start(self, name: str) -> None:
        """Start it where it outlives us, and see a server of it begin; else it is taken down.

        Raises as `running`, and Unsupported.
        """

    async def stop(self, name: str) -> None:
        """End it. Raises as `running`; Refused also while it has clients."""

    def place(self, name: str) -> str:
        """Where a daemon is reached: its pipe directory. Raises Gone where no group has the name."""

    def recall(self, name: str, place: str) -> None:
        """Reach a daemon there by a name that no group has by now: an earlier configuration's."""

    async def terminate_client(self, pid: int) -> bool:
        """End a process's work on all its servers, and see it gone; False where it is no client.

        Raises Unavailable where it is still there.
        """


class TimeSlices(Protocol):
    """nvidia-smi compute-policy: 0 default, 1 short, 2 medium, 3 long."""

    async def get(self, uuid: str) -> int: ...

    async def set(self, uuid: str, slice_: int) -> None:
        """Read back, for its exit code says nothing. Raises Unsupported, Refused, Unavailable."""


class Processes(Protocol):
    """/proc. Blocking calls."""

    def read(self, pid: int) -> Process:
        """One process. Raises Gone."""

    def again(self, known: Process) -> Process:
        """A process that is known: the same object while nothing about it has changed.

        Raises Gone where no process has its number; where another has it, this is the other.
        """

    def cgroup(self, pid: int) -> str:
        """The cgroup v2 path of a process, empty where it has none. Raises Gone."""

    def table(self) -> Sequence[Process]:
        """Every process with a user-space part, kernel threads left out."""


class ProcessEvents(Protocol):
    """News of processes, sooner than polling brings it. Nothing depends on it."""

    @property
    def health(self) -> Health:
        """Whether anything is heard, and why not."""

    def watch(self, pids: Collection[int], matters: Callable[[int], bool] | None) -> None:
        """Hear of the exits of `pids`, and of each exec for which `matters(pid)` holds.

        None for no execs at all. `matters` is called on the loop and must be quick.
        """

    def take(self) -> list[tuple[int, Literal["exec", "exit"]]]:
        """What was heard since the last call, in order; never waits. Some may be missing."""


class LatencyReport(msgspec.Struct, frozen=True):
    """What a tenant says of its own latency, or what its metrics say."""

    tenant: str
    quantile: float
    """Between 0 and 1: 0.99 for p99. A mean is none."""
    seconds: float
    at: float
    """Monotonic seconds of the measurement."""
    exact: bool = True
    """False for an estimate, such as one from the buckets of a histogram."""


class Latencies(Protocol):
    """Where the latencies of tenants come in."""

    def take(self) -> Sequence[LatencyReport]:
        """What came in since the last call, the newest of each tenant and quantile; never waits."""


class Runs(Protocol):
    """The runs that were admitted."""

    def active(self) -> tuple[Reservation, ...]:
        """By name: the same object while nothing changes."""

    def end(self, keys: Collection[Key]) -> None:
        """Their processes have ended: what they were promised is free again."""


TakePiece = Callable[[bytes], None]
"""Takes in a piece of a page, in a thread of the fetcher's. Raises what ends the fetching."""


class Pages(Protocol):
    """Pages of metrics that tenants publish."""

    async def get(self, url: str, take: TakePiece, *, seconds: float) -> None:
        """Fetch a page within so many seconds, and hand it on piece by piece, as it comes.

        Raises Refused for an answer that is no page of a bearable length, Unavailable where there is
        none in time, and whatever `take` raises.
        """


class NodeFacts(msgspec.Struct, frozen=True):
    """The host as a whole; None where the kernel does not say."""

    cpus: int
    cpu_busy_ratio: float | None
    memory_total_bytes: int
    memory_available_bytes: int
    cpu_pressure_ratio: float | None
    memory_pressure_ratio: float | None
    io_pressure_ratio: float | None


class KernelXid(msgspec.Struct, frozen=True):
    """An XID error as the kernel log tells it."""

    pci: tuple[int, int, int]
    """Domain, bus and device of the card."""
    xid: int
    text: str
    """The line, shortened and made printable."""


class KernelLog(Protocol):
    """The kernel's log, of which only the XIDs matter."""

    def take(self) -> list[KernelXid]:
        """What was logged since the last call, in order; never waits.

        Raises Unsupported where there is no such log, Refused where we may not read it.
        """


class Node(Protocol):
    """Facts about the host. Blocking call."""

    def read(self) -> NodeFacts: ...


class Host(Protocol):
    """All of the above: one host, real or simulated."""

    @property
    def gpus(self) -> Gpus: ...
    @property
    def cgroups(self) -> Cgroups: ...
    @property
    def units(self) -> Units: ...
    @property
    def processes(self) -> Processes: ...
    @property
    def events(self) -> ProcessEvents: ...
    @property
    def node(self) -> Node: ...
    @property
    def kernel_log(self) -> KernelLog: ...
    @property
    def mps(self) -> Mps: ...
    @property
    def freezer(self) -> Freezer: ...
    @property
    def ender(self) -> Ender: ...
    @property
    def card_settings(self) -> CardSettings: ...
    @property
    def time_slices(self) -> TimeSlices: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def clock(self) -> Clock: ...


class Service(Protocol):
    """Something that runs beside the loop for as long as the daemon does."""

    async def run(self) -> None:
        """Until cancelled. Returning or raising anything but an error of ours ends the daemon."""
