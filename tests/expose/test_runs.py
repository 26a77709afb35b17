"""The routes of runs: who is believed to ask for what, what each sees, and the environment of a run."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from gpuagent.expose import runs
from gpuagent.expose.access import Access
from gpuagent.expose.auth import Caller, Credentials, Origin, Peer
from gpuagent.expose.intake import RUNS_AT_ONCE, USERS_MOST, Knocks
from gpuagent.expose.problems import Trouble
from gpuagent.expose.routes import Ask
from gpuagent.expose.views import ListenerView, Page, RefusalView, RunView, StartedView
from gpuagent.model.inventory import Level, MpsDaemon
from gpuagent.model.plan import Snapshot, StartRun
from gpuagent.model.run import Refusal, Reservation, RunList
from gpuagent.model.state import NodeState
from tests.expose import snapshots
from tests.expose.scene import Commands, Scene, ask, serving


def peer(uid: int = 1000, **fields: Any) -> Peer:
    caller = Caller(Credentials(50, uid, frozenset({uid})), Origin(5, "/user.slice", False))
    return Peer(**{"label": f"user {uid}", "caller": caller, **fields})


ADMIN = peer(0, label="root", admin=True)


def made(name: str = "job", uid: int = 1000, **fields: Any) -> Reservation:
    return Reservation(
        **{
            "name": name,
            "level": Level.L3,
            "pid": 50,
            "started": 5,
            "uid": uid,
            "by": f"user {uid}",
            "gpus": (snapshots.GPU0,),
            "memory_bytes": 8 << 30,
            "began_wall": 7.0,
            **fields,
        }
    )


def no(uid: int, number: int) -> Refusal:
    return Refusal(
        kind="refused", why="too much", uid=uid, number=number, numbers=(("free_bytes", 1.0),)
    )


def scene(*active: Reservation, refused: tuple[Refusal, ...] = ()) -> Scene:
    shown = msgspec.structs.replace(snapshots.busy(), runs=RunList(active, refused))
    return Scene(shown)


def listed(told: Scene, who: Peer) -> list[str]:
    page = runs._runs(told, Ask(who))
    assert isinstance(page, Page)
    return [r.name for r in page.items if isinstance(r, RunView)]


def refusals(told: Scene, who: Peer) -> list[str]:
    page = runs._refusals(told, Ask(who))
    assert isinstance(page, Page)
    return [r.id for r in page.items if isinstance(r, RefusalView)]


def test_each_sees_his_own_and_who_sees_all_sees_all() -> None:
    told = scene(
        made("a"), made("b", 1001, pid=51), refused=(no(1000, 1), no(1001, 2), no(1000, 3))
    )
    run = snapshots.busy().run
    assert listed(told, peer()) == ["a"]
    assert listed(told, ADMIN) == ["a", "b"]
    assert listed(told, Peer(label="token", reads=True)) == ["a", "b"]
    assert refusals(told, peer()) == [f"{run}-3", f"{run}-1"]
    assert refusals(told, ADMIN) == [f"{run}-3", f"{run}-2", f"{run}-1"]
    for other in (
        Peer(label="token metrics", scrapes=True),
        peer(1000, why="your process runs in a container"),
        peer(0, why="your process belongs to a tenant"),
    ):
        assert listed(told, other) == []
        assert refusals(told, other) == []


BODY = runs.RunBody(sla="L2", gpu_memory_bytes=1 << 30, gpus=("0",), name="x")


async def start(told: Scene, who: Peer, commands: Commands, body: Any = BODY) -> StartedView:
    commands.carry_out = told.admit
    started = await runs._start(told, Ask(who, body=body), commands.submit)
    assert isinstance(started, StartedView)
    return started


async def test_who_asks_is_who_the_kernel_says() -> None:
    told, commands = scene(), Commands()
    started = await start(told, peer(), commands)
    assert started.run.name == "x"
    (command,) = commands.seen
    assert isinstance(command, StartRun)
    asked = command.ask
    assert (asked.pid, asked.started, asked.uid, asked.gids) == (50, 5, 1000, frozenset({1000}))
    assert (asked.level, asked.memory_bytes, asked.gpus) == (Level.L2, 1 << 30, ("0",))
    assert asked.admin is False


@pytest.mark.parametrize(
    "who",
    [
        Peer(label="token admin", admin=True),
        peer(0, why="your process belongs to a tenant"),
        peer(0, why="your process runs in a container"),
        peer(caller=Caller(Credentials(50, 1000), None)),
    ],
)
async def test_who_is_not_known_or_is_in_a_tenant_starts_nothing(who: Peer) -> None:
    commands = Commands()
    with pytest.raises(Trouble, match="may not start a tenant") as refusal:
        await start(scene(), who, commands)
    assert refusal.value.status == 403
    assert commands.seen == []


async def test_a_run_that_the_picture_does_not_have_is_not_told_of() -> None:
    told = scene(made(pid=51))
    with pytest.raises(Trouble, match="has not taken it up"):
        await runs._start(told, Ask(peer(), body=BODY), Commands().submit)


async def test_one_user_asks_so_often_and_administrators_as_often_as_they_like() -> None:
    told, commands = scene(), Commands()
    for _ in range(RUNS_AT_ONCE):
        await start(told, peer(), commands)
    with pytest.raises(Trouble) as refusal:
        await start(told, peer(), commands)
    assert (refusal.value.status, refusal.value.retry_after) == (429, 1)
    await start(told, peer(1001), commands)
    for _ in range(20):
        await start(told, ADMIN, commands)


def test_users_without_number_are_not_remembered() -> None:
    knocks = Knocks()
    for uid in range(3 * USERS_MOST):
        knocks.admit(uid, 0.0)
    assert len(knocks._of) <= USERS_MOST


def _with_mps(shown: Snapshot | None, daemons: tuple[MpsDaemon, ...]) -> Snapshot:
    assert shown is not None
    known = msgspec.structs.replace(shown.state.inventory, mps=daemons)
    return msgspec.structs.replace(shown, state=NodeState(shown.state.now, inventory=known))


async def test_its_environment_has_each_name_once_and_its_own_cards() -> None:
    told = scene()
    told.access_now = Access(listeners=(ListenerView("unix", "/run/x.sock", True, ""),))
    daemons = (
        MpsDaemon("down", up=False, pipe_directory="/down", gpus=("GPU-0*",)),
        MpsDaemon("other", up=True, pipe_directory="/other", gpus=(snapshots.GPU1,)),
        MpsDaemon("any", up=True, pipe_directory="/any"),
        MpsDaemon("mine", up=True, pipe_directory="/mine", gpus=("GPU-0*",)),
    )
    told.snapshot = _with_mps(told.snapshot, daemons)
    body = msgspec.structs.replace(BODY, share_ratio=0.25, gpus=())
    started = await start(told, peer(), Commands(), body)
    names = [v.name for v in started.variables]
    assert len(names) == len(set(names))
    found = {v.name: v.value for v in started.variables}
    assert found["CUDA_VISIBLE_DEVICES"] == snapshots.GPU0
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/mine"
    assert found["GPUAGENT_SOCKET"] == "/run/x.sock"
    assert started.numa_nodes == ()


async def test_the_node_of_its_cards_is_told_where_all_are_known() -> None:
    told = scene()
    assert told.snapshot is not None
    cards = told.snapshot.state.inventory.gpus or ()
    placed = [msgspec.structs.replace(g, numa_node=i) for i, g in enumerate(cards)]
    for node, expected in ((0, (0,)), (None, ())):
        placed[0] = msgspec.structs.replace(placed[0], numa_node=node)
        inventory = msgspec.structs.replace(told.snapshot.state.inventory, gpus=tuple(placed))
        told.snapshot.state.inventory = inventory
        body = msgspec.structs.replace(BODY, gpus=())
        assert (await start(told, peer(), Commands(), body)).numa_nodes == expected


async def test_over_the_socket_the_process_that_connects_is_the_one() -> None:
    told, commands = scene(), Commands()
    commands.carry_out = told.admit
    async with serving(told, commands, listen="") as (_, path):
        body = json.dumps({"sla": "L3"}).encode()
        head = "Content-Type: application/json\r\n"
        reply = await ask(path, "/v1/runs", method="POST", headers=head, body=body)
        assert reply.status == 201, reply.body
        wrong = b'{"sla":"L3","pid":1}'
        assert (
            await ask(path, "/v1/runs", method="POST", headers=head, body=wrong)
        ).status == 422, "nobody names another process"
    (command,) = commands.seen
    assert isinstance(command, StartRun)
    loop_pid = await asyncio.to_thread(_own_pid)
    assert command.ask.pid == loop_pid


def _own_pid() -> int:
    with open("/proc/self/stat", encoding="ascii") as file:
        return int(file.read().split()[0])
