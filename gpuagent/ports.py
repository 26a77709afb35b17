"""The whole plug-in API: what a sensor, a policy and an actuator are, and what they need of a host.

`Sensor`, `Policy` and `Actuator` are what the loop runs; the lists of them are `sense.SENSORS`,
`decide.POLICIES` and `act.ACTUATORS`. `Gpus`, `Cgroups`, `Processes` and `Node` are what they ask
of the host; `host/` implements them for the real one. Errors are those of `errors.py`: `Gone`,
`Unsupported`, `Refused`, `Unavailable`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from gpuagent.clock import Clock
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Process, Subject
from gpuagent.model.plan import Decision
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

    async def write(self, unit: str, file: str, text: str) -> None:
        """Have systemd write `text` to a control file (`cpu.max`, `cpu.weight`, ...) of a unit.

        Raises Gone, Unsupported (no property for that file), Refused, Unavailable.
        """

    async def give_back(self, unit: str, file: str, original: str) -> None:
        """Set the original text, and remove every drop-in of ours for that file. Raises as `write`."""


class Freezer(Protocol):
    """Freezes control groups in pulses, by a process of its own that thaws them when we die."""

    async def running(self, path: str, inode: int) -> float | None:
        """Share of time in which the cgroup runs as told; 1 when it is left alone.

        None where it is frozen and not by this freezer. Raises Gone, Unsupported.
        """

    async def set(self, path: str, inode: int, ratio: float) -> None:
        """Let it run this share of the time from now on; 1 thaws it for good.

        Raises Gone, Unsupported, Refused, Unavailable.
        """


class Checkpoint(Protocol):
    """NVIDIA's cuda-checkpoint: one process at a time, found by (pid, start time)."""

    async def suspended(self, pid: int, started: int) -> bool:
        """Whether its CUDA state is checkpointed. Raises Gone, Unsupported, Unavailable."""

    async def suspend(self, pid: int, started: int) -> None:
        """Lock within its timeout, checkpoint, and see its device memory freed.

        Raises Gone, Unsupported, Refused, Unavailable; then it runs as before, or the text says that
        it does not.
        """

    async def resume(self, pid: int, started: int) -> None:
        """Restore and unlock. Raises as `suspend`."""


class Ender(Protocol):
    """Ends processes, each through a pidfd, so that no other is ever hit."""

    async def alive(self, pid: int, started: int) -> bool: ...

    async def catches(self, pid: int, started: int, signal: int) -> bool:
        """Whether it catches the signal: one that does not would be ended by it. Raises Gone."""

    async def send(self, pid: int, started: int, signal: int) -> None:
        """Raises Gone, Refused."""

    async def ended(self, pid: int, started: int, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""

    async def run_as(self, uid: int, command: Sequence[str], seconds: float) -> None:
        """Run a command as this user with nothing of ours, for so long at most.

        Raises Refused (not found, not executable), Unavailable (no success, out of time).
        """


class MpsClient(msgspec.Struct, frozen=True):
    """A client of an MPS server, as the control daemon lists it."""

    pid: int
    server: int
    """Pid of its server."""
    gpus: tuple[str, ...] = ()
    """UUIDs, where the daemon says."""
    threads_ratio: float | None = None
    """What it started with, where that is known."""


class MpsDaemon(msgspec.Struct, frozen=True):
    """An MPS control daemon as it is now."""

    name: str
    up: bool
    why: str = ""
    """Why it is not up, or what is wrong with it."""
    servers: Mapping[int, str] = {}
    """State by pid as `get_server_status` tells it; empty where it does not know that command."""
    clients: tuple[MpsClient, ...] = ()
    default_threads_ratio: float | None = None
    fault: str = ""
    """What has befallen a server, all of whose clients share it; empty for nothing."""


class Mps(Protocol):
    """CUDA MPS, by its control daemons."""

    async def daemons(self) -> Sequence[MpsDaemon]:
        """All that are configured, each as it is now. Never raises: `MpsDaemon.why` says it."""

    async def default_threads(self, name: str) -> float:
        """Ceiling on clients of the next server, as a ratio. Raises Gone, Unsupported, Unavailable."""

    async def set_default_threads(self, name: str, ratio: float) -> None:
        """Read back: raises Refused where the daemon keeps another value."""

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


class Latencies(Protocol):
    """Where the latencies of tenants come in."""

    def take(self) -> Sequence[LatencyReport]:
        """What came in since the last call, the newest of each tenant and quantile; never waits."""


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
    def processes(self) -> Processes: ...
    @property
    def events(self) -> ProcessEvents: ...
    @property
    def node(self) -> Node: ...
    @property
    def kernel_log(self) -> KernelLog: ...
    @property
    def clock(self) -> Clock: ...


class Service(Protocol):
    """Something that runs beside the loop for as long as the daemon does."""

    async def run(self) -> None:
        """Until cancelled. Returning or raising anything but an error of ours ends the daemon."""
