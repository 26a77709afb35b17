"""A host to act on: dials in memory, control files in a folder, a clock, a disk that can fill up."""

import asyncio
import contextlib
import errno
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Self

from gpuagent.act.audit import AuditLog
from gpuagent.act.journal import Journal
from gpuagent.act.ledger import Ledger
from gpuagent.act.reconcile import Reconciler
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Subject, on_cgroup, on_gpu
from gpuagent.model.plan import Plan, Posture, Setting
from gpuagent.model.state import Instant, KnobKey, Outcome
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from gpuagent.ports import Actuator, Real

ACTS = Posture("enforce")
OBSERVES = Posture("observe")
PAUSED = Posture("enforce", paused=True)
DEMOTED = Posture("enforce", demoted="three crashes")


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.mono = 1000.0

    def now(self) -> Instant:
        return Instant(self.mono, 1_700_000_000.0 + self.mono)

    async def sleep(self, seconds: float) -> None:
        self.mono += seconds
        await asyncio.sleep(0)


class Inline(Executor):
    """Runs a call at once, in the caller's thread: deterministic."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except OSError as error:
            future.set_exception(error)
        return future


class Disk(Journal):
    """A real file on a disk that may be full: then a part of each write is all that fits."""

    full = False
    dead = False

    def append(self, lines: bytes) -> None:
        if self.dead:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.full:
            super().append(lines[: len(lines) // 2].rstrip(b"\n"))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().append(lines)

    def replace(self, lines: bytes) -> None:
        if self.full or self.dead:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().replace(lines)


class Dial:
    """An actuator over numbers in memory; each call can be made slow, refused, or lost."""

    def __init__(self, knob: Knob) -> None:
        self.knob = knob
        self.values: dict[Subject, str] = {}
        self.identities: dict[Subject, str] = {}
        self.writes: list[tuple[Subject, str]] = []
        self.errors: dict[Subject, AgentError] = {}
        self.set_errors: dict[Subject, AgentError] = {}
        self.gates: dict[Subject, asyncio.Event] = {}
        self.set_gates: dict[Subject, asyncio.Event] = {}
        self.before_set: Callable[[Subject, str], None] = lambda subject, raw: None
        self.rounding: Callable[[float], float] = lambda value: value
        self.deaf: set[Subject] = set()
        self.owners: dict[Subject, int] = {}
        self.reads = 0

    def make(self, subject: Subject, raw: str) -> Subject:
        self.values[subject] = raw
        self.identities[subject] = f"id of {subject}"
        return subject

    async def _pass(self, subject: Subject) -> None:
        await asyncio.sleep(0)
        gate = self.gates.get(subject)
        if gate is not None:
            await gate.wait()
        if subject not in self.values:
            raise Gone(f"{subject} is gone")
        if subject in self.errors:
            raise self.errors[subject]

    async def get(self, subject: Subject) -> Real:
        self.reads += 1
        await self._pass(subject)
        raw = self.values[subject]
        return Real(math.inf if raw == "max" else float(raw), raw)

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        if not value < original.value:
            return original
        return Real(value, repr(value))

    async def set(self, subject: Subject, raw: str) -> None:
        await self._pass(subject)
        if subject in self.set_gates:
            await self.set_gates[subject].wait()
        if subject in self.set_errors:
            raise self.set_errors[subject]
        self.before_set(subject, raw)
        self.writes.append((subject, raw))
        if subject not in self.deaf:
            self.values[subject] = raw if raw == "max" else repr(self.rounding(float(raw)))
            if raw == "max" or self.rounding(float(raw)) == float(raw):
                self.values[subject] = raw

    async def identity(self, subject: Subject) -> str:
        await asyncio.sleep(0)
        if subject not in self.identities:
            raise Gone(f"{subject} is gone")
        return self.identities[subject]

    async def verify(self, subject: Subject, identity: str) -> None:
        if await self.identity(subject) != identity:
            raise Gone(f"another has taken the place of {subject}")

    async def owner(self, subject: Subject) -> int:
        await self._pass(subject)
        return self.owners.get(subject, 0)


class Tree:
    """Control files below a folder, as `ports.Cgroups` wants them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, path: str, **files: str) -> int:
        (self.root / path[1:]).mkdir(parents=True)
        for file, text in files.items():
            (self.root / path[1:] / file.replace("_", ".")).write_text(text + "\n")
        return self.inode(path)

    def tree(self) -> str:
        try:
            return str(self.root.stat().st_ino)
        except FileNotFoundError as error:
            raise Unavailable(f"{self.root} is not there") from error

    def inode(self, path: str) -> int:
        try:
            return (self.root / path[1:]).stat().st_ino
        except FileNotFoundError as error:
            self.tree()
            raise Gone(f"{path} is gone") from error

    def read(self, path: str, file: str) -> str:
        self.inode(path)
        try:
            return (self.root / path[1:] / file).read_text().rstrip("\n")
        except FileNotFoundError as error:
            raise Unsupported(f"{path} has no {file}") from error

    def owner(self, path: str, file: str) -> int:
        self.read(path, file)
        return (self.root / path[1:] / file).stat().st_uid

    def read_all(self, path: str, inode: int, files: Sequence[str]) -> dict[str, str]:
        if self.inode(path) != inode:
            raise Gone(f"{path} is another cgroup now")
        found = {}
        for file in files:
            with contextlib.suppress(Unsupported):
                found[file] = self.read(path, file)
        return found

    def write(self, path: str, inode: int, file: str, text: str) -> None:
        if self.inode(path) != inode:
            raise Gone(f"{path} is another cgroup now")
        place = self.root / path[1:] / file
        if not os.access(place, os.W_OK):
            raise Refused(f"{path}/{file}: permission denied")
        # A control file takes a write as a whole or not at all, also from a process that is killed.
        whole = place.with_name(file + ".new")
        whole.write_text(text + "\n")
        whole.rename(place)


