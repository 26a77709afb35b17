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
