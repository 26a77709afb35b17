"""Freezing in pulses and ending processes on the simulated host."""

import itertools
import signal

import pytest

from gpuagent.errors import Gone, Refused
from gpuagent.model.inventory import Process
from gpuagent.ports import Ender, Freezer
from gpuagent.sim.host import AGENT_PID, SimHost
from gpuagent.sim.rungs import PULSE_SECONDS, SimEnder, SimFreezer
from tests.sim.test_levers import made

_fits: tuple[type[Freezer], type[Ender]] = (SimFreezer, SimEnder)


def host_of(name: str) -> tuple[SimHost, str, int]:
    host = SimHost(made({name: {}}), seed=1)
    host.advance(60.0)
    path = host.cgroup(name)
    return host, path, host.cgroups.inode(path)


def process(host: SimHost, name: str) -> Process:
    path = host.cgroup(name)
    return next(p for p in host.processes.table() if p.cgroup == path)


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.5, 0.9])
async def test_a_tenant_runs_for_its_share_and_never_stands_longer_than_a_pulse(
    ratio: float,
) -> None:
    host, path, inode = host_of("eager")
    await host.freezer.set(path, inode, ratio)
    steps, frozen, longest, stretch = 2000, 0, 0, 0
    for _ in range(steps):
        host.advance(0.05)
        now = host.cgroups.read(path, "cgroup.freeze") == "1"
        frozen += now
        stretch = stretch + 1 if now else 0
        longest = max(longest, stretch)
    assert 1 - frozen / steps == pytest.approx(ratio, abs=0.02)
    assert longest * 0.05 <= PULSE_SECONDS + 0.05 + 1e-9
    state = await host.freezer.state(path, inode)
    assert (state.by, state.running_ratio) == ("us", ratio)
    assert state.frozen_seconds == pytest.approx(frozen * 0.05, abs=1.0)


async def test_thawed_it_does_as_much_as_before() -> None:
    host, path, inode = host_of("eager")
    done = [host.progress("eager").iterations]
    for ratio in (1.0, 0.2, 1.0):
        await host.freezer.set(path, inode, ratio)
        host.advance(30.0)
        done.append(host.progress("eager").iterations)
    free, held, again = (b - a for a, b in itertools.pairwise(done))
    assert 0.1 < held / free < 0.4
    assert again == pytest.approx(free, rel=0.05)
    assert (await host.freezer.state(path, inode)).by == "nobody"


async def test_what_is_frozen_otherwise_is_nobody_knows_whose() -> None:
    host, path, inode = host_of("eager")
    host.cgroups.write(path, inode, "cgroup.freeze", "1")
    assert (await host.freezer.state(path, inode)).by == "unknown"
    await host.freezer.set(path, inode, 1.0)
    assert (await host.freezer.state(path, inode)).by == "nobody"
    with pytest.raises(Refused):
        await host.freezer.set(path, inode, 0.01)


async def test_a_cgroup_that_goes_takes_its_pulses_with_it() -> None:
    host, path, inode = host_of("eager")
    await host.freezer.set(path, inode, 0.2)
    host.stop("eager")
    host.advance(1.0)
    with pytest.raises(Gone):
        await host.freezer.state(path, inode)
    host.start("eager")
    host.advance(5.0)
    assert host.cgroups.read(path, "cgroup.freeze") == "0"


async def test_a_process_that_is_ended_has_ended() -> None:
    host, _, _ = host_of("eager")
    one = process(host, "eager")
    assert await host.ender.alive(one.pid, one.started)
    assert not await host.ender.catches(one.pid, one.started, signal.SIGUSR1)
    assert not await host.ender.ended(one.pid, one.started, 1.0)
    with pytest.raises(Gone):
        await host.ender.send(one.pid, one.started + 1, signal.SIGTERM)
    await host.ender.send(one.pid, one.started, signal.SIGTERM)
    assert await host.ender.ended(one.pid, one.started, 1.0)
    assert host.ended[-1][1:] == ("eager", f"signal {signal.SIGTERM:d}")
    agent = host.processes.read(AGENT_PID)
    with pytest.raises(Refused):
        await host.ender.send(agent.pid, agent.started, signal.SIGKILL)
