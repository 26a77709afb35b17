"""`gpuagent explain` of runs: what was started, how it fares, and why one was refused."""

import json

import msgspec

from gpuagent.model.inventory import Level
from gpuagent.model.plan import Snapshot
from gpuagent.model.run import Refusal, Reservation, RunList
from tests.cli.stage import agent, run
from tests.expose import snapshots

TRAIN = Reservation(
    name="train",
    level=Level.L3,
    pid=4242,
    started=42420,
    uid=1000,
    by="user 1000",
    gpus=(snapshots.GPU0,),
    memory_bytes=8 << 30,
    share_ratio=0.4,
    began_wall=7.0,
    notes=("no scope: this host does not run systemd: not held back",),
)
REFUSED = Refusal(
    kind="refused",
    why="GPU 0: 90 GiB are asked for; 12 GiB are free",
    remedy="ask for less",
    uid=1000,
    by="user 1000",
    asked="L3 on 1 card(s)",
    wall=snapshots.WALL,
    number=1,
    numbers=(("memory_free_bytes", 12.0 * 2**30),),
)


def told(*active: Reservation, refused: tuple[Refusal, ...] = ()) -> Snapshot:
    return msgspec.structs.replace(snapshots.busy(), runs=RunList(active, refused))


def said(snapshot: Snapshot, *words: str) -> str:
    with agent(snapshot) as path:
        done = run("explain", "--socket", path, *words, columns=300)
    assert done.exit_code == 0, done.output
    return done.output


def test_of_a_run_what_it_was_promised_and_what_it_lacks() -> None:
    text = said(told(TRAIN), "train")
    assert "train was started with `gpuagent run` by user 1000, L3" in text
    assert "with 8.0 GiB reserved on each card and 40 % of it under CUDA MPS" in text
    assert "without a scope of its own. no scope: this host does not run systemd" in text
    assert "best effort: held back first); it was started by gpuagent run." in text
    assert "was started with" not in said(told(), "train")
    assert "claimed by the rule train" in said(told(), "train")


def test_a_share_that_nothing_enforces_is_not_told_as_one_of_mps() -> None:
    note = "no MPS daemon serves GPU 0: share is not enforced"
    text = said(told(msgspec.structs.replace(TRAIN, notes=(note,))), "train")
    assert "and 40 % of it, without a scope of its own. no MPS daemon serves GPU 0" in text
    assert "under CUDA MPS" not in text


def test_without_a_name_all_of_ones_own_with_what_holds_each() -> None:
    text = said(told(TRAIN, refused=(REFUSED,)))
    assert "train was started with" in text
    assert "held back" in text
    assert "user 1000 (L3 on 1 card(s)): GPU 0: 90 GiB are asked for; 12 GiB are free" in text
    assert "what to do: ask for less" in text
    assert "numbers: memory_free_bytes 12.0 GiB" in text


def test_one_that_is_no_tenant_yet_is_no_failure() -> None:
    text = said(told(msgspec.structs.replace(TRAIN, name="new")))
    assert "How it fares is not known" in text


def test_of_nothing_it_says_so() -> None:
    text = said(told())
    assert "Nothing that `gpuagent run` has started" in text
    assert "none" in text


def test_as_json() -> None:
    found = json.loads(said(told(TRAIN, refused=(REFUSED,)), "--json"))
    assert found["runs"][0]["name"] == "train"
    assert found["refusals"][0]["numbers"] == {"memory_free_bytes": 12.0 * 2**30}


def test_that_it_is_not_its_hour_is_said() -> None:
    snapshot = told(TRAIN)
    (train,) = (t for t in snapshot.state.inventory.tenants or () if t.name == "train")
    # 1,800,000,000 is 08:00 UTC.
    night = msgspec.structs.replace(train, hours=("23:00-06:00",))
    inventory = msgspec.structs.replace(snapshot.state.inventory, tenants=(night,))
    snapshot.state.inventory = inventory
    assert "It may use all it gets at 23:00-06:00 only" in said(snapshot, "train")
