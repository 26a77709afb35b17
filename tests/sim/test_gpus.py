"""The simulated driver: samples at their rates, lists, marks, limits, and cards that hang or are lost."""

import pytest

from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.inventory import on_gpu
from gpuagent.model.state import Sensed
from gpuagent.model.vocab import (
    GPU_CLOCK_HERTZ,
    GPU_ENERGY_JOULES,
    GPU_MEMORY_USED_BYTES,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_UTILIZATION_RATIO,
)
from gpuagent.sim.host import SimHost
from gpuagent.sim.scenario import parse

TWO = """
name = "two"
about = "Two cards."
seconds = 60
[[cards]]
profile = "a40"
[[cards]]
profile = "v100"
[[tenants]]
name = "train"
run = "bert-training"
[[tenants]]
name = "hold"
run = "holder"
card = 1
"""


def host(more: str = "", woken: list[str] | None = None) -> SimHost:
    wake = [] if woken is None else woken
    return SimHost(parse(TWO + more, source="two.toml"), seed=1, wake=wake.append)


def values(sensed: Sensed, signal: object, uuid: str) -> list[float]:
    return [r.value for r in sensed.readings if r.signal is signal and r.subject == on_gpu(uuid)]


def test_a_drain_has_what_was_sampled_since_the_last() -> None:
    here = host()
    first = here.gpus.drain()
    assert [g.name for g in first.gpus or ()] == ["Simulated A40", "Simulated V100"]
    here.advance(2.0)
    said = here.gpus.drain()
    uuid = here.cards[0].uuid
    assert said.gpus is None
    assert len(values(said, GPU_POWER_WATTS, uuid)) == 10
    assert len(values(said, GPU_CLOCK_HERTZ, uuid)) == 1
    assert {p.pid for p in said.gpu_processes or ()} == {2001, 2002}
    assert values(said, GPU_UTILIZATION_RATIO, uuid)[-1] > 0.8
    assert here.gpus.drain() == Sensed()


def test_samples_that_nobody_takes_are_bounded_and_the_newest_stay() -> None:
    here = host()
    here.advance(60.0)
    said = here.gpus.drain()
    assert len(said.readings) < 2 * 64 * 15
    newest = max(r.at for r in said.readings)
    assert newest == pytest.approx(here.clock.mono)


def test_a_list_tells_memory_and_the_time_kernels_ran() -> None:
    here = host()
    here.advance(41.0)
    listed = {p.pid: p for p in here.gpus.drain().gpu_processes or ()}
    assert listed[2001].utilization_ratio == pytest.approx(0.9, abs=0.1)
    assert listed[2002].utilization_ratio == 0
    assert listed[2001].memory_bytes == int(here.cards[0].used_bytes)


def test_energy_is_what_power_adds_up_to() -> None:
    here = host()
    joules = 0.0
    for _ in range(200):
        here.advance(0.05)
        joules += here.cards[0].watts * 0.05
    said = values(here.gpus.drain(), GPU_ENERGY_JOULES, here.cards[0].uuid)
    assert said[-1] == pytest.approx(joules, abs=20)


async def test_a_limit_is_set_read_back_and_refused_out_of_range() -> None:
    here = host()
    uuid = here.cards[0].uuid
    here.advance(5.0)
    await here.gpus.set_power_limit(uuid, 150.0)
    assert await here.gpus.power_limit(uuid) == 150.0
    here.gpus.drain()
    here.advance(5.0)
    said = here.gpus.drain()
    assert values(said, GPU_POWER_LIMIT_WATTS, uuid)[-1] == 150.0
    assert max(values(said, GPU_POWER_WATTS, uuid)[10:]) < 155
    for watts in (99.0, 301.0):
        with pytest.raises(Refused, match="is not within 100 to 300 W"):
            await here.gpus.set_power_limit(uuid, watts)
    with pytest.raises(Gone):
        await here.gpus.power_limit("GPU-none")


async def test_a_card_that_hangs_is_blind_for_a_while_and_works_on() -> None:
    woken: list[str] = []
    here = host('[[timeline]]\nat = 10\ndo = "hang"\ncard = 0\nseconds = 20', woken)
    uuid = here.cards[0].uuid
    here.advance(11.0)
    said = here.gpus.drain()
    assert next(g.blind for g in said.gpus or () if g.uuid == uuid) == "a driver call hangs"
    assert woken == ["GPU 0: a driver call hangs"]
    with pytest.raises(Unavailable):
        await here.gpus.power_limit(uuid)
    before = here.progress("train").iterations
    here.advance(5.0)
    said = here.gpus.drain()
    assert not values(said, GPU_POWER_WATTS, uuid)
    assert values(said, GPU_POWER_WATTS, here.cards[1].uuid)
    assert here.progress("train").iterations > before
    here.advance(20.0)
    said = here.gpus.drain()
    assert [g.blind for g in said.gpus or ()] == ["", ""]
    assert [e.kind for e in said.events] == ["gpu-recovered"]
    assert await here.gpus.power_limit(uuid) == 300.0


async def test_a_lost_card_takes_its_processes_with_it_and_only_the_kernel_log_says_so() -> None:
    here = host('[[timeline]]\nat = 10\ndo = "lose"\ncard = 0')
    here.advance(12.0)
    said = here.gpus.drain()
    assert [g.blind for g in said.gpus or ()] == ["lost", ""]
    assert [e.kind for e in said.events] == ["gpu-blind"]
    assert {p.pid for p in said.gpu_processes or ()} == {2002}
    assert [(x.xid, x.pci) for x in here.kernel_log.take()] == [(79, here.cards[0].pci)]
    assert not here.progress("train").running
    assert here.progress("hold").running
    with pytest.raises(Unavailable):
        await here.gpus.set_power_limit(here.cards[0].uuid, 200.0)
    joules = here.cards[0].joules
    here.start("train")
    here.advance(12.0)
    assert here.cards[0].joules == joules
    assert not here.progress("train").running


def test_an_xid_is_told_by_driver_and_kernel_and_ends_who_caused_it() -> None:
    here = host('[[timeline]]\nat = 5\ndo = "xid"\ncard = 0\nxid = 31\ntenant = "train"')
    here.advance(6.0)
    events = here.gpus.drain().events
    assert [(e.kind, dict(e.numbers)) for e in events] == [("xid", {"xid": 31.0})]
    assert [x.xid for x in here.kernel_log.take()] == [31]
    assert [(tenant, why) for _, tenant, why in here.ended] == [("train", "XID 31")]


def test_a_value_that_rises_over_its_mark_wakes_once() -> None:
    woken: list[str] = []
    here = host("", woken)
    here.gpus.watch({"gpu_memory_used_ratio": 0.1, "gpu_power_watts": 5000.0})
    here.advance(30.0)
    assert sorted(woken) == [f"gpu_memory_used_ratio of GPU {i} is over 0.1" for i in (0, 1)]


async def test_released_cards_say_nothing_until_they_are_taken_up_again() -> None:
    here = host()
    await here.gpus.release()
    here.advance(5.0)
    with pytest.raises(Unavailable, match="gpuagent resume"):
        here.gpus.drain()
    with pytest.raises(Unavailable):
        await here.gpus.power_limit(here.cards[0].uuid)
    await here.gpus.resume()
    here.advance(1.0)
    said = here.gpus.drain()
    assert len(said.gpus or ()) == 2
    assert values(said, GPU_MEMORY_USED_BYTES, here.cards[0].uuid)
