"""Who sees one tenant only learns what happens to it, and nothing of others: whatever the reasons say."""

from typing import Any

import msgspec
import pytest

from gpuagent.expose.api import GETS, to_json
from gpuagent.expose.auth import Peer
from gpuagent.expose.discreet import OWN_EVENTS, may_be_told
from gpuagent.expose.routes import Ask
from gpuagent.model import vocab
from gpuagent.model.inventory import Level, on_gpu, on_tenant
from gpuagent.model.lease import Lease
from gpuagent.model.plan import Blocked, Cause, Hold, Plan, Setting, Snapshot, plainly
from gpuagent.model.state import EVENT_KINDS, Event, NodeState, Outcome
from tests.expose import snapshots
from tests.expose.scene import Scene

OWNER = Peer(label="user 1000", tenants=frozenset({"train"}))
READER = Peer(label="token 1", reads=True)
SECRET = "secret-llm-api"
WHY = f"p99 of {SECRET} at 200 ms (objective 0.1234 s)"
SEAT = snapshots.TRAIN_SEAT
PATHS = ("/v1/tenants", "/v1/tenants/{name}", "/v1/tenants/{name}/explanation")


def lease(name: str, *, of_card: bool = False) -> Lease:
    return Lease(
        f"{name}-{SECRET}",
        on_gpu(snapshots.GPU0) if of_card else on_tenant("train"),
        300.0 if of_card else 0.5,
        60.0,
        by=f"admin of {SECRET}",
        why=WHY,
        until=snapshots.MONO + 50,
        until_wall=snapshots.WALL + 50,
        created_wall=snapshots.WALL,
    )


def secretive() -> Snapshot:
    """A host on which every reason names somebody else."""
    busy = snapshots.busy()
    inventory = busy.state.inventory
    train, serve = inventory.tenants or ()
    seats = tuple(
        msgspec.structs.replace(s, refusal=f"also home of tenant {SECRET}") for s in train.seats
    )
    train = msgspec.structs.replace(train, seats=seats)
    serve = msgspec.structs.replace(serve, name=SECRET, level=Level.L1)
    inventory = msgspec.structs.replace(inventory, tenants=(train, serve))
    state = NodeState(
        busy.state.now,
        inventory=inventory,
        readings=busy.state.readings,
        leases=(lease("quiet"), lease("cool", of_card=True)),
    )
    card = on_gpu(snapshots.GPU0)
    numbers = (("latency_seconds", 0.2), ("objective_seconds", 0.1234), ("share", 0.5))
    return msgspec.structs.replace(
        busy,
        state=state,
        plan=Plan(
            (
                Setting(vocab.CPU_MAX, SEAT, 1.0, WHY, f"override/quiet-{SECRET}", numbers),
                Setting(
                    vocab.CPU_WEIGHT,
                    SEAT,
                    5,
                    WHY,
                    "backpressure/latency",
                    numbers,
                    Blocked("ineffective", WHY),
                ),
                Setting(vocab.POWER_LIMIT, card, 300, WHY, f"override/cool-{SECRET}", numbers),
            )
        ),
        outcomes={
            (vocab.CPU_MAX, SEAT): Outcome(
                vocab.CPU_MAX, SEAT, 1.0, None, None, "refused", WHY, snapshots.MONO
            )
        },
        holds=(
            Hold(
                on_tenant("train"),
                0.5,
                "cpu_max",
                "latency",
                WHY,
                ((vocab.CPU_MAX, SEAT),),
                "refused",
            ),
            Hold(card, 0.5, "power_limit", "override", WHY),
        ),
        causes=(
            Cause("latency", on_tenant(SECRET), 1.0, WHY, numbers),
            Cause("memory", card, 1.0, WHY, numbers),
        ),
    )


def answer(path: str, peer: Peer) -> bytes:
    get = next(g for g in GETS if g.path == path)
    return to_json(get.answer(Scene(secretive()), Ask(peer=peer, name="train")))


@pytest.mark.parametrize("path", PATHS)
def test_its_own_user_learns_nothing_of_others(path: str) -> None:
    told = answer(path, OWNER).decode()
    for word in (SECRET, "0.1234", "objective 0", "admin of"):
        assert word not in told
    assert SECRET in answer(path, READER).decode(), "who sees everything is told the reasons"


def test_but_what_happens_to_it_and_of_what_kind_the_reason_is() -> None:
    told: Any = msgspec.json.decode(answer(PATHS[2], OWNER))
    held = told["row"]["held_back"]
    assert (held["share_ratio"], held["cause"]) == (0.5, "latency")
    assert held["why"] == plainly("latency")
    assert held["effect_why"] == "it cannot be turned here"
    assert [o["share_ratio"] for o in told["overrides"]] == [0.5, None]
    turned = {k["knob"]: k for k in told["knobs"]}
    assert turned["cgroup_cpu_max"]["why"] == plainly("override")
    assert turned["cgroup_cpu_max"]["rule"] == "override"
    assert turned["cgroup_cpu_weight"]["numbers"] == {"share": 0.5}
    assert [c["kind"] for c in told["causes"]] == ["memory"]


def test_only_events_that_name_nobody_else_are_told() -> None:
    assert set(EVENT_KINDS) >= OWN_EVENTS
    assert may_be_told(Event("share-cut", 1.0, "tenant train is left 50 %", on_tenant("train")))
    for kind in ("override-set", "held-back", "released", "lever-let-go", "something-new"):
        assert not may_be_told(Event(kind, 1.0, WHY, on_tenant("train")))
