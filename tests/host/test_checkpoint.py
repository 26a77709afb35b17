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
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.host import checkpoint
from gpuagent.host.checkpoint import CudaCheckpoint, frozen_by_cgroup
from gpuagent.host.procfs import ProcTable
from gpuagent.host.tool import Ran
from gpuagent.ports import Cgroups
from tests.fakes.checkpoint import FakeCheckpoint, How, Step
from tests.host.nvml_rig import until
from tests.sense.fakes import FakeCgroups, FakeProcesses, process

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

    def memory_free(self, uuid: str) -> float | None:
        return self.free


class Bench:
    """A living process with CUDA state, the tool, and what acts on both."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        pid = process.pid
        self.tool = FakeCheckpoint(folder)
        self.driver = Driver(self.tool)
        self.processes = ProcTable()
        self.frozen: set[int] = set()
        self.pid = pid
        self.started = self.processes.read(pid).started
        self.tool.add(pid)
        self.driver.held[pid] = 20 * GIB
        self.checkpoint = self.make()

    def make(self, **settings: object) -> CudaCheckpoint:
        given = {"command": self.tool.program, "lock_timeout": 1.0, "deadline": 20.0, **settings}
        return CudaCheckpoint(
            Suspend(**given),  # type: ignore[arg-type]
            processes=self.processes,
            frozen=lambda pid: pid in self.frozen,
            memory=self.driver,
            clock=SystemClock(),
            seen_seconds=0.6,
        )

    async def suspend(self) -> None:
        await self.checkpoint.suspend(self.pid, self.started)

    async def resume(self) -> None:
        await self.checkpoint.resume(self.pid, self.started)

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
    bench.tool.put(bench.pid, "checkpointed")
    await bench.suspend()
    assert bench.tool.actions == []


async def test_what_an_earlier_run_has_left_is_resumed(bench: Bench) -> None:
    for left in ("checkpointed", "locked"):
        bench.tool.put(bench.pid, left)
        await bench.make().resume(bench.pid, bench.started)
        assert bench.real == "running"


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


async def test_where_the_driver_does_not_say_the_state_counts(bench: Bench) -> None:
    bench.driver.silent = True
    await bench.suspend()
    assert bench.real == "checkpointed"


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
    with pytest.raises(Unavailable, match="waits for device memory: it held 21474836480 bytes"):
        await bench.resume()
    assert bench.tool.actions == ["lock", "checkpoint"]
    bench.driver.free = 21.0 * GIB
    await bench.resume()
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


async def test_a_frozen_process_is_refused(bench: Bench) -> None:
    bench.frozen.add(bench.pid)
    for call in (bench.suspend(), bench.resume()):
        with pytest.raises(Refused, match=r"is frozen.*thaw first"):
            await call
    assert bench.tool.calls == []


async def test_another_process_of_the_same_number_is_never_touched(bench: Bench) -> None:
    for call in (
        bench.checkpoint.suspend(bench.pid, bench.started + 1),
        bench.checkpoint.resume(bench.pid, bench.started + 1),
        bench.checkpoint.state(bench.pid, bench.started + 1),
        bench.checkpoint.suspend(2**22 + 1, 1),
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
        missing.suspend(bench.pid, bench.started),
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


def test_a_process_is_frozen_where_its_cgroup_or_one_above_is() -> None:
    cgroups = FakeCgroups()
    cgroups.make("/a", cgroup_events="populated 1\nfrozen 1")
    cgroups.make("/b", cgroup_events="populated 1\nfrozen 0")
    cgroups.make("/c")
    processes = FakeProcesses(*(process(n, f"/{p}") for n, p in enumerate("abc", start=1)))
    tree: Cgroups = cgroups
    frozen = frozen_by_cgroup(processes, tree)
    assert [frozen(pid) for pid in (1, 2, 3)] == [True, False, False]
    with pytest.raises(Gone):
        frozen(4)


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
