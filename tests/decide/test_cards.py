"""Policy `cards`: what [[cards]] declares is wished, unless it would keep somebody from starting."""

from typing import Any

import msgspec

from gpuagent.config import Card, Config
from gpuagent.decide import POLICIES
from gpuagent.decide.cards import RULE, Cards
from gpuagent.model.inventory import GpuProcess, Process, Tenant, on_gpu
from gpuagent.model.plan import Setting
from gpuagent.model.vocab import COMPUTE_MODE, PERSISTENCE_MODE, TIME_SLICE
from tests.decide.world import GIB, World, gpu, tenant

ONE, TWO = "GPU-1", "GPU-2"


def world(*cards: Card, tenants: tuple[Tenant, ...] = ()) -> World:
    return World(Cards(Config(cards=cards)), gpus=(gpu(ONE, 0), gpu(TWO, 1)), tenants=tenants)


def with_process(name: str, pid: int) -> Tenant:
    process = Process(pid, 1, 1, 1000, "u", "python3", "/usr/bin/python3", "")
    return msgspec.structs.replace(tenant(name, gpus=(ONE,)), processes=(process,))


def present(*pids: int, kind: Any = "compute", card: str = ONE) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(pid, card, kind, GIB) for pid in pids)


def only(world: World) -> Setting:
    (setting,) = world.step().settings
    return setting


def test_it_is_one_of_the_policies() -> None:
    assert Cards in POLICIES


def test_nothing_declared_is_nothing_wished() -> None:
    decision = world().step()
    assert (decision.settings, decision.complete) == ((), True)


def test_what_is_declared_is_wished_for_the_cards_it_fits() -> None:
    w = world(
        Card(TWO, compute_mode="prohibited"),
        Card("*", persistence_mode=False, time_slice="long", compute_mode="default"),
    )
    told = {(s.knob, s.subject): s for s in w.step().settings}
    assert {key: s.value for key, s in told.items()} == {
        (COMPUTE_MODE, on_gpu(ONE)): 0,
        (PERSISTENCE_MODE, on_gpu(ONE)): 0,
        (TIME_SLICE, on_gpu(ONE)): 3,
        (COMPUTE_MODE, on_gpu(TWO)): 2,
    }
    assert all(s.blocked is None and s.rule == RULE for s in told.values())
    assert told[TIME_SLICE, on_gpu(ONE)].why == (
        "time slice long, as [[cards]] with gpu = '*' declares it"
    )


def test_while_the_cards_are_not_known_the_plan_is_not_complete() -> None:
    w = world(Card("*", persistence_mode=True))
    w.gpus = None  # type: ignore[assignment]
    decision = w.step()
    assert (decision.settings, decision.complete) == ((), False)


def test_exclusive_mode_is_not_tried_where_several_processes_share_the_card() -> None:
    w = world(
        Card("*", compute_mode="exclusive_process"),
        tenants=(with_process("a", 41), with_process("b", 42)),
    )
    w.listed = present(41, 42, 43)
    first, second = w.step().settings
    assert first.blocked is not None
    assert first.blocked.result == "refused"
    assert first.blocked.why == (
        "a, b and process 43 share GPU 0: but for one of these 3 processes, none could start again"
    )
    assert second.blocked is None
    w.listed = present(41)
    assert all(s.blocked is None for s in w.step().settings)


def test_two_processes_of_one_tenant_share_the_card_too() -> None:
    w = world(Card(ONE, compute_mode="exclusive_process"), tenants=(with_process("a", 41),))
    w.listed = present(41, 42)
    assert "a and process 42 share GPU 0" in str(only(w).blocked)


def test_clients_of_mps_are_one_process_to_the_driver() -> None:
    w = world(Card(ONE, compute_mode="exclusive_process"))
    w.listed = present(50) + present(51, 52, kind="mps")
    assert only(w).blocked is None
    w.listed = present(50, 60) + present(51, 52, kind="mps")
    assert "beside MPS" in str(only(w).blocked)


def test_graphics_are_none_of_its_business() -> None:
    w = world(Card(ONE, compute_mode="exclusive_process"))
    w.listed = present(7, 8, kind="graphics") + present(9)
    assert only(w).blocked is None


def test_prohibited_is_not_tried_on_a_card_in_use() -> None:
    w = world(Card(ONE, compute_mode="prohibited"), tenants=(with_process("a", 41),))
    w.listed = present(41)
    assert "a could not start again on GPU 0" in str(only(w).blocked)
    w.listed = present(41, card=TWO)
    assert only(w).blocked is None


def test_while_nobody_knows_who_is_there_no_mode_that_shuts_out_is_tried() -> None:
    w = world(Card(ONE, compute_mode="exclusive_process", time_slice="short"))
    w.listed = None
    mode, slice_ = w.step().settings
    assert "not known" in str(mode.blocked)
    assert slice_.blocked is None
