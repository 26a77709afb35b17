"""Programs of others that the agent runs hang, lie or are slow (DESIGN 9): the loop goes on."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.checkpoint import FakeCheckpoint, Step
from tests.fakes.nvidia_smi import FakeSmi, Mode
from tests.fakes.nvml import GIB
from tests.stage import Daemon, until
from tests.whole.conftest import Host
from tests.whole.watch import goes_on, knob, metric

SUSPENDED = "process_suspended"


class Suspending:
    """Train may be suspended: by a fake tool, which frees its memory on the fake card as the real one does."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.tool = FakeCheckpoint(host.stage.folder)
        self.pid = host.train.pid
        self.tool.add(self.pid)
        self._pressed = 0
        host.stage.configure(
            host.serve_rule
            + host.stage.rule("train", "L3")
            + f'levers = ["suspend"]\n[suspend]\ncommand = "{self.tool.program}"\n'
            + 'lock_timeout = "1s"\ndeadline = "40s"\n'
        )

    def begun(self, step: Step, *, press: bool = True) -> Callable[[], bool]:
        """Whether the tool has been told to take this step; `press` has the card fill up meanwhile."""

        def asked() -> bool:
            self.work(grow=GIB // 2 if press else 0)
            return (step, self.pid) in self.tool.calls

        return asked

    def suspended(self, *, press: bool = False) -> bool:
        self.work(grow=GIB // 2 if press else 0)
        return self.tool.state(self.pid) == "checkpointed"

    def work(self, *, grow: int = 0) -> None:
        """As `Host.work`; and what is suspended holds no memory."""
        self.host.work(grow=grow)
        suspended = self.tool.state(self.pid) == "checkpointed"
        if suspended and self.pid in self.host.card.pids:
            self.host.card.remove_process(self.pid)
        elif not suspended and self.pid not in self.host.card.pids:
            self.host.card.add_process(self.pid, kind="compute", memory_bytes=20 * GIB)

    def until(self, what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
        def so() -> object:
            self.work()
            return condition()

        until(what, so, seconds=seconds)

    def in_flight(self, daemon: Daemon) -> bool:
        told = knob(daemon, SUSPENDED)
        return told is not None and "no answer for" in told["outcome_why"]


@pytest.fixture
def suspending(host: Host) -> Suspending:
    return Suspending(host)


def test_a_checkpoint_tool_that_hangs_in_each_step_in_turn(suspending: Suspending) -> None:
    steps: tuple[Step, ...] = ("get-state", "lock", "checkpoint", "restore", "unlock")
    tool, pid = suspending.tool, suspending.pid
    for step in steps:
        tool.on(pid, step, "hangs")
    daemon = suspending.host.run()
    for step in steps:
        if step == "restore":
            until("it is suspended", lambda: suspending.suspended(press=True))
            suspending.host.relax()
        grow = step in ("get-state", "lock", "checkpoint")
        until(f"{step} is begun", suspending.begun(step, press=grow), seconds=60)
        suspending.until("that it hangs is said", lambda: suspending.in_flight(daemon))
        goes_on(daemon, suspending.work)
        tool.on(pid, step, "")
    suspending.until("it runs again", lambda: tool.state(pid) == "running")
    assert daemon.stop(60) == 0


@pytest.mark.parametrize("forced", [False, True])
def test_a_stop_without_room_to_resume_says_so_and_a_restore_does_it(
    suspending: Suspending, forced: bool
) -> None:
    daemon = suspending.host.run()
    until("it is suspended", lambda: suspending.suspended(press=True), seconds=60)
    assert daemon.stop(60) != 0, "the card is full"
    assert daemon.log.count("not everything is put back") == 1
    assert suspending.suspended()
    done = suspending.host.stage.command("restore", "--rescue")
    assert done.returncode != 0, "as ExecStopPost it comes at once, and the card is as full"
    assert "waits for device memory" in " ".join(done.stdout.split())
    assert suspending.suspended()
    assert "restore" not in suspending.tool.actions, "one that fails can never be repeated"
    if not forced:
        suspending.host.relax()
    done = suspending.host.stage.command("restore", *["--force-resume"] * forced)
    assert done.returncode == 0, done.stderr
    assert suspending.tool.state(suspending.pid) == "running"


def test_a_lock_that_never_comes_about_is_given_up_and_said(suspending: Suspending) -> None:
    suspending.tool.busy(suspending.pid)
    daemon = suspending.host.run()
    until("it is told to", suspending.begun("lock"), seconds=60)

    def said() -> bool:
        told = knob(daemon, SUSPENDED)
        return told is not None and "did not come to rest within 1 s" in told["outcome_why"]

    suspending.until("that is said", said)
    assert suspending.tool.state(suspending.pid) == "running"
    goes_on(daemon, suspending.work)
    assert daemon.stop(60) == 0
    assert suspending.tool.state(suspending.pid) == "running"


# -- nvidia-smi ----------------------------------------------------------------------------------------


def audit(daemon: Daemon, name: str) -> list[Any]:
    """What has been done of one knob, newest first."""
    return [a for a in daemon.client.get("/v1/audit")["items"] if a["knob"] == name]


@pytest.fixture
def smi(host: Host) -> FakeSmi:
    folder = host.stage.folder / "bin"
    folder.mkdir()
    host.stage.environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    host.stage.configure(host.rules + '[[cards]]\ngpu = "*"\ntime_slice = "short"\n')
    return FakeSmi(folder, [host.card.uuid])


@pytest.mark.parametrize("mode", ["lies", "babbles"])
def test_an_nvidia_smi_that_lies_is_said_once_and_believed_in_nothing(
    host: Host, smi: FakeSmi, mode: Mode
) -> None:
    smi.mode = mode
    daemon = host.run()
    until("that it is not set is said", lambda: audit(daemon, "gpu_time_slice"))
    asked = len(smi.calls)
    if mode == "lies":  # what it does not know it is not asked again for a minute
        until("it is tried again", lambda: len(smi.calls) > asked, seconds=30)
    said = [a["result"] for a in audit(daemon, "gpu_time_slice")]
    assert said == ["refused"], "once, however often it is tried"
    goes_on(daemon, host.work)
    assert smi.slices[host.card.uuid] == 0
    smi.mode = ""
    assert daemon.stop(30) == 0
    assert smi.slices[host.card.uuid] == 0


def test_an_nvidia_smi_that_hangs(host: Host, smi: FakeSmi) -> None:
    smi.mode = "hangs"
    daemon = host.run()
    until("it is asked", lambda: smi.calls)
    goes_on(daemon, host.work)
    smi.mode = ""
    until("it is set once it answers", lambda: smi.slices[host.card.uuid] == 1, seconds=60)
    assert daemon.stop(30) == 0
    assert smi.slices[host.card.uuid] == 0


# -- the driver ------------------------------------------------------------------------------------------


def test_a_driver_that_takes_seconds_for_a_write(host: Host) -> None:
    text = host.stage.config.read_text()
    host.stage.config.write_text(
        text.replace("[nvml]", '[nvml]\ncall_deadline = "10s"') + '[power]\nbudget = "500W"\n'
    )
    host.stage.driver.slow("nvmlDeviceSetPowerManagementLimit", 3.0)
    daemon = host.run()
    calls = host.stage.driver.calls
    until("it is told to", lambda: calls("nvmlDeviceSetPowerManagementLimit"))
    goes_on(daemon, host.work)
    until("it is set", lambda: host.card.power_limit_watts == 500)
    assert metric(daemon, "gpuagent_gpu_power_limit_watts")
    assert daemon.stop(40) == 0
    assert host.card.power_limit_watts == 700
