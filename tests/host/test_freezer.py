"""Freezing real processes in real cgroups, and what becomes of them when somebody dies."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gpuagent.config import Freeze
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host import freezer as module
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.freezer import CgroupFreezer
from gpuagent.host.guard import SILENCE_SECONDS
from gpuagent.ports import Freezer
from tests.stage.cgroups import cgroup2_mount, remove

PULSE = 0.1
LONG = 1.0
"""Of a pulse in the midst of which something is to happen, also on a host that is busy."""
_serial = itertools.count()
_fits: type[Freezer] = CgroupFreezer


class Cage:
    """A real cgroup with one process that sleeps."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        self.path = f"/gpuagent-freeze-{os.getpid()}-{next(_serial)}"
        self.folder = mount / self.path[1:]
        self.folder.mkdir()
        self.process = subprocess.Popen(["sleep", "1000"])
        (self.folder / "cgroup.procs").write_text(str(self.process.pid))

    @property
    def inode(self) -> int:
        return self.folder.stat().st_ino

    def is_frozen(self) -> bool:
        return "frozen 1" in (self.folder / "cgroup.events").read_text()

    def write(self, text: str) -> None:
        """As somebody else would: a service manager, a container runtime."""
        with (self.folder / "cgroup.freeze").open("r+") as file:
            file.write(text)

    def echo(self, text: str) -> None:
        """As a shell does, which truncates first."""
        with contextlib.suppress(OSError):  # what the kernel does not understand
            (self.folder / "cgroup.freeze").write_text(text)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.write("0")
        self.process.kill()
        self.process.wait()
        remove(self.folder)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come to that"
        await asyncio.sleep(0.002)
    return time.monotonic() - began


@pytest.fixture
def cage() -> Iterator[Cage]:
    mount = cgroup2_mount()
    if mount is None:
        pytest.skip("needs a writable cgroup v2 mount: run as root where one is mounted")
    made = Cage(mount)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
async def freezer(cage: Cage) -> AsyncIterator[CgroupFreezer]:
    made = CgroupFreezer(CgroupTree(str(cage.mount)), Freeze(pulse=PULSE))
    async with contextlib.AsyncExitStack() as stack:
        task = asyncio.create_task(made.run())
        stack.push_async_callback(asyncio.wait, [task])
        stack.callback(task.cancel)
        await asyncio.sleep(0)
        yield made


async def by(freezer: CgroupFreezer, cage: Cage) -> str:
    return (await freezer.state(cage.path, cage.inode)).by


# -- pulses ----------------------------------------------------------------------------------------------


