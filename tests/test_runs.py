"""Admission against a host of values: one decision at a time, a scope or the reason, what is told."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuagent.config import Config, Launch, Run
from gpuagent.errors import AgentError, Forbidden, Gone, Refused, Unavailable, Unsupported
from gpuagent.model.audit import Action
from gpuagent.model.inventory import Gpu, Level
from gpuagent.model.plan import Posture
from gpuagent.model.run import RunAsk, Starter
from gpuagent.model.state import Event
from gpuagent.ports import Scopes, ScopeWish
from gpuagent.runbook import RunBook
from gpuagent.runs import Registrar, device_files
from tests.decide.test_admission import ground
from tests.decide.world import GIB, gpu
from tests.sense.fakes import FakeProcesses, OwnClock, process


class FakeScopes:
    """Scopes are where the test says, or there are none."""

    def __init__(self) -> None:
        self.fails: AgentError | None = None
        self.wishes: list[ScopeWish] = []
        self.gate: asyncio.Event | None = None
        self._came = asyncio.Event()

    async def until(self, count: int) -> None:
        """Wait until so many are wished for."""
        async with asyncio.timeout(20):
            while len(self.wishes) < count:
                self._came.clear()
                await self._came.wait()

    async def start(self, wish: ScopeWish) -> str:
        self.wishes.append(wish)
        self._came.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        return f"/tenants.slice/{wish.unit}"


_fits: Scopes = FakeScopes()


class Host:
    """A registrar over two cards of 80 GiB, whose minors are 3 and 4."""

    def __init__(self, folder: Path) -> None:
        self.clock = OwnClock()
        self.book = RunBook(str(folder), boot="b1", clock=self.clock)
        self.scopes = FakeScopes()
        self.processes = FakeProcesses(*(process(pid) for pid in range(100, 120)))
        self.events: list[Event] = []
        self.audit: list[Action] = []
        self.config = Config(run=Run(devices=("/dev/fuse",)))
        self.cards = tuple(
            msgspec.structs.replace(gpu(uuid, index), minor=3 + index)
            for index, uuid in enumerate(("GPU-a", "GPU-b"))
        )
        self.starters = (Starter(None, None, (Level.L3,)),)
        self.known = True
        self.registrar = Registrar(
            book=self.book,
            scopes=self.scopes,
            processes=self.processes,
            starters=self._starters,
            config=lambda: self.config,
            state=self._state,
            clock=self.clock,
            tell=self.events.append,
            audit=self.audit.append,
        )
        self.asked_for: tuple[Launch, ...] = ()

    def _starters(self, entries: Any) -> tuple[Starter, ...]:
        self.asked_for = tuple(entries)
        return self.starters

    def _state(self) -> Any:
        return (ground(cards=self.cards).state, Posture(mode="observe")) if self.known else None

    def ask(self, pid: int = 100, **fields: Any) -> RunAsk:
        return RunAsk(
            **{
                "pid": pid,
                "started": 1000 + pid,
                "uid": 1000,
                "by": "user 1000",
                "level": Level.L3,
                "memory_bytes": 8 * GIB,
                **fields,
            }
        )

    def kinds(self) -> list[str]:
        return [e.kind for e in self.events]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(tmp_path)
    yield made
    await made.book.close()


async def test_it_is_registered_in_a_scope_with_its_cards_only(host: Host) -> None:
    said = await host.registrar.start(
        host.ask(gpus=("1",), name="job", cpu_weight=50, host_memory_bytes=GIB)
    )
    assert said == "run job of user 1000 is admitted: L3 on GPU 1, 8 GiB reserved on each"
    (run,) = host.book.active()
    assert run.cgroup == "/tenants.slice/gpuagent-run-100-1100.scope"
    assert run.notes == ()
    (wish,) = host.scopes.wishes
    assert wish.devices == (
        "/dev/nvidia4",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/fuse",
    )
    assert (wish.slice, wish.pid, wish.uid) == ("gpuagent-tenants.slice", 100, 1000)
    assert (wish.cpu_weight, wish.memory_max_bytes) == (50, GIB)
    (event,) = host.events
    assert (event.kind, event.subject and event.subject.tenant) == ("run-admitted", "job")
    (action,) = host.audit
    assert (action.did, action.subject.tenant, action.after) == ("started", "job", wish.unit)


async def test_two_at_once_are_never_promised_the_same_memory(host: Host) -> None:
    host.scopes.gate = asyncio.Event()
    crowd = [
        asyncio.create_task(host.registrar.start(host.ask(100 + i, memory_bytes=30 * GIB)))
        for i in range(10)
    ]
    await host.scopes.until(4)
    for refused in itertools.islice(asyncio.as_completed(crowd, timeout=20), 6):
        with pytest.raises(Refused):
            await refused
    host.scopes.gate.set()
    became = await asyncio.gather(*crowd, return_exceptions=True)
    assert sum(isinstance(r, str) for r in became) == 4
    assert len(host.book.active()) == 4


@pytest.mark.parametrize("error", [Unsupported("no systemd"), Refused("no"), Unavailable("busy")])
async def test_without_a_scope_it_runs_and_that_is_said_or_not_at_all(
    host: Host, error: AgentError
) -> None:
    host.scopes.fails = error
    await host.registrar.start(host.ask())
    (run,) = host.book.active()
    assert run.notes == (f"it has no scope of its own ({error}), so that it is not held back",)
    assert (run.unit, run.cgroup) == ("", "")
    assert "not held back" in host.events[-1].text
    with pytest.raises(type(error), match="--strict needs a scope"):
        await host.registrar.start(host.ask(101, strict=True))
    assert [r.pid for r in host.book.active()] == [100]
    why = host.book.told().refused[-1].why
    assert why == f"--strict needs a scope, and there is none: {error}"


async def test_a_process_that_ends_meanwhile_keeps_nothing(host: Host) -> None:
    host.scopes.fails = Gone("process 100 has ended")
    with pytest.raises(Gone):
        await host.registrar.start(host.ask())
    assert host.book.active() == ()
    assert host.events == []


async def test_a_number_that_another_process_has_by_now_is_nobody(host: Host) -> None:
    for ask in (host.ask(started=1), host.ask(pid=7)):
        with pytest.raises(Gone):
            await host.registrar.start(ask)
    assert host.book.active() == ()
    assert host.scopes.wishes == []


async def test_who_gives_up_keeps_nothing(host: Host) -> None:
    host.scopes.gate = asyncio.Event()
    waiting = asyncio.create_task(host.registrar.start(host.ask()))
    await host.scopes.until(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert host.book.active() == ()


async def test_a_refusal_is_told_once_and_kept_with_its_numbers(host: Host) -> None:
    for _ in range(20):
        with pytest.raises(Refused, match="90 GiB are asked for"):
            await host.registrar.start(host.ask(memory_bytes=90 * GIB))
    assert host.kinds() == ["run-refused"]
    assert [a.did for a in host.audit] == ["not started"]
    refusal = host.book.told().refused[-1]
    assert refusal.number == 20
    assert refusal.asked == "L3 on one card with 90 GiB on each"
    assert dict(refusal.numbers)["gpu0_memory_free_bytes"] == 80 * GIB
    host.clock.mono += 61
    with pytest.raises(Forbidden, match=r"may not start tenants of L1.*run\.allow"):
        await host.registrar.start(host.ask(level=Level.L1))
    assert host.kinds() == ["run-refused", "run-refused"]


async def test_the_configuration_in_force_decides(host: Host) -> None:
    entry = Launch(user="alice", sla=(Level.L1,))
    host.config = Config(run=Run(allow=(entry,), slice="jobs.slice"))
    host.starters = (Starter(1000, None, (Level.L1,)),)
    await host.registrar.start(host.ask(level=Level.L1))
    assert host.asked_for == (entry,)
    assert host.scopes.wishes[0].slice == "jobs.slice"


async def test_before_the_first_look_nothing_is_decided(host: Host) -> None:
    host.known = False
    with pytest.raises(Unavailable, match="first look"):
        await host.registrar.start(host.ask())


async def test_what_is_not_known_of_a_card_is_said_or_refused(host: Host) -> None:
    host.cards = (gpu("GPU-a", 0),)
    await host.registrar.start(host.ask())
    assert host.scopes.wishes[0].devices is None
    assert "is not known: it may open those of any card" in host.book.active()[0].notes[0]
    with pytest.raises(Refused, match="device files"):
        await host.registrar.start(host.ask(101, strict=True))


def test_the_files_of_a_card_are_by_its_minor() -> None:
    one = Gpu("GPU-a", 5, "H100", minor=0)
    files = device_files([one], ())
    assert files is not None
    assert files[0] == "/dev/nvidia0"
    assert device_files([one, Gpu("GPU-b", 0, "H100")], ()) is None
