"""host.checkpoint over the fake tool: suspended and resumed, or given up with nothing left behind."""

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.clock import SystemClock
from gpuagent.config import Suspend
from gpuagent.errors import AgentError, Gone, NoRoom, Refused, Unavailable, Unsupported
from gpuagent.host import checkpoint
from gpuagent.host.checkpoint import CudaCheckpoint
from gpuagent.host.procfs import ProcTable
from gpuagent.host.tool import Ran
from gpuagent.ports import Freed
from tests.fakes.checkpoint import FakeCheckpoint, How, Step
from tests.host.nvml_rig import until

GIB = 1024**3
CARD = "GPU-1"


class Driver:
    """Who holds device memory, as the driver lists it: nobody whose CUDA state is checkpointed."""

    def __init__(self, tool: FakeCheckpoint) -> None:
        self.tool = tool
        self.held: dict[int, int] = {}
        self.free: float | None = 60.0 * GIB
        self.silent = False
        self.stubborn = False
        """Whether it goes on listing what was checkpointed."""

    def memory_of(self, pid: int, since: float) -> dict[str, int] | None:
        if self.silent or pid not in self.held:
            return None if self.silent else {}
        gone = self.tool.state(pid) == "checkpointed" and not self.stubborn
        return {} if gone else {CARD: self.held[pid]}

    def memory_free(self, uuid: str, since: float) -> float | None:
        return self.free


