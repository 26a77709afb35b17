"""CUDA MPS on a simulated card: what the daemon answers, and that no command changes a running client."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Gone
from gpuagent.model.inventory import GpuProcess
from gpuagent.sense.tenancy import mps_servers
from gpuagent.sim import profiles, scenario
from gpuagent.sim.host import MPS_CONTROL_PID, SimHost
from gpuagent.sim.latency import SimLatency
from gpuagent.sim.mps import Environment, SimMps

GIB = 2**30
NEIGHBOURS = scenario.named("mps-neighbours")
PERCENTAGES = st.one_of(st.floats(-5, 120), st.sampled_from([0.0, 100.0, 101.0, float("nan")]))


def daemon(*cards: int) -> SimMps:
    ended: list[int] = []
    return SimMps(profiles.mps(), cards or (0,), start_server=lambda: 77, end_work=ended.append)


def test_a_daemon_answers_as_the_classic_one_does() -> None:
    mps = daemon(0, 3)
    assert mps.get_server_list() == ()
    assert mps.get_default_active_thread_percentage() == 100.0
    assert mps.set_default_active_thread_percentage(50.0) == 50.0
    for refused in (0.0, 101.0, -1.0, float("nan")):
        assert mps.set_default_active_thread_percentage(refused) == 50.0
    assert mps.get_default_device_pinned_mem_limit(0) is None
    mps.set_default_device_pinned_mem_limit(0, 2 * GIB + 17)
    mps.set_default_device_pinned_mem_limit(2, GIB)
    assert [mps.get_default_device_pinned_mem_limit(i) for i in (0, 1, 2)] == [2 * GIB, None, None]
    for ask in (
        mps.get_client_list,
        mps.get_active_thread_percentage,
        lambda pid: mps.set_active_thread_percentage(pid, 10.0),
        lambda pid: mps.set_device_pinned_mem_limit(pid, 0, GIB),
        lambda pid: mps.get_device_pinned_mem_limit(pid, 0),
        lambda pid: mps.terminate_client(pid, 5),
    ):
        with pytest.raises(Gone, match="Server 1 not found"):
            ask(1)


def test_a_default_is_for_the_next_server_and_a_servers_value_for_its_next_client() -> None:
    mps = daemon()
    mps.set_default_active_thread_percentage(80.0)
    first = mps.connect(1, 0, Environment())
    mps.set_default_active_thread_percentage(30.0)
    second = mps.connect(2, 0, Environment())
    assert mps.set_active_thread_percentage(77, 20.0) == 20.0
    third = mps.connect(3, 0, Environment())
    assert [c.percentage for c in (first, second, third) if c] == [80.0, 80.0, 20.0]
    assert [c.percentage for c in mps.clients.values()] == [80.0, 80.0, 20.0]
    assert mps.get_client_list(77) == (1, 2, 3)
    with pytest.raises(Gone, match="Client 9 not found"):
        mps.terminate_client(77, 9)


@given(PERCENTAGES, PERCENTAGES, st.one_of(st.none(), st.floats(1, 100)), st.integers(0, 2**40))
def test_an_environment_can_only_tighten_what_the_server_allows(
    default: float, later: float, own: float | None, limit: int
) -> None:
    mps = daemon()
    mps.set_default_active_thread_percentage(default)
    mps.set_default_device_pinned_mem_limit(0, limit)
    for pid, environment in enumerate((Environment(own, GIB), Environment())):
        allowed = mps.get_default_active_thread_percentage()
        if mps.get_server_list():
            allowed = mps.get_active_thread_percentage(77)
        client = mps.connect(pid, 0, environment)
        assert client is not None
        assert 0 < client.percentage <= min(allowed, environment.percentage or 100.0)
        assert client.memory_limit_bytes is not None
        assert client.memory_limit_bytes <= limit
        mps.set_active_thread_percentage(77, later)
        assert 0 < mps.get_active_thread_percentage(77) <= 100


def test_a_card_has_so_many_contexts_and_another_card_its_own() -> None:
    mps = daemon(0, 1)
    for pid in range(48):
        assert mps.connect(pid, 0, Environment()) is not None
    assert mps.connect(48, 0, Environment()) is None
    assert mps.connect(49, 1, Environment()) is not None
    mps.leave(7)
    assert mps.connect(50, 0, Environment()) is not None
    assert len(mps.clients) == 49


# -- on a host ------------------------------------------------------------------------------------------


def host(seconds: float, seed: int = 1, **changes: object) -> SimHost:
    made = SimHost(msgspec.structs.replace(NEIGHBOURS, **changes), seed=seed)
    made.advance(seconds)
    return made


def held(here: SimHost, tenant: str, **limits: object) -> SimHost:
    """The same scenario with limits in a tenant's environment."""
    tenants = tuple(
        msgspec.structs.replace(t, **limits) if t.name == tenant else t
        for t in here.scenario.tenants
    )
    return host(0.0, tenants=tenants)


