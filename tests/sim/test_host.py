"""The whole simulated host: the same seed is the same run, tenants come and go, levers act."""

import hashlib
import time

import msgspec
import pytest

from gpuagent.sim import scenario
from gpuagent.sim.host import SimHost
from gpuagent.sim.latency import SimLatency
from tests.sim.rig import without

CO_LOCATION = scenario.named("co-location")
CHAT = next(t for t in CO_LOCATION.tenants if t.name == "chat")


def digest(host: SimHost) -> str:
    """Everything that can be seen of a run."""
    seen = hashlib.sha256()
    for sensed in (host.gpus.drain(), host.node.read(), host.processes.table(), host.ended):
        seen.update(repr(sensed).encode())
    for tenant in host.scenario.tenants:
        seen.update(repr(host.progress(tenant.name)).encode())
        seen.update(repr(host.latencies(tenant.name, 0.0)).encode())
    return seen.hexdigest()


def run(name: str, seed: int, *advances: float) -> str:
    host = SimHost(scenario.named(name), seed=seed)
    for seconds in advances:
        host.advance(seconds)
    return digest(host)


@pytest.mark.parametrize("name", scenario.names())
def test_the_same_seed_is_the_same_run_bit_for_bit(name: str) -> None:
    assert run(name, 7, 120.0) == run(name, 7, 120.0)
    assert run(name, 7, 120.0) != run(name, 8, 120.0)


def test_it_does_not_matter_in_what_pieces_time_passes() -> None:
    pieces = [0.013, 0.05, 1.0, 0.987] * 20
    assert run("co-location", 3, *pieces) == run("co-location", 3, sum(pieces))


def held(host: SimHost, tenant: str, file: str, text: str) -> None:
    path = host.cgroup(tenant)
    host.cgroups.write(path, host.cgroups.inode(path), file, text)


def p99(host: SimHost, seconds: float = 300.0) -> float:
    read = SimLatency(host).read("chat", 0.99, seconds, host.clock.mono)
    assert read is not None
    return read


def co_located(seed: int, *, cpu_max: str = "", training: bool = True) -> SimHost:
    made = CO_LOCATION if training else without(CO_LOCATION, "training")
    host = SimHost(made, seed=seed)
    host.advance(60.0)
    if cpu_max:
        held(host, "training", "cpu.max", cpu_max)
    host.advance(310.0)
    return host


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_service_suffers_from_its_neighbour_until_cpu_max_holds_that_back(seed: int) -> None:
    assert CHAT.objective is not None
    objective = CHAT.objective.seconds
    assert p99(co_located(seed, training=False)) < 0.75 * objective
    beside = p99(co_located(seed))
    assert beside > 1.2 * objective
    relieved = co_located(seed, cpu_max="12000 20000")
    assert p99(relieved) < min(objective, 0.8 * beside)
    assert relieved.progress("training").iterations > 100


def test_a_neighbour_of_graphs_is_hardly_slowed_and_relieves_nobody() -> None:
    changed = scenario.named("co-location").tenants[2]
    made = without(CO_LOCATION, "training", instead=(changed, "graph-training"))
    seen = {}
    for quota in ("max", "6000 20000"):
        host = SimHost(made, seed=1)
        host.advance(60.0)
        held(host, "training", "cpu.max", quota)
        host.advance(310.0)
        seen[quota] = (p99(host), host.progress("training").iterations)
    assert seen["6000 20000"][0] > 0.8 * seen["max"][0]
    assert seen["6000 20000"][1] > 0.85 * seen["max"][1]


def test_a_weight_helps_the_service_while_cpus_are_short_and_only_then() -> None:
    slow = {}
    for cpus in (3, 16):
        for weight in ("100", "1"):
            host = SimHost(without(CO_LOCATION, "", cpus=cpus), seed=1)
            host.advance(60.0)
            held(host, "training", "cpu.weight", weight)
            held(host, "batch", "cpu.weight", weight)
            host.advance(310.0)
            slow[cpus, weight] = p99(host)
            pressure = host.node.read().cpu_pressure_ratio
            assert pressure is not None
            assert (pressure > 0.05) == (cpus == 3)
    assert slow[3, "1"] < 0.97 * slow[3, "100"]
    assert slow[16, "1"] == slow[16, "100"]


