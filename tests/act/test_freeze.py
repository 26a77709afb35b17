"""The freezing knob: what it reads as, what is ours of it after a crash, and who is never frozen."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.freeze import THAWED, Running
from gpuagent.act.ledger import Ledger
from gpuagent.act.record import target_of
from gpuagent.act.restore import Item, Occasion, put_back
from gpuagent.act.suspensions import Suspensions
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.inventory import Inventory, Level, Seat, Subject, Tenant, on_cgroup, on_process
from gpuagent.model.vocab import RUNNING, SUSPENDED
from gpuagent.ports import Actuator, Real
from tests.act.host import Agent, Clock, Inline, Tree, wish
from tests.act.settings import Checkpoints, Notes
from tests.fakes.levers import FakeFreezer

PATH = "/train"
NOBODY = Inventory(tenants=())


def queue(notes: Notes) -> Suspensions:
    """Every process lives below the cgroup that is frozen."""
    return Suspensions(
        Checkpoints(),
        level=lambda _name: Level.L3,
        clock=Clock(),
        ledger=notes,
        cgroup=lambda _pid: f"{PATH}/below",
    )


class Stage:
    """A cgroup that can be frozen, and the knob on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tree = Tree(folder / "tree")
        tree.root.mkdir()
        self.tree = tree
        self.freezer = FakeFreezer(tree)
        self.inode = tree.make(PATH, cgroup_freeze="0")
        self.seen = NOBODY
        self.notes = Notes()
        self.suspensions = queue(self.notes)
        self.knob = Running(
            self.freezer, tree, seen=lambda: self.seen, suspensions=self.suspensions
        )
        self.subject: Subject = on_cgroup("train", PATH, self.inode)

    @property
    def ratio(self) -> float | None:
        return self.freezer.ratios.get(self.inode)

    async def restored(self, occasion: Occasion = Occasion.CRASH) -> Item:
        ledger = Ledger(str(self.folder), boot="b1", executor=Inline())
        report = await put_back(
            ledger=ledger, actuators=[self.knob], occasion=occasion, clock=Clock()
        )
        await ledger.close()
        (item,) = report
        return item


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


_fits: type[Actuator] = Running


# -- values ----------------------------------------------------------------------------------------------


@given(st.floats())
def test_no_share_is_encoded_that_cannot_be_had(value: float) -> None:
    tree = Tree(Path("/nowhere"))
    knob = Running(FakeFreezer(tree), tree, seen=Inventory, suspensions=queue(Notes()))
    new = knob.encode(on_cgroup("a", "/a", 1), value, THAWED)
    if new is THAWED or math.isnan(value):
        assert new is THAWED
        assert not value <= 0.99
        return
    assert FakeFreezer.least_ratio <= new.value < 1
    assert new.value <= max(value, math.ceil(FakeFreezer.least_ratio * 100) / 100) + 1e-9
    assert new.raw == f"{new.value:.2f}"
    assert abs(new.value - value) <= 0.01 + 1e-9 or value < FakeFreezer.least_ratio


@pytest.mark.parametrize(
    ("value", "raw"), [(0.2, "0.20"), (0.999, "1"), (1.0, "1"), (0.0, "0.04"), (0.29, "0.29")]
)
def test_what_is_written(stage: Stage, value: float, raw: str) -> None:
    assert stage.knob.encode(stage.subject, value, THAWED).raw == raw


@pytest.mark.parametrize("raw", ["0", "-1", "2", "nan", "frozen", "paused", ""])
async def test_what_is_no_share_is_refused(stage: Stage, raw: str) -> None:
    with pytest.raises(Refused, match="share"):
        await stage.knob.set(stage.subject, raw)


async def test_another_cgroup_on_the_path_is_gone(stage: Stage) -> None:
    other = on_cgroup("train", PATH, stage.inode + 1)
    identity = await stage.knob.identity(stage.subject)
    await stage.knob.verify(stage.subject, identity)
    with pytest.raises(Gone):
        await stage.knob.get(other)
    with pytest.raises(Gone):
        await stage.knob.verify(other, identity)


# -- in a lane -------------------------------------------------------------------------------------------


async def test_it_is_frozen_while_that_is_wished_and_then_put_back(stage: Stage) -> None:
    async with Agent(stage.folder, stage.knob) as agent:
        outcomes = await agent.tick(wish(RUNNING, stage.subject, 0.2))
        outcome = outcomes[RUNNING, stage.subject]
        assert (outcome.result, outcome.real, outcome.original) == ("applied", 0.2, 1.0)
        assert stage.freezer.ratios == {stage.inode: 0.2}
        assert not await agent.tick()
        assert not stage.freezer.ratios
        assert not agent.ledger.entries


async def test_what_a_dead_guard_of_ours_left_frozen_is_put_back(stage: Stage) -> None:
    async with Agent(stage.folder, stage.knob) as agent:
        await agent.tick(wish(RUNNING, stage.subject, 0.2))
    stage.freezer.ratios.clear()
    stage.freezer.left.add(stage.inode)
    item = await stage.restored()
    assert (item.what, item.before, item.after) == ("put back", "frozen", "1")
    assert not stage.freezer.left


