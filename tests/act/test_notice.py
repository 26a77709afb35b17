"""Telling a tenant that it is held back: whom, once, as whom, and what of a failure."""

import signal
from pathlib import Path

import pytest

from gpuagent.act.notice import TRIES, UNTOLD, Noticed
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.inventory import (
    Inventory,
    Level,
    Notice,
    Place,
    Process,
    Seat,
    Tenant,
    on_tenant,
)
from gpuagent.model.vocab import NOTICED
from gpuagent.ports import Actuator
from tests.act.host import Agent, wish
from tests.fakes.levers import FakeEnder
from tests.sense.fakes import FakeProcesses, process

SUBJECT = on_tenant("train")
HOME = Place(unit="train.service", home="/train")
ONE, TWO = process(4000, "/train"), process(4001, "/train/worker")
USR1 = signal.SIGUSR1
_fits: type[Actuator] = Noticed


def told_how(
    *processes: Process, notice: Notice, places: tuple[Place, ...] = (HOME,), refusal: str = ""
) -> Tenant:
    return Tenant(
        "train",
        Level.L3,
        notice=notice,
        processes=processes,
        process_count=len(processes),
        places=places,
        seats=(Seat("/train", 7, refusal),),
    )


class Stage:
    def __init__(self, made: Tenant) -> None:
        self.processes = FakeProcesses(*made.processes)
        self.ender = FakeEnder(self.processes)
        self.seen = Inventory(tenants=(made,))
        self.knob = Noticed(self.ender, seen=lambda: self.seen)

    async def tell(self) -> None:
        await self.knob.set(SUBJECT, "told")


SIGNAL = Notice(signal="SIGUSR1")
COMMAND = Notice(command=("/opt/job/save", "--now"))


async def test_only_those_that_catch_it_are_signalled() -> None:
    stage = Stage(told_how(ONE, TWO, notice=SIGNAL))
    stage.ender.catching[TWO.pid] = {USR1}
    await stage.tell()
    assert stage.ender.sent == [(TWO.pid, USR1)]
    assert set(stage.processes.all) == {ONE.pid, TWO.pid}


async def test_that_none_catches_it_is_said() -> None:
    stage = Stage(told_how(ONE, TWO, notice=SIGNAL))
    with pytest.raises(Refused, match="none of its 2 processes catches SIGUSR1"):
        await stage.tell()
    assert not stage.ender.sent
    assert await stage.knob.get(SUBJECT) == UNTOLD


async def test_a_process_that_has_gone_is_passed_over() -> None:
    stage = Stage(told_how(ONE, TWO, notice=SIGNAL))
    stage.ender.catching = {ONE.pid: {USR1}, TWO.pid: {USR1}}
    del stage.processes.all[ONE.pid]
    await stage.tell()
    assert stage.ender.sent == [(TWO.pid, USR1)]


async def test_a_command_runs_as_the_tenants_user_in_its_own_cgroup() -> None:
    stage = Stage(told_how(ONE, TWO, notice=COMMAND))
    await stage.tell()
    assert stage.ender.run == [(1000, COMMAND.command, "/train")]


@pytest.mark.parametrize("only", [True, False])
async def test_in_no_cgroup_that_is_not_the_tenants_own(*, only: bool) -> None:
    refused = told_how(ONE, notice=COMMAND, refusal="shared with sshd.service")
    stage = Stage(refused if only else told_how(TWO, notice=COMMAND))
    await stage.tell()
    assert stage.ender.run == [(1000, COMMAND.command, "")]


async def test_of_several_users_none_is_guessed() -> None:
    other = process(4002, "/train", uid=1001, user="bob")
    stage = Stage(told_how(ONE, other, notice=COMMAND))
    with pytest.raises(Refused, match="several users"):
        await stage.tell()
    assert not stage.ender.run


@pytest.mark.parametrize(
    ("place", "runs"),
    [
        (HOME, True),
        (Place(container="ab12", home="/docker/ab12"), False),
        (Place(pod="1-2", home="/kubepods/pod1-2"), False),
        (Place(slurm_job="7", home="/slurm/job_7"), False),
        (Place(unit="box.scope", home="/machine.slice/box.scope"), False),
    ],
)
async def test_root_inside_a_container_is_not_root(place: Place, *, runs: bool) -> None:
    root = process(4003, "/train", uid=0, user="root")
    stage = Stage(told_how(root, notice=COMMAND, places=(place,)))
    if runs:
        await stage.tell()
        assert [uid for uid, _, _ in stage.ender.run] == [0]
        return
    with pytest.raises(Refused, match="root inside a container"):
        await stage.tell()
    assert not stage.ender.run


async def test_a_tenant_that_is_not_there_is_gone() -> None:
    stage = Stage(told_how(ONE, notice=COMMAND))
    stage.seen = Inventory()
    with pytest.raises(Gone):
        await stage.tell()
    stage = Stage(told_how(notice=COMMAND))
    with pytest.raises(Gone, match="has no process"):
        await stage.tell()


async def test_a_tenant_without_a_way_to_be_told_has_the_event_only() -> None:
    stage = Stage(told_how(ONE, notice=Notice()))
    await stage.tell()
    assert (await stage.knob.get(SUBJECT)).raw == "told"
    assert not stage.ender.sent
    assert not stage.ender.run


# -- in a lane -------------------------------------------------------------------------------------------


async def test_it_is_told_once_each_time_that_it_begins(tmp_path: Path) -> None:
    stage = Stage(told_how(ONE, notice=COMMAND))
    async with Agent(tmp_path, stage.knob) as agent:
        for _ in range(3):
            outcomes = await agent.tick(wish(NOTICED, SUBJECT, 1))
            assert outcomes[NOTICED, SUBJECT].result == "applied"
        assert len(stage.ender.run) == 1
        assert not await agent.tick()
        assert not agent.ledger.entries
        await agent.tick(wish(NOTICED, SUBJECT, 1))
        assert len(stage.ender.run) == 2


async def test_a_command_that_fails_is_tried_a_few_times_and_signals_are_not_sent_again(
    tmp_path: Path,
) -> None:
    both = Notice(signal="SIGUSR1", command=COMMAND.command)
    stage = Stage(told_how(ONE, notice=both))
    stage.ender.catching[ONE.pid] = {USR1}
    stage.ender.fails = Unavailable("/opt/job/save ended with exit status 1")
    async with Agent(tmp_path, stage.knob) as agent:
        for _ in range(10):
            outcomes = await agent.tick(wish(NOTICED, SUBJECT, 1), seconds=61)
        assert len(stage.ender.run) == TRIES
        assert stage.ender.sent == [(ONE.pid, USR1)]
        outcome = outcomes[NOTICED, SUBJECT]
        assert outcome.result == "refused"
        assert "exit status 1" in outcome.why
        assert not await agent.tick(seconds=61)
        assert not agent.ledger.entries