async def test_a_cgroup_is_frozen_for_its_share_and_thawed_for_good(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    assert await by(freezer, cage) == "nobody"
    assert freezer.guard_pid is None  # no guard before it is needed
    began = time.monotonic()
    await freezer.set(cage.path, cage.inode, 0.5)
    for _ in range(3):
        await until(cage.is_frozen)
        await until(lambda: not cage.is_frozen())
    state = await freezer.state(cage.path, cage.inode)
    assert (state.by, state.running_ratio) == ("us", 0.5)
    await freezer.set(cage.path, cage.inode, 1)
    assert not cage.is_frozen()
    lasted = time.monotonic() - began
    state = await freezer.state(cage.path, cage.inode)
    assert (state.by, state.running_ratio) == ("nobody", 1.0)
    assert state.pulses >= 3
    assert 0.1 < state.frozen_seconds / lasted < 0.6
    await asyncio.sleep(2 * PULSE)
    assert not cage.is_frozen()


async def test_another_ratio_takes_effect_in_the_same_pulses(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    await freezer.set(cage.path, cage.inode, 0.9)
    guard = freezer.guard_pid
    await freezer.set(cage.path, cage.inode, 0.25)
    state = await freezer.state(cage.path, cage.inode)
    assert (state.by, state.running_ratio) == ("us", 0.25)
    before = state.pulses
    await asyncio.sleep(10 * PULSE)  # at 0.9 there would be one pulse in it
    await freezer.set(cage.path, cage.inode, 1)
    assert (await freezer.state(cage.path, cage.inode)).pulses - before >= 3
    assert freezer.guard_pid == guard


async def test_the_end_of_the_agent_thaws(cage: Cage) -> None:
    made = CgroupFreezer(CgroupTree(str(cage.mount)), Freeze(pulse=2.0))
    task = asyncio.create_task(made.run())
    await asyncio.sleep(0)
    await made.set(cage.path, cage.inode, 0.2)
    assert cage.is_frozen()
    task.cancel()
    await asyncio.wait([task])
    assert not cage.is_frozen()
    assert made.guard_pid is None
    with pytest.raises(Unavailable, match="nothing keeps a guard"):
        await made.set(cage.path, cage.inode, 0.2)


# -- what is not done ------------------------------------------------------------------------------------


async def test_what_cannot_be_is_said(freezer: CgroupFreezer, cage: Cage) -> None:
    with pytest.raises(Gone):
        await freezer.state("/no-such-cgroup", 1)
    with pytest.raises(Gone):
        await freezer.set("/no-such-cgroup", 1, 0.5)
    with pytest.raises(Refused, match="must be left"):
        await freezer.set(cage.path, cage.inode, freezer.least_ratio / 2)
    with pytest.raises(Refused, match="must be left"):
        await freezer.set(cage.path, cage.inode, float("nan"))
    with pytest.raises(Unsupported):
        await freezer.state("/", cage.mount.stat().st_ino)
    with pytest.raises(Refused, match="may live in it"):
        await freezer.set("/", cage.mount.stat().st_ino, 0.5)
    assert not cage.is_frozen()


OWN = """
import asyncio, os, sys
from gpuagent.config import Freeze
from gpuagent.errors import Refused
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.freezer import CgroupFreezer
mount, path, inside = sys.argv[1:]
async def main():
    open(mount + inside + "/cgroup.procs", "w").write("0")
    freezer = CgroupFreezer(CgroupTree(mount), Freeze())
    task = asyncio.create_task(freezer.run())
    await asyncio.sleep(0)
    try:
        await freezer.set(path, os.stat(mount + path).st_ino, 0.5)
    except Refused as error:
        print(error)
    task.cancel()
    await asyncio.wait([task])
asyncio.run(main())
"""


@pytest.mark.parametrize("below", ["", "/below"])
def test_it_never_freezes_itself(cage: Cage, below: str) -> None:
    inside = cage.folder / below.strip("/")
    inside.mkdir(exist_ok=True)
    command = [sys.executable, "-c", OWN, str(cage.mount), cage.path, cage.path + below]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        if below:
            remove(inside)
    assert "the agent lives in it" in done.stdout
    assert not cage.is_frozen()


# -- cgroups that go ---------------------------------------------------------------------------------------


async def test_a_cgroup_that_goes_is_gone_and_its_successor_is_left_alone(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    inode = cage.inode
    await freezer.set(cage.path, inode, 0.5)
    cage.process.kill()
    cage.process.wait()
    remove(cage.folder)
    cage.folder.mkdir()
    assert cage.inode != inode
    with pytest.raises(Gone):
        await freezer.state(cage.path, inode)
    with pytest.raises(Gone):
        await freezer.set(cage.path, inode, 0.5)
    await asyncio.sleep(3 * PULSE)
    assert (cage.folder / "cgroup.freeze").read_text() == "0\n"
    await freezer.set(cage.path, cage.inode, 0.5)
    assert await by(freezer, cage) == "us"


# -- somebody else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("while_frozen", [True, False])
async def test_what_somebody_else_freezes_meanwhile_is_his(
    freezer: CgroupFreezer, cage: Cage, *, while_frozen: bool
) -> None:
    freezer.reconfigure(Freeze(pulse=LONG))
    await freezer.set(cage.path, cage.inode, 0.5)
    await until(lambda: cage.is_frozen() is not while_frozen)
    await until(lambda: cage.is_frozen() is while_frozen)
    await asyncio.sleep(LONG / 4)  # not in the same moment as the guard
    cage.write("1")
    await until(cage.is_frozen)
    await asyncio.sleep(2 * LONG)
    assert cage.is_frozen()
    assert await by(freezer, cage) == "another"
    for ratio in (0.5, 1.0):
        with pytest.raises(Refused, match="somebody else"):
            await freezer.set(cage.path, cage.inode, ratio)
    cage.write("0")
    assert await by(freezer, cage) == "nobody"
    await freezer.set(cage.path, cage.inode, 0.5)
    await until(cage.is_frozen)


TOUCHES: dict[str, Callable[[Cage], object]] = {
    "opens it": lambda cage: (cage.folder / "cgroup.freeze").open("r+").close(),
    "appends nothing": lambda cage: (cage.folder / "cgroup.freeze").open("a").close(),
    "touches it": lambda cage: os.utime(cage.folder / "cgroup.freeze"),
    "truncates it": lambda cage: cage.echo(""),
    "fails to write": lambda cage: cage.echo("foo"),
    "reads it": lambda cage: (cage.folder / "cgroup.freeze").read_text(),
}


@pytest.mark.parametrize("how", TOUCHES)
async def test_what_we_froze_is_thawed_whoever_meddles_without_writing(
    freezer: CgroupFreezer, cage: Cage, how: str
) -> None:
    for _ in range(3):
        await freezer.set(cage.path, cage.inode, 0.3)
        await until(cage.is_frozen)
        await asyncio.sleep(PULSE / 5)  # not in the same moment as the guard
        TOUCHES[how](cage)
        await until(lambda: not cage.is_frozen(), 3.0)
        await asyncio.sleep(PULSE / 5)  # until it is heard of where it has been let go
        assert await by(freezer, cage) in {"us", "nobody"}
    await freezer.set(cage.path, cage.inode, 1)
    await asyncio.sleep(2 * PULSE)
    assert not cage.is_frozen()


@pytest.mark.parametrize("how", ["opens it", "appends nothing", "touches it", "reads it"])
async def test_who_writes_nothing_takes_nothing_from_us(
    freezer: CgroupFreezer, cage: Cage, how: str
) -> None:
    await freezer.set(cage.path, cage.inode, 0.5)
    for _ in range(20):
        TOUCHES[how](cage)
        await asyncio.sleep(PULSE / 7)
    assert await by(freezer, cage) == "us"
    await until(cage.is_frozen)


async def test_a_random_crowd_that_writes_nothing_never_makes_a_pulse_last(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    chance = random.Random(5)
    freezer.reconfigure(Freeze(pulse=0.02))
    until_ = time.monotonic() + 4
    thawed_at = time.monotonic()
    while (now := time.monotonic()) < until_:
        if not cage.is_frozen():
            thawed_at = now
            if await by(freezer, cage) == "nobody":
                await freezer.set(cage.path, cage.inode, 0.5)
        assert now - thawed_at < 1.0, "left frozen"
        for how in chance.choices(list(TOUCHES), k=chance.randrange(4)):
            TOUCHES[how](cage)
        await asyncio.sleep(chance.uniform(0, 0.005))


async def test_a_freeze_by_a_shell_in_a_pulse_is_his_from_the_second_time_on(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    """What truncates may have written nothing, so that our own freeze may be all there is."""
    freezer.reconfigure(Freeze(pulse=LONG))
    await freezer.set(cage.path, cage.inode, 0.5)
    await until(cage.is_frozen)
    await asyncio.sleep(LONG / 4)
    cage.echo("1")
    await until(lambda: not cage.is_frozen())
    await asyncio.sleep(LONG / 4)  # until it is heard of
    assert await by(freezer, cage) == "nobody"
    cage.echo("1")
    await asyncio.sleep(2 * LONG)
    assert cage.is_frozen()


async def test_what_somebody_else_thaws_is_left_thawed(freezer: CgroupFreezer, cage: Cage) -> None:
    await freezer.set(cage.path, cage.inode, 0.2)
    cage.write("0")
    await asyncio.sleep(5 * PULSE)
    assert not cage.is_frozen()
    assert await by(freezer, cage) == "nobody"


async def test_a_cgroup_that_is_found_frozen_is_nobody_knows_whose(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    cage.write("1")
    state = await freezer.state(cage.path, cage.inode)
    assert (state.by, state.running_ratio) == ("unknown", 0.0)


# -- deaths ----------------------------------------------------------------------------------------------


async def test_the_death_of_the_guard_thaws_at_once_and_another_takes_over(
    freezer: CgroupFreezer, cage: Cage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES", (0.5,))
    freezer.reconfigure(Freeze(pulse=2.0))
    await freezer.set(cage.path, cage.inode, 0.2)
    assert cage.is_frozen()
    first = freezer.guard_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    took = await until(lambda: not cage.is_frozen())
    print(f"\nthawed {took * 1e3:.1f} ms after kill -9 of the guard")
    assert took < 1.0  # it would have lasted for two seconds
    with pytest.raises(Unavailable, match="the guard has died"):
        await freezer.state(cage.path, cage.inode)
    await until(cage.is_frozen)
    assert freezer.guard_pid not in {None, first}
    assert await by(freezer, cage) == "us"


async def test_a_guard_that_cannot_be_kept_is_not_waited_for_forever(
    freezer: CgroupFreezer, cage: Cage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES", (30.0,))
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.3)
    await freezer.set(cage.path, cage.inode, 0.2)
    assert freezer.guard_pid is not None
    os.kill(freezer.guard_pid, signal.SIGKILL)
    await until(lambda: freezer.guard_pid is None)
    with pytest.raises(Unavailable):
        await freezer.state(cage.path, cage.inode)
    await asyncio.sleep(0.4)
    assert await by(freezer, cage) == "nobody"
    assert not cage.is_frozen()


async def test_a_guard_that_is_stopped_is_ended_and_what_it_froze_is_thawed(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    freezer.reconfigure(Freeze(pulse=2.0))
    await freezer.set(cage.path, cage.inode, 0.2)
    first = freezer.guard_pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    assert cage.is_frozen()
    await until(lambda: freezer.guard_pid != first)
    assert not cage.is_frozen()
    await until(cage.is_frozen)
    assert freezer.guard_pid not in {None, first}


async def test_a_guard_that_is_asked_to_end_thaws_and_another_takes_over(
    freezer: CgroupFreezer, cage: Cage
) -> None:
    await freezer.set(cage.path, cage.inode, 0.5)
    first = freezer.guard_pid
    assert first is not None
    os.kill(first, signal.SIGTERM)
    await until(lambda: freezer.guard_pid not in {None, first})
    await until(cage.is_frozen)
    await until(lambda: not cage.is_frozen())


AGENT = """
import asyncio, sys
from gpuagent.config import Freeze
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.freezer import CgroupFreezer
mount, path, inode, pulse = sys.argv[1:]
async def main():
    freezer = CgroupFreezer(CgroupTree(mount), Freeze(pulse=float(pulse)))
    task = asyncio.create_task(freezer.run())
    await asyncio.sleep(0)
    await freezer.set(path, int(inode), 0.2)
    print(freezer.guard_pid, flush=True)
    await task
asyncio.run(main())
"""


class Agent:
    """An agent of its own, which pulses the cage."""

    def __init__(self, cage: Cage, pulse: float) -> None:
        words = [str(cage.mount), cage.path, str(cage.inode), str(pulse)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.guard = int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def agent(cage: Cage) -> Iterator[Callable[[float], Agent]]:
    with contextlib.ExitStack() as stack:

        def start(pulse: float) -> Agent:
            made = Agent(cage, pulse)
            stack.callback(made.close)
            return made

        yield start


async def test_kill_9_of_the_agent_in_a_pulse_thaws_at_once(
    cage: Cage, agent: Callable[[float], Agent]
) -> None:
    made = agent(2.0)
    assert cage.is_frozen()
    made.process.kill()
    took = await until(lambda: not cage.is_frozen())
    print(f"\nthawed {took * 1e3:.1f} ms after kill -9 of the agent")
    assert took < 1.0
    await until(lambda: not Path(f"/proc/{made.guard}").exists())
    await asyncio.sleep(0.2)
    assert not cage.is_frozen()


async def test_an_agent_that_falls_silent_is_as_good_as_dead_until_it_speaks_again(
    cage: Cage, agent: Callable[[float], Agent]
) -> None:
    made = agent(0.2)
    made.process.send_signal(signal.SIGSTOP)
    last, began = time.monotonic(), time.monotonic()
    while time.monotonic() - began < SILENCE_SECONDS + 2.0:
        if cage.is_frozen():
            last = time.monotonic()
        await asyncio.sleep(0.01)
    assert last - began < SILENCE_SECONDS + 1.0
    made.process.send_signal(signal.SIGCONT)
    await until(cage.is_frozen)


async def test_what_agent_and_guard_leave_when_both_are_killed_can_be_thawed(
    cage: Cage, agent: Callable[[float], Agent]
) -> None:
    made = agent(2.0)
    made.process.send_signal(signal.SIGSTOP)  # so that it sees nothing of the other's death
    os.kill(made.guard, signal.SIGKILL)
    made.process.kill()
    made.process.wait()
    await until(lambda: not Path(f"/proc/{made.guard}/fd/0").exists())
    assert cage.is_frozen()
    later = CgroupFreezer(CgroupTree(str(cage.mount)), Freeze())
    assert await by(later, cage) == "unknown"
    await later.set(cage.path, cage.inode, 1)
    await until(lambda: not cage.is_frozen())
    assert await by(later, cage) == "nobody"


async def test_what_was_left_frozen_is_taken_over(freezer: CgroupFreezer, cage: Cage) -> None:
    cage.write("1")
    await freezer.set(cage.path, cage.inode, 0.5)
    await until(lambda: not cage.is_frozen())
    await until(cage.is_frozen)
    assert await by(freezer, cage) == "us"
