"""Each lever of the simulated host: what it does, to whom, and how soon (FACTS 2, 3 and 5)."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuagent.sim import scenario
from gpuagent.sim.host import STEP_SECONDS, SimHost
from tests.sim.test_host import digest

TENANTS = ("service", "eager", "graphs", "decode")
RUNS = ("chat", "bert-training", "graph-training", "llm-decode")


def made(only: dict[str, dict[str, Any]] | None = None, *, mps: bool = False) -> scenario.Scenario:
    """Four tenants on a card, or those of these names with other numbers."""
    tenants = tuple(
        scenario.TenantSpec(name=name, run=run, set=(only or {}).get(name, {}))
        for name, run in zip(TENANTS, RUNS, strict=True)
        if only is None or name in only
    )
    return scenario.Scenario(
        name="levers",
        about="One card.",
        seconds=600,
        cards=(scenario.CardSpec("a40"),),
        tenants=tenants,
        mps=(scenario.MpsSpec(cards=(0,)),) if mps else (),
    )


def write(host: SimHost, tenant: str, file: str, text: str) -> None:
    path = host.cgroup(tenant)
    host.cgroups.write(path, host.cgroups.inode(path), file, text)


def usage(host: SimHost, tenant: str) -> int:
    said = host.cgroups.read(host.cgroup(tenant), "cpu.stat").split()
    return int(said[said.index("usage_usec") + 1])


def kernels(host: SimHost) -> float:
    """Seconds in which kernels have run on the card."""
    return sum(host.cards[0].used_seconds.values())


# -- freeze ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "graphs", "decode"])
def test_a_frozen_job_finishes_what_is_queued_and_keeps_its_memory(name: str) -> None:
    host = SimHost(made({name: {}}), seed=1)
    host.advance(60.0)
    queued = host.scenario.work(host.scenario.tenants[0]).queued_seconds  # type: ignore[union-attr]  # no holder
    used, cpu, memory = kernels(host), usage(host, name), host.cards[0].used_bytes
    write(host, name, "cgroup.freeze", "1")
    host.advance(5.0)
    after = kernels(host) - used
    assert after <= queued + 1e-9
    assert name != "graphs" or after > 0, "it was far ahead of the card"
    assert usage(host, name) == cpu
    done = host.progress(name)
    host.advance(60.0)
    assert kernels(host) == used + after
    assert host.progress(name) == done
    assert host.cards[0].used_bytes == memory
    assert host.cards[0].watts == host.cards[0].profile.idle_watts.value
    assert host.cgroups.read(host.cgroup(name), "cgroup.events") == "populated 1\nfrozen 1"
    write(host, name, "cgroup.freeze", "0")
    host.advance(10.0)
    assert kernels(host) > used + after + 5
    assert usage(host, name) > cpu


def test_a_job_that_waits_for_its_own_launches_has_nothing_queued() -> None:
    host = SimHost(made({"eager": {"launch": 1.0, "evaluate_every": 10**6}}), seed=1)
    host.advance(60.0)
    write(host, "eager", "cpu.max", "60000 100000")
    host.advance(5.0)
    used = kernels(host)
    write(host, "eager", "cgroup.freeze", "1")
    host.advance(5.0)
    assert kernels(host) == used


def test_requests_wait_for_a_frozen_service_and_are_answered_when_it_thaws() -> None:
    host = SimHost(made({"service": {"rate": 20.0}}), seed=1)
    host.advance(60.0)
    before = host.progress("service").requests
    write(host, "service", "cgroup.freeze", "1")
    host.advance(10.0)
    assert host.progress("service").requests == before
    write(host, "service", "cgroup.freeze", "0")
    thawed = host.clock.mono
    host.advance(15.0)
    waited = [seconds for at, seconds in host.latencies("service", thawed) if seconds > 0.5]
    assert host.progress("service").requests - before == pytest.approx(500, rel=0.15)
    assert len(waited) == pytest.approx(200, rel=0.3)
    assert 9.0 < max(waited) < 12.0


def test_freezing_a_neighbour_relieves_the_service_within_a_second() -> None:
    host = SimHost(made({"service": {"rate": 40.0}, "eager": {}}), seed=1)
    host.advance(60.0)

    def mean(since: float) -> float:
        seen = [seconds for _, seconds in host.latencies("service", since)]
        return sum(seen) / len(seen)

    beside = mean(host.clock.mono - 30.0)
    write(host, "eager", "cgroup.freeze", "1")
    host.advance(1.0)
    frozen = host.clock.mono
    host.advance(30.0)
    assert mean(frozen) < 0.6 * beside


def test_the_parents_freeze_reaches_the_job_and_so_does_one_that_was_there_before_it() -> None:
    host = SimHost(made({"eager": {}}), seed=1)
    host.advance(30.0)
    inode = host.cgroups.inode("/system.slice")
    host.cgroups.write("/system.slice", inode, "cgroup.freeze", "1")
    host.advance(1.0)
    done = host.progress("eager").iterations
    host.stop("eager")
    host.start("eager")
    host.advance(10.0)
    assert host.progress("eager").iterations == done
    host.cgroups.write("/system.slice", inode, "cgroup.freeze", "0")
    host.advance(30.0)
    assert host.progress("eager").iterations > done


# -- the others -----------------------------------------------------------------------------------------


def test_a_quota_acts_in_the_next_step_on_eager_work_and_hardly_on_graphs() -> None:
    kept = {}
    for name in ("eager", "graphs", "decode"):
        host = SimHost(made({name: {}}), seed=1)
        host.advance(40.0)
        before = kernels(host)
        host.advance(20.0)
        free = kernels(host) - before
        write(host, name, "cpu.max", "20000 100000")
        before = kernels(host)
        host.advance(STEP_SECONDS)
        first = (kernels(host) - before) / STEP_SECONDS
        host.advance(20.0 - STEP_SECONDS)
        kept[name] = (kernels(host) - before) / free
        assert first == pytest.approx(kept[name] * free / 20.0, rel=0.1), "at once, and for good"
    assert kept["eager"] < 0.2
    assert kept["graphs"] > 0.8
    assert kept["decode"] > 0.3


async def test_a_power_limit_acts_within_its_delay_and_lowers_clock_and_speed() -> None:
    delays = []
    for seed in range(12):
        host = SimHost(made({"eager": {"launch": 0.1}}), seed=seed)
        host.advance(30.0)
        await host.gpus.set_power_limit(host.cards[0].uuid, 150.0)
        assert await host.gpus.power_limit(host.cards[0].uuid) == 150.0, "it reads back at once"
        steps = 0
        while host.cards[0].enforced_watts != 150.0:
            host.advance(STEP_SECONDS)
            steps += 1
        delays.append(steps * STEP_SECONDS)
        host.advance(0.2)
        assert host.cards[0].clock < 0.95
        assert host.cards[0].watts <= 150.0 + 1e-6
    assert max(delays) <= 0.5 + 2 * STEP_SECONDS
    assert max(delays) - min(delays) >= 0.2


def test_a_thread_percentage_acts_at_the_next_launch_and_not_before() -> None:
    host = SimHost(made({"eager": {"launch": 0.1, "evaluate_every": 10**6}}, mps=True), seed=1)
    host.advance(40.0)
    pid = host.mps_daemons[0].get_server_list()[0]

    def done(seconds: float) -> int:
        before = host.progress("eager").iterations
        host.advance(seconds)
        return host.progress("eager").iterations - before

    free = done(60.0)
    host.mps_daemons[0].set_active_thread_percentage(pid, 30.0)
    assert done(60.0) == pytest.approx(free, abs=2)
    host.stop("eager")
    host.start("eager")
    host.advance(20.0)
    assert done(60.0) == pytest.approx(0.32 * free, abs=0.06 * free)


# -- whatever is done -----------------------------------------------------------------------------------

DEEDS = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.sampled_from(TENANTS),
        st.sampled_from(["freeze", "thaw", "quota", "restart", "stop", "percentage", "memory"]),
    ),
    max_size=8,
)
PIECES = st.lists(st.sampled_from([0.013, 0.05, 0.1, 0.33, 1.0]), min_size=1, max_size=4)


def do(host: SimHost, tenant: str, deed: str) -> None:
    running = host.progress(tenant).running
    match deed:
        case "freeze" | "thaw" if running:
            write(host, tenant, "cgroup.freeze", "1" if deed == "freeze" else "0")
        case "quota" if running:
            write(host, tenant, "cpu.max", "30000 100000")
        case "restart":
            host.stop(tenant)
            host.start(tenant)
        case "stop":
            host.stop(tenant)
        case "percentage" | "memory":
            for daemon in host.mps_daemons:
                for server in daemon.get_server_list():
                    if deed == "percentage":
                        daemon.set_active_thread_percentage(server, 35.0)
                    else:
                        daemon.set_device_pinned_mem_limit(server, 0, 10 * 2**30)


def lived(
    deeds: list[tuple[int, str, str]], pieces: list[float], *, mps: bool, look: bool
) -> SimHost:
    """A run in which each deed comes so many steps after the one before."""
    host = SimHost(made(mps=mps), seed=5)
    for steps, tenant, deed in deeds:
        until = host.elapsed + steps * STEP_SECONDS
        for i in range(10_000):
            piece = min(pieces[i % len(pieces)], until - host.elapsed)
            host.advance(piece)
            if look:
                check(host)
            if host.elapsed >= until - 1e-9:
                break
        do(host, tenant, deed)
    host.advance(2.0)
    return host


def check(host: SimHost) -> None:
    card = host.cards[0]
    clients = host.mps_daemons[0].clients if host.mps_daemons else {}
    servers = host.mps_daemons[0].get_server_list() if host.mps_daemons else ()
    assert card.used_bytes <= card.memory_bytes
    assert card.memory.keys() == card.jobs.keys() | set(servers)
    assert not host.mps_daemons or clients.keys() == card.jobs.keys()
    for pid, client in clients.items():
        assert client.percentage in {35.0, 100.0}
        assert client.memory_limit_bytes is None or card.memory[pid] <= client.memory_limit_bytes
    assert card.watts <= card.enforced_watts + 1e-6
    assert -1e-9 <= card.utilization.mean <= 1 + 1e-9


@pytest.mark.parametrize("mps", [False, True])
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(DEEDS, PIECES)
def test_the_same_deeds_are_the_same_run_in_whatever_pieces_time_passes(
    mps: bool, deeds: list[tuple[int, str, str]], pieces: list[float]
) -> None:
    one = lived(deeds, pieces, mps=mps, look=True)
    other = lived(deeds, [1e3], mps=mps, look=False)
    assert digest(one) == digest(other)
    for tenant in TENANTS:
        one.stop(tenant)
    left = [*one.mps_daemons[0].get_server_list()] if mps else []
    assert list(one.cards[0].memory) == left


def test_a_restart_on_the_timeline_is_a_new_process_in_a_new_group() -> None:
    base = made({"eager": {}})
    again = scenario.Restart(at=30.0, tenant="eager")
    host = SimHost(msgspec.structs.replace(base, timeline=(again,)), seed=1)
    host.advance(29.0)
    path = host.cgroup("eager")
    inode = host.cgroups.inode(path)
    pids = [p.pid for p in host.processes.table() if p.cgroup == path]
    write(host, "eager", "cgroup.freeze", "1")
    host.advance(30.0)
    assert host.cgroups.inode(path) != inode
    assert host.cgroups.read(path, "cgroup.freeze") == "0"
    assert [p.pid for p in host.processes.table() if p.cgroup == path] == [pids[0] + 1]
    assert [(tenant, why) for _, tenant, why in host.ended] == [("eager", "stopped")]
    assert host.progress("eager").running