class Agent:
    """A reconciler that runs, with its ledger and audit log in a folder."""

    def __init__(self, folder: Path, *dials: Actuator, clock: Clock | None = None) -> None:
        self.folder = folder
        self.clock = clock or Clock()
        self.woken: list[str] = []
        self.disk = Disk(str(folder / "ledger.jsonl"))
        self.ledger = Ledger(str(folder), boot="b1", executor=Inline(), journal=self.disk)
        self.audit = AuditLog(str(folder))
        self.actuators = dials
        self.reconciler = Reconciler(
            actuators=dials,
            ledger=self.ledger,
            audit=self.audit,
            clock=self.clock,
            wake=self.woken.append,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.reconciler.run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.die()

    @property
    def running(self) -> "asyncio.Task[None]":
        assert self._task is not None
        return self._task

    async def die(self) -> None:
        """As kill -9 would: nothing is put back, nothing is finished."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.disk.dead = True
            self.disk.close()
            self.audit.close()

    async def tick(
        self,
        *settings: Setting,
        posture: Posture = ACTS,
        complete: bool = False,
        seconds: float = 1.0,
    ) -> dict[KnobKey, Outcome]:
        self.clock.mono += seconds
        await self.reconciler.drive(
            Plan(settings), posture=posture, now=self.clock.now(), complete=complete
        )
        # On a busy machine `drive` may have given up on lanes that wait for nothing but the disk.
        for _ in range(100):
            await asyncio.sleep(0)
        return {(o.knob, o.subject): o for o in self.reconciler.outcomes()}


def wish(
    knob: Knob, subject: Subject, value: float, *, rule: str = "test/rule", **more: Any
) -> Setting:
    return Setting(knob, subject, value, f"{value:g} is wished", rule, **more)


def seat(name: str, inode: int = 7) -> Subject:
    return on_cgroup(name, f"/{name}", inode)


def card(number: int) -> Subject:
    return on_gpu(f"GPU-{number}")


def cpu_dial(**raws: str) -> Dial:
    """A dial for cpu.max with one cgroup for each name."""
    dial = Dial(CPU_MAX)
    for name, raw in raws.items():
        dial.make(seat(name), raw)
    return dial


def power_dial(*watts: float) -> Dial:
    dial = Dial(POWER_LIMIT)
    for number, value in enumerate(watts, start=1):
        dial.make(card(number), repr(value))
    return dial