def test_a_scenario_may_change_what_its_cards_are_made_of() -> None:
    cards = (scenario.CardSpec("a40", set={"limit_delay_max_seconds": 0.02}),)
    host = SimHost(msgspec.structs.replace(CO_LOCATION, cards=cards), seed=1)
    host.cards[0].limit(200.0, 0.0)
    host.cards[0].step(0.05, {})
    assert host.cards[0].enforced_watts == 200.0


def test_tenants_come_and_go_with_their_groups_and_processes() -> None:
    host = SimHost(CO_LOCATION, seed=1)
    host.advance(61.0)
    path, first = host.cgroup("training"), host.cgroups.inode(host.cgroup("training"))
    assert path in {p.cgroup for p in host.processes.table()}
    done = host.progress("training").iterations
    host.events.watch([p.pid for p in host.processes.table()], lambda _: True)
    host.stop("training")
    assert path not in {p.cgroup for p in host.processes.table()}
    assert host.progress("training").iterations == done > 0
    host.start("training")
    host.advance(30.0)
    assert host.cgroups.inode(path) != first
    assert host.progress("training").iterations > done
    assert [what for _, what in host.events.take()] == ["exit", "exec"]
    requests = host.progress("chat").requests
    host.stop("chat")
    assert len(host.latencies("chat", 0.0)) == requests == host.progress("chat").requests


def test_a_card_that_is_full_refuses_and_the_refused_says_so() -> None:
    host = SimHost(scenario.named("memory-growth"), seed=1)
    host.advance(600.0)
    card = host.cards[0]
    assert card.used_bytes <= card.memory_bytes
    assert card.used_bytes > 0.99 * card.memory_bytes
    assert host.progress("cache").refused_allocations > 0
    host.stop("chat")
    host.start("chat")
    host.advance(300.0)
    assert host.progress("chat").running, "there was room once the cache had been stopped"


def test_a_changed_load_stays_changed_for_the_next_life() -> None:
    host = SimHost(scenario.named("quiet-night"), seed=1)
    host.advance(300.0)
    before = host.progress("chat").requests
    assert before == pytest.approx(600, rel=0.15)
    host.advance(100.0)
    host.stop("chat")
    host.start("chat")
    host.advance(500.0)
    assert host.progress("chat").requests - before == pytest.approx(300, rel=0.25)


def test_too_few_requests_have_no_quantile() -> None:
    host = SimHost(CO_LOCATION, seed=1)
    latency = SimLatency(host)
    assert latency.read("chat", 0.99, 10.0, host.clock.mono) is None
    host.advance(20.0)
    now = host.clock.mono
    assert latency.read("chat", 0.99, 1.0, now) is None
    median, worst = (latency.read("chat", q, 10.0, now) for q in (0.5, 0.99))
    assert median is not None
    assert worst is not None
    assert 0 < median < worst
    assert latency.read("training", 0.5, 100.0, now) is None


def test_twenty_minutes_of_eight_tenants_on_two_cards_is_quick_and_bounded() -> None:
    host = SimHost(eight_tenants(), seed=1)
    began = time.process_time()
    for _ in range(20):
        host.advance(60.0)
        host.gpus.drain()
    assert time.process_time() - began < 20
    assert host.progress("chat").requests > 25_000
    for card in host.cards:
        assert card.used_bytes <= card.memory_bytes


def eight_tenants() -> scenario.Scenario:
    runs = (
        ("chat", "chat"),
        ("batch", "batch-inference"),
        ("train", "bert-training"),
        ("note", "notebook"),
        ("decode", "llm-decode"),
        ("vision", "resnet-training"),
        ("hold", "holder"),
        ("cache", "grower"),
    )
    return scenario.Scenario(
        name="eight",
        about="Eight tenants on two cards.",
        seconds=3600,
        cards=(scenario.CardSpec("a40"), scenario.CardSpec("a40")),
        tenants=tuple(
            scenario.TenantSpec(name=name, run=run, card=i // 4)
            for i, (name, run) in enumerate(runs)
        ),
    )