class Bench:
    """A living process with CUDA state, the tool, and what acts on both."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        pid = process.pid
        self.tool = FakeCheckpoint(folder)
        self.driver = Driver(self.tool)
        self.processes = ProcTable()
        self.frozen: dict[int, bool | None] = {}
        self.freed: Freed | None = None
        """What is kept of what it gives up, and what had been done when it was kept."""
        self.kept_after: list[list[str]] = []
        self.disk: AgentError | None = None
        self.pid = pid
        self.started = self.processes.read(pid).started
        self.tool.add(pid)
        self.driver.held[pid] = 20 * GIB
        self.checkpoint = self.make()

    def make(self, *, forced: bool = False, **settings: object) -> CudaCheckpoint:
        given = {"command": self.tool.program, "lock_timeout": 1.0, "deadline": 20.0, **settings}
        return CudaCheckpoint(
            Suspend(**given),  # type: ignore[arg-type]
            processes=self.processes,
            frozen=lambda pid: self.frozen.get(pid, False),
            memory=self.driver,
            clock=SystemClock(),
            seen_seconds=0.6,
            forced=forced,
        )

    async def keep(self, freed: Freed | None) -> None:
        if self.disk is not None and freed is not None:
            raise self.disk
        self.freed = freed
        self.kept_after.append(self.tool.actions)

    async def suspend(self) -> None:
        await self.checkpoint.suspend(self.pid, self.started, self.keep)

    async def resume(self) -> None:
        await self.checkpoint.resume(self.pid, self.started, self.freed)

    async def state(self) -> str:
        return await self.checkpoint.state(self.pid, self.started)

    @property
    def real(self) -> str:
        return self.tool.state(self.pid)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(checkpoint, "_STATE_SECONDS", 3.0)
    monkeypatch.setattr(checkpoint, "_LATE_SECONDS", 0.5)
    with subprocess.Popen(["sleep", "300"]) as process:
        yield Bench(tmp_path, process)
        process.kill()


# -- it works ------------------------------------------------------------------------------------------


async def test_a_process_is_suspended_and_resumed(bench: Bench) -> None:
    assert await bench.state() == "runs"
    await bench.suspend()
    assert (bench.real, await bench.state()) == ("checkpointed", "suspended")
    await bench.resume()
    assert (bench.real, await bench.state()) == ("running", "runs")
    assert bench.tool.actions == ["lock", "checkpoint", "restore", "unlock"]


async def test_what_is_so_already_is_not_done_again(bench: Bench) -> None:
    await bench.resume()
    await bench.suspend()
    await bench.suspend()
    assert bench.tool.actions == ["lock", "checkpoint"]
    assert bench.freed == {CARD: 20 * GIB}


async def test_what_somebody_else_has_suspended_meanwhile_is_none_of_ours(bench: Bench) -> None:
    bench.tool.put(bench.pid, "checkpointed")
    with pytest.raises(Refused, match="somebody else has suspended"):
        await bench.suspend()
    assert (bench.real, bench.tool.actions, bench.freed) == ("checkpointed", [], None)


async def test_what_an_earlier_run_has_left_is_resumed(bench: Bench) -> None:
    for left in ("checkpointed", "locked"):
        bench.tool.put(bench.pid, left)
        await bench.make().resume(bench.pid, bench.started, {CARD: 20 * GIB})
        assert bench.real == "running"


async def test_what_it_gives_up_is_kept_before_the_checkpoint(bench: Bench) -> None:
    await bench.suspend()
    assert bench.freed == {CARD: 20 * GIB}
    assert bench.kept_after == [["lock"]]


async def test_what_cannot_be_kept_is_not_given_up(bench: Bench) -> None:
    bench.disk = Refused("the disk is full")
    with pytest.raises(Refused, match="the disk is full"):
        await bench.suspend()
    assert (bench.real, bench.tool.actions) == ("running", ["lock", "unlock"])


async def test_of_one_that_runs_on_nothing_stays_kept(bench: Bench) -> None:
    bench.tool.on(bench.pid, "checkpoint", "fails")
    with pytest.raises(Unavailable, match="it runs as before"):
        await bench.suspend()
    assert bench.freed is None
    bench.tool.on(bench.pid, "unlock", "fails")
    with pytest.raises(Unavailable, match="it is locked"):
        await bench.suspend()
    assert bench.freed == {CARD: 20 * GIB}, "its state is still ours to undo"


async def test_a_lock_of_somebody_else_is_left_and_said(bench: Bench) -> None:
    bench.tool.put(bench.pid, "locked")
    assert await bench.state() == "locked"
    with pytest.raises(Refused, match=f"--action unlock --pid {bench.pid}"):
        await bench.suspend()
    assert (bench.real, bench.tool.actions) == ("locked", [])


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
async def test_the_exit_code_of_a_suspension_says_nothing(bench: Bench, step: Step) -> None:
    for how in ("shy", "babbles"):
        bench.tool.on(bench.pid, step, how)
        await bench.suspend()
        assert bench.real == "checkpointed"
        await bench.resume()


@pytest.mark.parametrize("step", ["restore", "unlock"])
async def test_the_exit_code_of_a_resumption_says_nothing(bench: Bench, step: Step) -> None:
    await bench.suspend()
    bench.tool.on(bench.pid, step, "shy")
    await bench.resume()
    assert bench.real == "running"


# -- it does not, and what is left ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "lies", "hangs"])
async def test_a_lock_that_does_not_come_about_changes_nothing(bench: Bench, how: How) -> None:
    bench.tool.on(bench.pid, "lock", how)
    with pytest.raises(Unavailable, match=r"did not come to rest within 1 s.*it runs as before"):
        await bench.suspend()
    assert bench.real == "running"
    assert "checkpoint" not in bench.tool.actions
    bench.tool.heal(bench.pid)
    await bench.suspend()
    assert bench.real == "checkpointed"


async def test_one_that_never_comes_to_rest_is_left_alone(bench: Bench) -> None:
    bench.tool.busy(bench.pid)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"operation timed out.*it runs as before"):
        await bench.suspend()
    assert 0.9 < time.monotonic() - began < 15
    assert bench.real == "running"


@pytest.mark.parametrize("how", ["fails", "lies"])
async def test_a_checkpoint_that_fails_is_undone(bench: Bench, how: How) -> None:
    bench.tool.on(bench.pid, "checkpoint", how)
    with pytest.raises(Unavailable, match=r"could not be checkpointed.*it runs as before"):
        await bench.suspend()
    assert bench.real == "running"
    assert bench.tool.actions == ["lock", "checkpoint", "unlock"]


async def test_a_checkpoint_past_its_deadline_is_killed_and_undone(bench: Bench) -> None:
    bench.tool.on(bench.pid, "checkpoint", "hangs")
    bench.checkpoint = bench.make(deadline=2.0)
    with pytest.raises(Unavailable, match="past its deadline and killed; it runs as before"):
        await bench.suspend()
    assert bench.real == "running"


async def test_a_step_that_is_done_but_does_not_return_counts(bench: Bench) -> None:
    bench.checkpoint = bench.make(deadline=2.0)
    for step in ("lock", "checkpoint"):
        bench.tool.on(bench.pid, step, "hangs after")
        await bench.suspend()
        assert bench.real == "checkpointed"
        bench.tool.heal(bench.pid)
        await bench.resume()


async def test_a_checkpoint_that_frees_nothing_is_undone(bench: Bench) -> None:
    bench.driver.stubborn = True
    with pytest.raises(Unavailable, match=r"still holds 21474836480 bytes.*it runs as before"):
        await bench.suspend()
    assert bench.real == "running"
    assert bench.tool.actions == ["lock", "checkpoint", "restore", "unlock"]


@pytest.mark.parametrize("unlisted", [False, True])
async def test_one_of_which_the_driver_does_not_say_what_it_holds_runs_on(
    bench: Bench, unlisted: bool
) -> None:
    if unlisted:
        bench.driver.held.clear()
    bench.driver.silent = not unlisted
    with pytest.raises(Unavailable, match=r"does not say how much memory.*it runs as before"):
        await bench.suspend()
    assert (bench.real, bench.freed) == ("running", None)
    assert bench.tool.actions == ["lock", "unlock"]


async def test_memory_that_was_not_seen_freed_is_told_until_it_is(bench: Bench) -> None:
    bench.tool.on(bench.pid, "checkpoint", "hangs")
    task = asyncio.create_task(bench.suspend())
    await until(lambda: "checkpoint" in bench.tool.actions)
    bench.driver.silent = True
    bench.tool.heal(bench.pid)
    await task
    assert (bench.real, await bench.state()) == ("checkpointed", "unconfirmed")
    bench.driver.silent, bench.driver.stubborn = False, True
    assert await bench.state() == "unconfirmed"
    bench.driver.stubborn = False
    assert await bench.state() == "suspended"
    bench.driver.silent = True
    assert await bench.state() == "suspended"


async def test_what_fails_in_giving_up_too_is_said(bench: Bench) -> None:
    bench.tool.on(bench.pid, "checkpoint", "fails")
    bench.tool.on(bench.pid, "unlock", "fails")
    with pytest.raises(Unavailable, match=rf"it is locked, .*--action unlock --pid {bench.pid}"):
        await bench.suspend()
    assert (bench.real, await bench.state()) == ("locked", "locked")
    bench.tool.heal(bench.pid)
    await bench.suspend()  # The lock is our own.
    assert bench.real == "checkpointed"


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
async def test_a_state_that_cannot_be_asked_after_a_step_is_said(bench: Bench, step: Step) -> None:
    bench.tool.on(bench.pid, step, "hangs after")
    bench.checkpoint = bench.make(deadline=1.5)
    task = asyncio.create_task(bench.suspend())
    await until(lambda: step in bench.tool.actions)
    bench.tool.on(bench.pid, "get-state", "hangs")
    with pytest.raises(Unavailable, match=rf"after {step} .*did not say within"):
        await task


async def test_a_cuda_state_that_has_failed_is_final(bench: Bench) -> None:
    bench.tool.on(bench.pid, "checkpoint", "breaks")
    with pytest.raises(Refused, match="it can only be ended"):
        await bench.suspend()
    for call in (bench.suspend(), bench.resume(), bench.state()):
        with pytest.raises(Refused, match="has failed: it can only be ended"):
            await call


@pytest.mark.parametrize("how", ["fails", "lies"])
async def test_a_restore_that_fails_leaves_it_suspended(bench: Bench, how: How) -> None:
    await bench.suspend()
    bench.tool.on(bench.pid, "restore", how)
    with pytest.raises(Unavailable, match=r"could not be restored.*it stays suspended"):
        await bench.resume()
    assert bench.real == "checkpointed"
    bench.tool.heal(bench.pid)
    await bench.resume()
    assert bench.real == "running"


async def test_a_restore_is_not_begun_before_there_is_room(bench: Bench) -> None:
    await bench.suspend()
    bench.driver.free = 20.0 * GIB
    with pytest.raises(NoRoom, match="waits for device memory: it held 21474836480 bytes"):
        await bench.resume()
    assert bench.tool.actions == ["lock", "checkpoint"]
    bench.driver.free = 21.0 * GIB
    await bench.resume()
    assert bench.real == "running"


@pytest.mark.parametrize("unknown", ["freed", "free"])
async def test_a_restore_is_not_begun_where_room_is_not_known_unless_forced(
    bench: Bench, unknown: str
) -> None:
    await bench.suspend()
    later = bench.make()
    if unknown == "free":
        bench.driver.free = None
    freed = bench.freed if unknown == "free" else None
    with pytest.raises(Unavailable, match="run `gpuagent restore --force-resume`"):
        await later.resume(bench.pid, bench.started, freed)
    assert bench.tool.actions == ["lock", "checkpoint"]
    await bench.make(forced=True).resume(bench.pid, bench.started, freed)
    assert bench.real == "running"


async def test_an_unlock_that_fails_is_said(bench: Bench) -> None:
    await bench.suspend()
    bench.tool.on(bench.pid, "unlock", "fails")
    with pytest.raises(Unavailable, match=r"could not be unlocked.*it is locked"):
        await bench.resume()
    bench.tool.heal(bench.pid)
    await bench.resume()
    assert bench.real == "running"


# -- whom it must not touch -----------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, None])
async def test_a_process_that_may_be_frozen_is_not_touched_until_it_is_thawed(
    bench: Bench, frozen: bool | None
) -> None:
    bench.frozen[bench.pid] = frozen
    for call in (bench.suspend(), bench.resume()):
        with pytest.raises(Unavailable, match=r"frozen.*waits until it is .*thawed"):
            await call
    assert bench.tool.calls == []
    bench.frozen[bench.pid] = False
    await bench.suspend()
    assert bench.real == "checkpointed"


async def test_one_that_is_frozen_between_the_steps_is_said_to_be_locked(bench: Bench) -> None:
    bench.tool.on(bench.pid, "lock", "hangs")
    task = asyncio.create_task(bench.suspend())
    await until(lambda: "lock" in bench.tool.actions)
    bench.frozen[bench.pid] = True
    bench.tool.heal(bench.pid)
    with pytest.raises(Unavailable, match=r"waits until it is thawed.*it is locked until then"):
        await task
    bench.frozen.clear()
    await bench.suspend()
    assert bench.real == "checkpointed"


async def test_another_process_of_the_same_number_is_never_touched(bench: Bench) -> None:
    for call in (
        bench.checkpoint.suspend(bench.pid, bench.started + 1, bench.keep),
        bench.checkpoint.resume(bench.pid, bench.started + 1, {}),
        bench.checkpoint.state(bench.pid, bench.started + 1),
        bench.checkpoint.suspend(2**22 + 1, 1, bench.keep),
    ):
        with pytest.raises(Gone):
            await call
    assert bench.tool.calls == []


async def test_one_that_ends_in_between_is_gone(bench: Bench) -> None:
    bench.tool.on(bench.pid, "lock", "hangs after")
    task = asyncio.create_task(bench.suspend())
    await until(lambda: "lock" in bench.tool.actions)
    bench.process.kill()
    await asyncio.to_thread(bench.process.wait)
    bench.tool.heal(bench.pid)
    with pytest.raises(Gone):
        await task
    assert bench.tool.actions == ["lock"]


async def test_without_the_tool_or_without_cuda_it_is_unsupported(bench: Bench) -> None:
    missing = bench.make(command="no-such-cuda-checkpoint")
    for call in (
        missing.state(bench.pid, bench.started),
        missing.suspend(bench.pid, bench.started, bench.keep),
    ):
        with pytest.raises(Unsupported, match=r"is not in PATH: get it from .* driver 570"):
            await call
    bench.tool.remove(bench.pid)
    with pytest.raises(Unsupported, match="initialization error"):
        await bench.suspend()


async def test_a_question_that_hangs_is_given_up(bench: Bench) -> None:
    bench.tool.on(bench.pid, "get-state", "hangs")
    with pytest.raises(Unavailable, match="did not say within"):
        await bench.state()


@given(st.text(), st.integers(-15, 255) | st.none())
def test_any_answer_is_a_state_or_none(text: str, code: int | None) -> None:
    said = checkpoint._said(Ran(code, text))
    assert said is None or said == text.strip().lower()


HOWS: tuple[How, ...] = ("", "", "fails", "lies", "shy", "babbles", "breaks")
LEFT = {
    "running": "it runs as before",
    "locked": "it is locked",
    "checkpointed": "it is suspended",
    "failed": "it can only be ended",
}


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_goes_wrong_what_is_said_is_so(bench: Bench, seed: int) -> None:
    """After success it is as asked for; after an error the text names what it has been left as."""
    steps: tuple[Step, ...] = ("lock", "checkpoint", "restore", "unlock")
    for number, step in enumerate(steps):
        bench.tool.on(bench.pid, step, HOWS[(seed * (2 * number + 1) + number) % len(HOWS)])
    bench.driver.stubborn = seed % 4 == 3
    said = "it is suspended"
    try:
        await bench.suspend()
    except AgentError as error:
        said = str(error)
    assert LEFT[bench.real] in said
    holds = bool(bench.driver.memory_of(bench.pid, 0))
    assert holds == (bench.real != "checkpointed") or bench.driver.stubborn