def p99(here: SimHost, seconds: float) -> float:
    read = SimLatency(here).read("chat", 0.99, seconds, here.clock.mono)
    assert read is not None
    return read


def percentages(here: SimHost) -> list[float]:
    return [client.percentage for client in here.mps_daemons[0].clients.values()]


def rate(here: SimHost, tenant: str, seconds: float) -> float:
    before = here.progress(tenant).iterations
    here.advance(seconds)
    return (here.progress(tenant).iterations - before) / seconds


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_scenario_a_percentage_waits_for_a_restart_and_a_fault_for_nobody(seed: int) -> None:
    here = host(190.0, seed)
    objective = next(t.objective for t in NEIGHBOURS.tenants if t.objective)
    assert p99(here, 150.0) > objective.seconds
    here.advance(205.0)
    assert (
        here.mps_daemons[0].get_active_thread_percentage(here.mps_daemons[0].get_server_list()[0])
        == 40.0
    )
    assert percentages(here) == [100.0, 100.0, 100.0]
    assert p99(here, 190.0) > objective.seconds
    here.advance(235.0)
    assert percentages(here) == [100.0, 100.0, 40.0]
    assert p99(here, 220.0) < 0.75 * objective.seconds
    here.advance(22.0)
    ended = [(tenant, why) for _, tenant, why in here.ended]
    assert ended == [
        ("training", "stopped"),
        ("training", "XID 31"),
        ("chat", "XID 31 of training, through MPS"),
        ("batch", "XID 31 of training, through MPS"),
    ]
    assert here.progress("chat").running, "it has been started again"
    here.advance(60.0)
    assert percentages(here) == [100.0, 100.0]


def test_a_fault_reaches_the_clients_of_one_card_only() -> None:
    made = msgspec.structs.replace(
        NEIGHBOURS,
        cards=NEIGHBOURS.cards * 2,
        mps=(scenario.MpsSpec(cards=(1, 0)),),
        tenants=(
            *NEIGHBOURS.tenants,
            scenario.TenantSpec(name="far", run="llm-decode", card=1),
        ),
    )
    here = SimHost(made, seed=1)
    here.advance(641.0)
    assert [t.name for t in made.tenants if here.progress(t.name).running] == ["far"]
    far = next(iter(here.mps_daemons[0].clients.values()))
    assert (list(here.cards[1].jobs), far.ordinal) == ([far.pid], 0)


def test_what_the_driver_says_of_clients_and_whose_the_server_is() -> None:
    here = host(120.0)
    listed = {p.pid: p for p in here.gpus.drain().gpu_processes or ()}
    clients = here.mps_daemons[0].clients
    server = here.mps_daemons[0].get_server_list()[0]
    assert listed.keys() == {server, *clients}
    for pid in clients:
        assert (listed[pid].kind, listed[pid].utilization_ratio) == ("mps", None)
        assert listed[pid].memory_bytes == int(here.cards[0].memory[pid])
    busy = listed[server].utilization_ratio
    assert busy is not None
    assert 0.9 < busy <= 1
    assert listed[server] == GpuProcess(
        server, here.cards[0].uuid, "compute", 30 * 2**20, utilization_ratio=busy
    )
    assert mps_servers(here.processes.table()) == {server, MPS_CONTROL_PID}


def test_a_ceiling_makes_training_slower_in_proportion_and_its_neighbour_faster() -> None:
    alone = tuple(t for t in NEIGHBOURS.tenants if t.name == "training")
    made = msgspec.structs.replace(NEIGHBOURS, tenants=alone, timeline=())
    speed = {}
    for percentage in (100.0, 50.0, 25.0):
        here = SimHost(
            msgspec.structs.replace(
                made, mps=(scenario.MpsSpec(cards=(0,), percentage=percentage),)
            ),
            seed=1,
        )
        here.advance(40.0)
        speed[percentage] = rate(here, "training", 100.0)
    assert speed[50.0] / speed[100.0] == pytest.approx(0.55, abs=0.07)
    assert speed[25.0] / speed[50.0] == pytest.approx(0.52, abs=0.07)
    tight = held(host(0.0), "training", thread_percentage=25.0)
    tight.advance(190.0)
    assert p99(tight, 150.0) < 0.6 * p99(host(190.0), 150.0)


