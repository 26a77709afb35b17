"""`/v1/mps`: what each client is to have, would get, and runs with."""

import msgspec

from gpuagent.expose.mps import MpsClientView, MpsServerView, view
from gpuagent.model.inventory import (
    Inventory,
    Level,
    Limits,
    MpsClient,
    MpsDaemon,
    MpsServer,
    Tenant,
    on_tenant,
)
from gpuagent.model.plan import Plan, Setting, Snapshot
from gpuagent.model.state import NodeState, Outcome, Result
from gpuagent.model.vocab import MPS_THREADS
from tests.expose import snapshots
from tests.expose.scene import Scene, ask, serving
from tests.sense.fakes import process

TRAIN = on_tenant("train")
DAEMON = MpsDaemon(
    "g",
    up=True,
    servers=(MpsServer(7, "ACTIVE", 0.8),),
    clients=(MpsClient(20, 7, 1.0), MpsClient(30, 7, None), MpsClient(99, 7, 0.1)),
    default_threads_ratio=0.5,
    pipe_directory="/mps/g",
    gpus=("GPU-1",),
)
TENANTS = (
    Tenant("serve", Level.L1, processes=(process(30),)),
    Tenant("train", Level.L3, processes=(process(20),), limits=Limits(compute_share_ratio=0.6)),
)


def snapshot(
    *daemons: MpsDaemon, wished: float | None = None, result: Result = "pending"
) -> Snapshot:
    busy = snapshots.busy()
    state = NodeState(busy.state.now, inventory=Inventory(tenants=TENANTS, mps=daemons))
    if wished is None:
        return msgspec.structs.replace(busy, state=state, plan=Plan(), outcomes={})
    real = wished if result == "pending" else 1.0
    return msgspec.structs.replace(
        busy,
        state=state,
        plan=Plan((Setting(MPS_THREADS, TRAIN, wished, "why", "rule"),)),
        outcomes={
            (MPS_THREADS, TRAIN): Outcome(MPS_THREADS, TRAIN, wished, real, 1.0, result, "", 0.0)
        },
    )


def clients(of: Snapshot) -> dict[int, MpsClientView]:
    (daemon,) = view(of).daemons or ()
    return {c.pid: c for c in daemon.clients}


def test_wanted_next_and_running_of_each_client() -> None:
    found = clients(snapshot(DAEMON, wished=0.3))
    assert found[20] == MpsClientView(20, 7, "train", "L3", 0.3, 0.3, 1.0)
    assert found[30] == MpsClientView(30, 7, "serve", "L1", None, 0.8, None)
    assert found[99] == MpsClientView(99, 7, None, None, None, 0.8, 0.1)


def test_what_is_only_wished_is_not_what_comes_next() -> None:
    train = clients(snapshot(DAEMON, wished=0.3, result="would"))[20]
    assert (train.wanted_ratio, train.next_ratio) == (0.3, 0.6), "its compute_share holds anyhow"
    train = clients(snapshot(DAEMON))[20]
    assert (train.wanted_ratio, train.next_ratio) == (0.6, 0.6)


def test_what_is_not_known_is_null() -> None:
    quiet = msgspec.structs.replace(DAEMON, servers=(MpsServer(7),))
    assert clients(snapshot(quiet))[20].next_ratio is None
    (daemon,) = view(snapshot(quiet)).daemons or ()
    assert daemon.servers == (MpsServerView(7, "", None),)
    unread = msgspec.structs.replace(
        snapshots.busy(), state=NodeState(snapshots.busy().state.now, inventory=Inventory())
    )
    assert view(unread).daemons is None


async def test_over_the_socket() -> None:
    down = MpsDaemon("b", up=False, why="no MPS control daemon runs in /x")
    async with serving(Scene(snapshot(DAEMON, down, wished=0.3))) as (_, path):
        told = (await ask(path, "/v1/mps")).json
    one, other = told["daemons"]
    assert (one["name"], one["up"], one["default_threads_ratio"]) == ("g", True, 0.5)
    assert one["clients"][0]["next_ratio"] == 0.3
    assert (other["up"], other["why"]) == (False, "no MPS control daemon runs in /x")
