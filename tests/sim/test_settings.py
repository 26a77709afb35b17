"""Simulated locks of clocks, modes and time slices, and processes that are suspended and resumed."""

import pytest

from gpuagent.errors import Gone, NoRoom, Refused, Unavailable
from gpuagent.model.vocab import GPU_CLOCK_HERTZ, GPU_POWER_WATTS
from gpuagent.ports import Freed
from gpuagent.sim.host import SimHost
from gpuagent.sim.scenario import parse
from tests.sim.test_gpus import values

SCENE = """
name = "scene"
about = "Decode beside one that holds memory."
seconds = 60
[[cards]]
profile = "a40"
[[tenants]]
name = "decode"
run = "llm-decode"
[[tenants]]
name = "hold"
run = "holder"
"""


async def kept(freed: Freed | None) -> None:
    """Into no ledger."""


def host() -> SimHost:
    here = SimHost(parse(SCENE, source="scene.toml"), seed=1)
    here.advance(10.0)
    return here


def identity(here: SimHost, pid: int) -> tuple[int, int]:
    return pid, here.processes.read(pid).started


def mean(here: SimHost, signal: object) -> float:
    here.gpus.drain()
    here.advance(5.0)
    found = values(here.gpus.drain(), signal, here.cards[0].uuid)
    return sum(found) / len(found)


async def test_a_lock_bites_where_no_cap_does() -> None:
    """Decode draws below any cap, so that only a lock slows it (FACTS 7)."""
    here = host()
    card = here.cards[0]
    free, tokens = mean(here, GPU_POWER_WATTS), here.progress("decode").tokens
    before = tokens / 15.0
    highest = card.profile.clock_hertz.value
    await here.card_settings.set_clock_limit(card.uuid, 0.6 * highest)
    here.advance(2.0)
    assert mean(here, GPU_CLOCK_HERTZ) == pytest.approx(0.6 * highest, rel=0.01)
    assert mean(here, GPU_POWER_WATTS) < 0.9 * free
    assert not card.power_capped
    since = here.progress("decode").tokens
    here.advance(15.0)
    slower = (here.progress("decode").tokens - since) / 15.0
    assert 0.5 * before < slower < before
    await here.card_settings.set_clock_limit(card.uuid, None)
    here.advance(2.0)
    assert mean(here, GPU_POWER_WATTS) == pytest.approx(free, rel=0.05)


async def test_a_lock_above_the_highest_clock_changes_nothing() -> None:
    one, other = host(), host()
    uuid = one.cards[0].uuid
    await one.card_settings.set_clock_limit(uuid, 1e12)
    one.advance(5.0)
    other.advance(5.0)
    assert one.cards[0].clock == other.cards[0].clock
    assert one.progress("decode") == other.progress("decode")


async def test_modes_and_time_slices_are_kept() -> None:
    here = host()
    uuid = here.cards[0].uuid
    assert await here.card_settings.compute_mode(uuid) == 0
    await here.card_settings.set_compute_mode(uuid, 3)
    assert await here.card_settings.compute_mode(uuid) == 3
    with pytest.raises(Refused):
        await here.card_settings.set_compute_mode(uuid, 1)
    await here.card_settings.set_persistence_mode(uuid, False)
    assert not await here.card_settings.persistence_mode(uuid)
    await here.time_slices.set(uuid, 2)
    assert await here.time_slices.get(uuid) == 2
    with pytest.raises(Refused):
        await here.time_slices.set(uuid, 4)
    for call in (here.time_slices.get("x"), here.card_settings.compute_mode("x")):
        with pytest.raises(Gone):
            await call


async def test_a_suspended_process_holds_no_memory_and_does_nothing_until_it_is_resumed() -> None:
    here = host()
    card, decode = here.cards[0], identity(here, 2001)
    used = card.used_bytes
    assert await here.checkpoint.state(*decode) == "runs"
    await here.checkpoint.suspend(*decode, kept)
    await here.checkpoint.suspend(*decode, kept)
    assert await here.checkpoint.state(*decode) == "suspended"
    assert card.used_bytes < used
    here.gpus.drain()
    tokens = here.progress("decode").tokens
    here.advance(5.0)
    assert here.progress("decode").tokens == tokens
    assert 2001 not in {p.pid for p in here.gpus.drain().gpu_processes or ()}
    await here.checkpoint.resume(*decode, {})
    await here.checkpoint.resume(*decode, {})
    assert (await here.checkpoint.state(*decode), card.used_bytes) == ("runs", used)
    here.advance(5.0)
    assert here.progress("decode").tokens > tokens


async def test_there_must_be_room_to_resume() -> None:
    here = host()
    card, decode = here.cards[0], identity(here, 2001)
    await here.checkpoint.suspend(*decode, kept)
    free = card.memory_bytes - card.used_bytes - card.profile.context_bytes.value
    assert card.take(2002, card.memory[2002] - card.profile.context_bytes.value + free)
    with pytest.raises(NoRoom, match="waits for device memory"):
        await here.checkpoint.resume(*decode, {})
    assert await here.checkpoint.state(*decode) == "suspended"
    here.stop("hold")
    await here.checkpoint.resume(*decode, {})
    assert await here.checkpoint.state(*decode) == "runs"


async def test_who_cannot_be_suspended_is_said() -> None:
    here = host()
    pid, started = identity(here, 2001)
    with pytest.raises(Gone):
        await here.checkpoint.suspend(pid, started + 1, kept)
    path = here.cgroup("decode")
    here.cgroups.write(path, here.cgroups.inode(path), "cgroup.freeze", "1")
    with pytest.raises(Unavailable, match="waits until it is thawed"):
        await here.checkpoint.suspend(pid, started, kept)
    here.cgroups.write(path, here.cgroups.inode(path), "cgroup.freeze", "0")
    await here.checkpoint.suspend(pid, started, kept)
    here.stop("decode")
    with pytest.raises(Gone):
        await here.checkpoint.resume(pid, started, {})
    here.start("decode")
    here.advance(1.0)
    assert here.progress("decode").running