def test_neighbours_that_fit_hardly_feel_each_other_unlike_under_time_slices() -> None:
    tenants = (
        scenario.TenantSpec(name="one", run="llm-decode", thread_percentage=50.0),
        scenario.TenantSpec(name="two", run="llm-decode", thread_percentage=50.0),
    )
    tokens = {}
    for mps in ((scenario.MpsSpec(cards=(0,), set={"interference_ratio": 0.1}),), ()):
        for some in (tenants[:1], tenants):
            here = host(60.0, mps=mps, tenants=some, timeline=())
            tokens[bool(mps), len(some)] = here.progress("one").tokens
    assert tokens[True, 2] > 0.9 * tokens[True, 1]
    assert tokens[False, 2] < 0.6 * tokens[False, 1]


def test_a_client_is_refused_memory_over_its_own_limit_on_a_card_with_room() -> None:
    here = held(host(0.0), "training", memory_limit_bytes=6 * GIB)
    here.advance(60.0)
    assert here.progress("training").refused_allocations == 1
    assert ("training", "CUDA out of memory") in [(t, why) for _, t, why in here.ended]
    assert here.cards[0].used_bytes < 0.5 * here.cards[0].memory_bytes
    tiny = held(host(0.0), "training", memory_limit_bytes=2**20)
    tiny.advance(60.0)
    assert not tiny.progress("training").running
    assert sum(tiny.cards[0].memory.values()) < 17 * GIB


def test_a_limit_set_on_the_timeline_is_for_later_clients() -> None:
    what = scenario.Mps(at=60.0, memory_limit_bytes=6 * GIB)
    again = scenario.Restart(at=90.0, tenant="training")
    here = host(80.0, timeline=(what, again))
    assert here.progress("training").running
    server = here.mps_daemons[0].get_server_list()[0]
    assert here.mps_daemons[0].get_device_pinned_mem_limit(server, 0) == 6 * GIB
    here.advance(60.0)
    assert not here.progress("training").running


def test_the_49th_client_of_a_card_finds_no_place() -> None:
    tenants = tuple(
        scenario.TenantSpec(
            name=f"hold-{i}", run="holder", set={"memory_bytes": 0.0, "host_memory_bytes": 0.0}
        )
        for i in range(49)
    )
    here = host(2.0, tenants=tenants, timeline=())
    assert [(t, why[:14]) for _, t, why in here.ended] == [("hold-48", "CUDA error 808")]
    assert len(here.mps_daemons[0].clients) == len(here.cards[0].jobs) == 48


def test_a_client_that_mps_ends_frees_the_card_and_its_process_lives_on() -> None:
    here = host(100.0)
    mps, card = here.mps_daemons[0], here.cards[0]
    server = mps.get_server_list()[0]
    pid = mps.get_client_list(server)[-1]
    used, requests = card.used_bytes, here.progress("chat").requests
    mps.terminate_client(server, pid)
    assert pid not in mps.get_client_list(server)
    assert card.used_bytes < used - 12 * GIB
    done = here.progress("training").iterations
    here.advance(60.0)
    assert here.progress("training") == msgspec.structs.replace(
        here.progress("training"), running=True, iterations=done
    )
    assert here.processes.read(pid).cgroup == here.cgroup("training")
    assert here.cgroups.make(here.cgroup("training")).given == 0
    assert here.progress("chat").requests > requests + 2000
    here.stop("training")
    here.start("training")
    here.advance(60.0)
    assert here.progress("training").iterations > done


def test_one_client_that_is_frozen_stalls_the_others_until_it_is_thawed() -> None:
    here = host(100.0)
    path = here.cgroup("training")

    def freeze(text: str) -> None:
        here.cgroups.write(path, here.cgroups.inode(path), "cgroup.freeze", text)

    freeze("1")
    here.advance(1.0)
    served = here.progress("chat").requests
    here.advance(10.0)
    assert here.progress("chat").requests <= served + 1
    assert here.cards[0].watts == pytest.approx(here.cards[0].profile.idle_watts.value, abs=2)
    freeze("0")
    here.advance(30.0)
    assert here.progress("chat").requests > served + 1000
    assert max(seconds for _, seconds in here.latencies("chat", 0.0)) > 10


def test_of_clients_that_come_and_go_nothing_is_left() -> None:
    here = host(400.5)
    for tenant in ("chat", "batch", "training"):
        here.stop(tenant)
    card, server = here.cards[0], here.mps_daemons[0].get_server_list()[0]
    assert [*card.memory, *card.used_seconds] == [server, server]
    assert not card.jobs
    assert card.side_by_side is not None
    assert not card.side_by_side.places
    assert not here.mps_daemons[0].clients