async def test_what_the_guard_has_thawed_is_back_already(stage: Stage) -> None:
    async with Agent(stage.folder, stage.knob) as agent:
        await agent.tick(wish(RUNNING, stage.subject, 0.2))
    stage.freezer.ratios.clear()
    item = await stage.restored()
    assert (item.what, item.before, item.after) == ("put back", "1", "1")


async def test_what_somebody_else_has_frozen_is_refused(stage: Stage) -> None:
    stage.freezer.left.add(stage.inode)
    async with Agent(stage.folder, stage.knob) as agent:
        outcomes = await agent.tick(wish(RUNNING, stage.subject, 0.2))
        outcome = outcomes[RUNNING, stage.subject]
        assert outcome.result == "refused"
        assert "frozen already, and not by the agent" in outcome.why
        assert not agent.ledger.entries
        assert not await agent.tick(seconds=70)
    assert stage.freezer.left == {stage.inode}


async def test_what_somebody_else_freezes_meanwhile_is_left_to_him(stage: Stage) -> None:
    async with Agent(stage.folder, stage.knob) as agent:
        await agent.tick(wish(RUNNING, stage.subject, 0.2))
        stage.freezer.ratios.clear()
        stage.freezer.foreign.add(stage.inode)
        outcomes = await agent.tick(wish(RUNNING, stage.subject, 0.2))
        assert outcomes[RUNNING, stage.subject].result == "refused"
        assert not agent.ledger.entries
        assert not await agent.tick(seconds=70)
        assert stage.ratio is None


async def test_while_the_guard_is_dead_it_stays_ours(stage: Stage) -> None:
    async with Agent(stage.folder, stage.knob) as agent:
        await agent.tick(wish(RUNNING, stage.subject, 0.2))
        stage.freezer.fails = Unavailable("the guard has died")
        outcomes = await agent.tick(wish(RUNNING, stage.subject, 0.2))
        assert outcomes[RUNNING, stage.subject].result == "in flight"
        assert "guard has died" in outcomes[RUNNING, stage.subject].why
        stage.freezer.fails = None
        outcomes = await agent.tick(wish(RUNNING, stage.subject, 0.2), seconds=20)
        assert outcomes[RUNNING, stage.subject].result == "applied"
        assert not await agent.tick(seconds=20)
        assert stage.ratio is None


# -- beside cuda-checkpoint, which hangs on a frozen process ------------------------------------------------


async def test_none_is_frozen_in_which_a_process_is_suspended(stage: Stage) -> None:
    stage.notes.hold(target_of(RUNNING, stage.subject))
    process = on_process("train", 30, 1)
    await stage.suspensions.suspend(process, see=lambda: None)
    with pytest.raises(Unavailable, match="while process 30 in it is suspended"):
        await stage.knob.set(stage.subject, "0.20")
    assert stage.ratio is None
    await stage.knob.set(stage.subject, "1")
    await stage.suspensions.resume(process)
    del stage.notes.own[target_of(SUSPENDED, process)]
    await stage.knob.set(stage.subject, "0.20")
    assert stage.ratio == 0.2


async def test_nobody_is_suspended_in_one_that_is_frozen(stage: Stage) -> None:
    stage.notes.hold(target_of(RUNNING, stage.subject))
    process = on_process("train", 30, 1)
    await stage.knob.set(stage.subject, "0.20")
    with pytest.raises(Unavailable, match=f"waits until {PATH} is thawed"):
        await stage.suspensions.suspend(process, see=lambda: None)
    await stage.knob.set(stage.subject, "0.30")
    with pytest.raises(Unavailable, match=f"waits until {PATH} is thawed"):
        await stage.suspensions.resume(process)
    await stage.knob.set(stage.subject, "1")
    await stage.suspensions.suspend(process, see=lambda: None)


# -- who is never frozen -----------------------------------------------------------------------------------


def serving(path: str) -> Tenant:
    return Tenant("serve", Level.L1, seats=(Seat(path, 9),))


@pytest.mark.parametrize("place", [PATH, PATH + "/below"])
async def test_no_cgroup_in_which_an_l1_tenant_lives_is_frozen(stage: Stage, place: str) -> None:
    stage.seen = Inventory(tenants=(serving(place),))
    with pytest.raises(Refused, match=r"serve \(L1\) lives in"):
        await stage.knob.set(stage.subject, "0.20")
    await stage.knob.set(stage.subject, "1")  # thawing is always right
    stage.seen = Inventory(tenants=(serving(PATH + "-other"),))
    await stage.knob.set(stage.subject, "0.20")
    assert stage.ratio == 0.2


async def test_nobody_is_frozen_before_it_is_known_who_is_there(stage: Stage) -> None:
    stage.seen = Inventory()
    with pytest.raises(Unavailable, match="not known yet"):
        await stage.knob.set(stage.subject, "0.20")


def test_only_our_own_value_is_explained_by_what_was_left() -> None:
    assert RUNNING.leftover
    assert Real(0.0, RUNNING.leftover) != THAWED
