"""What a launcher is told to set: exact, with a reason each, and nothing that is not known."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.config import Config, Match, Paths, TenantRule
from gpuagent.configfile import describe
from gpuagent.expose.access import Access
from gpuagent.expose.auth import Peer
from gpuagent.expose.environment import (
    Promise,
    daemon_of,
    drop_in,
    held_threads,
    promise,
    variables,
)
from gpuagent.expose.problems import Trouble
from gpuagent.expose.views import ListenerView, VariableView
from gpuagent.model.inventory import Inventory, Level, Tenant, on_tenant
from gpuagent.model.state import NodeState, Outcome, Result
from gpuagent.model.vocab import MPS_THREADS
from tests.expose import snapshots
from tests.expose.scene import Scene, ask, serving
from tests.fakes.mps.values import daemon
from tests.sense.fakes import process

GIB = 1024**3
MIB = 1024**2
ADMIN = Peer(label="user 0", admin=True)
OWNER = Peer(label="user 1000", tenants=frozenset({"train"}))
LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def env(level: Level = Level.L3, limit: int | None = None, cards: int | None = 2) -> dict[str, str]:
    made = variables(Promise("train", level, limit, present=True), cards, "/run/g.sock")
    assert all(v.why and v.takes_effect for v in made)
    return {v.name: v.value for v in made}


def test_the_environment_of_a_best_effort_tenant() -> None:
    assert env(limit=8 * GIB) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
        LIMIT: "0=8G,1=8G",
        "GPUAGENT_TENANT": "train",
        "GPUAGENT_SOCKET": "/run/g.sock",
    }


def test_an_l1_tenant_goes_first() -> None:
    assert env(Level.L1)["CUDA_MPS_CLIENT_PRIORITY"] == "0"
    assert env(Level.L2)["CUDA_MPS_CLIENT_PRIORITY"] == "1"


@pytest.mark.parametrize(("limit", "cards"), [(None, 2), (8 * GIB, None), (8 * GIB, 0), (1000, 2)])
def test_what_is_not_known_or_cannot_be_said_is_left_out(
    limit: int | None, cards: int | None
) -> None:
    assert LIMIT not in env(limit=limit, cards=cards)


def test_a_socket_that_is_not_known_is_left_out() -> None:
    made = variables(Promise("train", Level.L3, None, present=True), 1, "")
    assert "GPUAGENT_SOCKET" not in {v.name for v in made}


def threads(share: float | None, held: float | None) -> tuple[str, str] | None:
    promised = Promise(
        "train", Level.L3, None, present=True, compute_share_ratio=share, threads_ratio=held
    )
    made = {v.name: v for v in variables(promised, 1, "")}
    found = made.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    return None if found is None else (found.value, found.why.partition(":")[0])


@pytest.mark.parametrize(
    ("share", "held", "told"),
    [
        (None, None, None),
        (0.4, None, ("40", "its compute_share")),
        (None, 0.333, ("33.3", "it is held back")),
        (0.4, 0.25, ("25", "it is held back")),
        (0.2, 0.25, ("20", "its compute_share")),
        (0.33333, None, ("33.3", "its compute_share")),
        (1.0, None, None),
        (1.0, 1.0, None),
        (0.0001, None, None),
    ],
)
def test_the_thread_percentage_is_the_smaller_of_what_is_declared_and_held(
    share: float | None, held: float | None, told: tuple[str, str] | None
) -> None:
    assert threads(share, held) == told


@given(share=st.floats(0.001, 1), held=st.none() | st.floats(0.001, 1))
def test_no_percentage_is_ever_looser(share: float, held: float | None) -> None:
    told = threads(share, held)
    least = share if held is None else min(share, held)
    assert (100.0 if told is None else float(told[0])) <= 100 * least + 0.1
    if told is not None:
        assert 0 < float(told[0]) <= 100 * least + 1e-6


# -- the MPS daemon of its cards -------------------------------------------------------------------------


def user(*gpus: str, pid: int = 20) -> Tenant:
    return Tenant("train", Level.L3, processes=(process(pid),), gpus=gpus)


def test_the_daemon_of_all_its_cards_is_told() -> None:
    one, both = daemon("one", gpus=("GPU-1",)), daemon("both", gpus=("GPU-*",))
    known = Inventory(mps=(one, both))
    assert daemon_of(known, user("GPU-1")) == one
    assert daemon_of(known, user("GPU-1", "GPU-2")) == both
    assert daemon_of(Inventory(mps=(one,)), user("GPU-1", "GPU-2")) is None
    assert daemon_of(known, user()) is None, "it has no card yet"
    assert daemon_of(Inventory(mps=(daemon("nowhere"),)), user("GPU-1")) is None
    assert daemon_of(Inventory(), user("GPU-1")) is None
    # Whose client it is already comes first; one that is down is none.
    there = daemon("there", clients={20: 7})
    assert daemon_of(Inventory(mps=(one, there)), user("GPU-1")) == there
    down = msgspec.structs.replace(one, up=False)
    assert daemon_of(Inventory(mps=(down,)), user("GPU-1")) is None
    made = variables(Promise("t", Level.L3, None, present=True, pipe_directory="/p"), 1, "")
    assert [v.value for v in made if v.name == "CUDA_MPS_PIPE_DIRECTORY"] == ["/p"]


@pytest.mark.parametrize(
    ("result", "real", "told"),
    [("pending", 0.5, 0.5), ("applied", 0.5, 0.5), ("would", 1.0, None), ("refused", 0.5, None)],
)
def test_only_what_is_in_force_is_told(result: Result, real: float, told: float | None) -> None:
    train = on_tenant("train")
    outcome = Outcome(MPS_THREADS, train, 0.5, real, 1.0, result, "", 0.0)
    snapshot = msgspec.structs.replace(snapshots.busy(), outcomes={(MPS_THREADS, train): outcome})
    assert held_threads(snapshot, "train") == told
    assert promise(snapshot, unasked, "train", ADMIN).threads_ratio == told
    assert held_threads(snapshot, "serve") is None


def test_a_drop_in_is_read_as_it_was_written() -> None:
    made = (
        VariableView("A", "1", "w", "t"),
        VariableView("B", 'x y"z\\%h', "w", "t"),
    )
    lines = drop_in("train", made).splitlines()
    assert lines[0].startswith("# What gpuagent tells of train now.")
    assert lines[1:] == ["[Service]", 'Environment="A=1"', 'Environment="B=x y\\"z\\\\%%h"']


@given(limit=st.integers(1, 1 << 45), cards=st.integers(1, 64))
def test_a_memory_limit_is_in_whole_units_for_each_card_and_never_more(
    limit: int, cards: int
) -> None:
    text = env(limit=limit, cards=cards).get(LIMIT)
    if text is None:
        assert limit < MIB
        return
    parts = text.split(",")
    assert len(parts) == min(cards, 32)
    for ordinal, part in enumerate(parts):
        found = re.fullmatch(r"(\d+)=(\d+)([GM])", part)
        assert found is not None
        size = int(found[2]) * (GIB if found[3] == "G" else MIB)
        assert int(found[1]) == ordinal
        assert limit - MIB < size <= limit


# -- whose ---------------------------------------------------------------------------------------------

RULES = (
    TenantRule("train", Level.L2, Match(unit="x"), memory_limit=5 * GIB),
    TenantRule("later", Level.L1, Match(unit="y"), memory_limit=1536 * MIB),
    TenantRule("free", Level.L3, Match(unit="z")),
)
SETTINGS = describe(Config(tenants=RULES, paths=Paths(socket="/run/g.sock")))


def told() -> dict[str, object]:
    return SETTINGS


def unasked() -> dict[str, object]:
    raise AssertionError("the configuration is not needed for this")


def test_what_runs_counts_before_what_is_declared() -> None:
    found = promise(snapshots.busy(), told, "train", ADMIN)
    assert found == Promise("train", Level.L3, 8 * GIB, present=True)


def test_what_is_only_declared_is_told_from_its_rule() -> None:
    found = promise(snapshots.busy(), told, "later", ADMIN)
    assert found == Promise("later", Level.L1, 1536 * MIB, present=False)
    assert promise(snapshots.busy(), told, "free", ADMIN).memory_limit_bytes is None


@pytest.mark.parametrize("settings", [{}, {"tenants": None}, {"tenants": [{}]}, SETTINGS])
def test_who_is_neither_is_not_there(settings: dict[str, object]) -> None:
    with pytest.raises(Trouble) as refused:
        promise(snapshots.busy(), lambda: settings, "nobody", ADMIN)
    assert refused.value.status == 404


@pytest.mark.parametrize("name", ["serve", "later", "nobody"])
def test_who_may_not_see_it_does_not_learn_whether_it_exists(name: str) -> None:
    with pytest.raises(Trouble) as refused:
        promise(snapshots.busy(), unasked, name, OWNER)
    assert refused.value.status == 403
    assert name not in refused.value.detail
    assert promise(snapshots.busy(), unasked, "train", OWNER).present


async def test_over_the_socket() -> None:
    scene = Scene(snapshots.busy())
    scene.settings_now = SETTINGS
    scene.access_now = Access((ListenerView("unix", "/run/now.sock", up=True, why=""),))
    async with serving(scene) as (_, path):
        one = (await ask(path, "/v1/tenants/train/environment")).json
        absent = (await ask(path, "/v1/tenants/later/environment")).json
        nobody = await ask(path, "/v1/tenants/nobody/environment")
    told = {v["name"]: v for v in one["variables"]}
    assert told[LIMIT]["value"] == "0=8G,1=8G"
    where = told["GPUAGENT_SOCKET"]["value"]
    assert where == "/run/now.sock", "the one in force, not one after a restart"
    assert "MPS server" in told["CUDA_MPS_CLIENT_PRIORITY"]["takes_effect"]
    assert (one["present"], absent["present"]) == (True, False)
    assert nobody.status == 404


async def test_of_a_host_that_cannot_be_read_what_is_known_is_told() -> None:
    snapshot = snapshots.busy()
    blind = NodeState(
        snapshot.state.now, inventory=Inventory(tenants=snapshot.state.inventory.tenants)
    )
    scene = Scene(msgspec.structs.replace(snapshot, state=blind))
    async with serving(scene) as (_, path):
        told = (await ask(path, "/v1/tenants/train/environment")).json
    assert [v["name"] for v in told["variables"]] == [
        "CUDA_DEVICE_ORDER",
        "CUDA_MPS_CLIENT_PRIORITY",
        "GPUAGENT_TENANT",
    ]
