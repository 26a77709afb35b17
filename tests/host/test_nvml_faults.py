"""host.nvml over a fake driver that hangs, loses cards, goes away and comes back."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from gpuagent import config
from gpuagent.clock import SystemClock
from gpuagent.errors import Unavailable, Unsupported
from gpuagent.host.nvml import NvmlGpus, pause_after
from gpuagent.host.nvml_probe import probe
from tests.fakes.nvml import (
    GIB,
    L40S,
    RTX_4080_SUPER,
    RTX_4090,
)
from tests.host.nvml_rig import Driver, gone, running

# -- what is survived ---------------------------------------------------------------------------------


async def test_a_call_that_hangs_blinds_one_card_until_it_answers_again(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S, RTX_4080_SUPER)
    async with running(fake) as rig:
        await rig.known()
        first = rig.gpus.child
        fake.hang("nvmlDeviceGetTemperatureV", gpu=1)
        began = time.monotonic()
        await rig.until(lambda: rig.card(1).blind, "the card is blind")
        assert "nvmlDeviceGetTemperatureV did not return" in rig.card(1).blind
        at = time.monotonic()
        await rig.until(
            lambda: all(rig.since(at, fake.gpus[i].uuid) for i in (0, 2)), "the others go on"
        )
        assert time.monotonic() - began < 10
        assert rig.card(0).blind == rig.card(2).blind == ""
        assert not rig.since(at, fake.gpus[1].uuid)
        assert first is not None
        assert gone(first)
        with pytest.raises(Unavailable, match="hangs"):
            await rig.gpus.power_limit(fake.gpus[1].uuid)
        second = rig.gpus.child
        fake.unhang("nvmlDeviceGetTemperatureV", gpu=1)
        await rig.until(lambda: not rig.card(1).blind, "the card answers again")
        at = time.monotonic()
        await rig.until(lambda: rig.since(at, fake.gpus[1].uuid), "and is read")
        assert rig.gpus.child == second, "the others were not disturbed"
    kinds = [e.kind for e in rig.events if e.subject and e.subject.gpu == fake.gpus[1].uuid]
    assert kinds == ["gpu-found", "gpu-blind", "gpu-recovered"]


async def test_a_card_that_hangs_again_and_again_does_not_disturb_the_others(
    driver: Driver,
) -> None:
    fake = driver(RTX_4090, L40S)
    healthy = fake.gpus[0].uuid
    async with running(fake, retry_max=2.0) as rig:
        await rig.known()
        oldest = 0.0

        def looked(*, blind: bool) -> bool:
            nonlocal oldest
            samples = [r.at for r in rig.readings if r.subject.gpu == healthy]
            oldest = max(oldest, time.monotonic() - max(samples, default=float("-inf")))
            return bool(rig.card(1).blind) == blind

        await rig.until(lambda: rig.since(0.0, healthy), "it is read")
        for _ in range(3):
            fake.hang("nvmlDeviceGetPowerUsage", gpu=1)
            await rig.until(lambda: looked(blind=True), "it hangs")
            fake.unhang("nvmlDeviceGetPowerUsage", gpu=1)
            await rig.until(lambda: looked(blind=False), "it is taken back")
    assert oldest < 3.0 + rig.settings.call_deadline
    assert [e.kind for e in rig.events if e.subject and e.subject.gpu == healthy] == ["gpu-found"]


async def test_a_card_that_hangs_before_it_has_a_name_is_not_overlooked(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    fake.hang("nvmlDeviceGetUUID", gpu=0)
    async with running(fake) as rig:
        await rig.until(lambda: rig.cards and len(rig.cards) == 2, "both are told of")
        assert rig.card(0).uuid == "unknown-0"
        assert rig.card(0).blind
        with pytest.raises(Unavailable, match="not answered yet"):
            await rig.gpus.power_limit(fake.gpus[0].uuid)
        await rig.until(lambda: rig.newest("gpu_power_watts", fake.gpus[1].uuid), "one is read")
        fake.unhang("nvmlDeviceGetUUID", gpu=0)
        await rig.until(lambda: rig.card(0).uuid == fake.gpus[0].uuid, "it gets its name")
        assert len(rig.cards or ()) == 2


@pytest.mark.parametrize(
    ("twin", "why"), [(False, "answers an empty text"), (True, "has the UUID of GPU 0")]
)
async def test_a_card_without_a_uuid_of_its_own_is_blind_under_a_name_of_its_own(
    driver: Driver, twin: bool, why: str
) -> None:
    fake = driver(RTX_4090, L40S)
    first, second = fake.gpus
    right = second.raw.uuid
    second.raw.uuid = first.raw.uuid if twin else b""
    async with running(fake) as rig:
        await rig.until(lambda: rig.cards and len(rig.cards) == 2, "both are told of")
        assert [(c.uuid, c.name) for c in rig.cards or ()] == [
            (first.uuid, RTX_4090.name),
            ("unknown-1", ""),
        ]
        assert why in rig.card(1).blind
        await rig.until(lambda: rig.newest("gpu_power_watts", first.uuid), "the other is read")
        assert rig.newest("gpu_memory_total_bytes", first.uuid) == RTX_4090.memory_total_bytes
        second.raw.uuid = right
        await rig.until(lambda: rig.card(1).uuid == second.uuid, "it gets its name")
        assert len(rig.cards or ()) == 2


async def test_when_the_whole_driver_hangs_everything_is_blind_and_comes_back(
    driver: Driver,
) -> None:
    fake = driver(RTX_4090, L40S)
    async with running(fake) as rig:
        await rig.known()
        fake.hang("nvmlInitWithFlags")
        fake.hang("nvmlEventSetWait_v2")
        await rig.until(lambda: all(c.blind for c in rig.cards or ()), "all are blind")
        await rig.until(lambda: rig.error is not None, "and it is said why")
        assert isinstance(rig.error, Unavailable)
        assert "nvmlInitWithFlags did not return" in str(rig.error)
        fake.unhang("nvmlInitWithFlags")
        fake.unhang("nvmlEventSetWait_v2")
        await rig.until(lambda: not any(c.blind for c in rig.cards or ()), "all are back")


@pytest.mark.parametrize("how", ["lose", "require_reset"])
async def test_a_lost_card_is_blind_and_the_others_go_on(driver: Driver, how: str) -> None:
    fake = driver(RTX_4090, L40S)
    lost, other = fake.gpus
    lost.add_process(77, memory_bytes=GIB)
    async with running(fake) as rig:
        await rig.known()
        await rig.until(lambda: rig.processes, "its process is listed")
        child = rig.gpus.child
        lost.xid(79)
        getattr(lost, how)()
        await rig.until(lambda: rig.card(0).blind, "the card is blind")
        assert ("fallen off" if how == "lose" else "needs a reset") in rig.card(0).blind
        at = time.monotonic()
        await rig.until(lambda: rig.since(at, other.uuid), "the other goes on")
        assert rig.gpus.child == child
        await rig.until(
            lambda: [p.memory_bytes for p in rig.processes or ()] == [None],
            "its process is still its own, but what it holds is unknown",
        )
        with pytest.raises(Unavailable, match="GPU 0"):
            await rig.gpus.power_limit(lost.uuid)
        other.xid(31)
        await rig.until(
            lambda: {dict(e.numbers).get("xid") for e in rig.events} >= {79.0, 31.0},
            "XIDs of both are told, of the lost one, too",
        )
        lost.recover()
        await rig.until(lambda: not rig.card(0).blind, "the card is back")
        await rig.until(lambda: rig.processes and rig.processes[0].memory_bytes == GIB, "as before")
        polls = fake.calls("nvmlEventSetWait_v2")
        await rig.until(lambda: fake.calls("nvmlEventSetWait_v2") > polls + 1, "asked again")
        lost.xid(43)
        await rig.until(lambda: any(dict(e.numbers).get("xid") == 43 for e in rig.events), "XIDs")


async def test_the_driver_is_unloaded_and_loaded_again(driver: Driver) -> None:
    fake = driver(RTX_4090)
    async with running(fake) as rig:
        await rig.known()
        fake.unload_driver(force=True)
        await rig.until(lambda: isinstance(rig.error, Unsupported), "there is no driver")
        assert "modprobe nvidia" in str(rig.error)
        assert rig.card(0).blind
        with pytest.raises(Unavailable):
            await rig.gpus.power_limit(fake.gpus[0].uuid)
        fake.load_driver()
        await rig.until(lambda: not rig.card(0).blind, "the card is back")
        at = time.monotonic()
        await rig.until(lambda: rig.since(at, fake.gpus[0].uuid), "and is read")


def test_pauses_double_up_to_the_longest_however_often_it_fails() -> None:
    pauses = [pause_after(failures, 60.0) for failures in range(1, 2000)]
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert pauses[-1] == 60.0
    assert pauses == sorted(pauses)


async def test_a_driver_that_appears_is_found(driver: Driver) -> None:
    fake = driver(RTX_4090)
    fake.unload_driver()
    async with running(fake) as rig:
        await rig.until(lambda: isinstance(rig.error, Unsupported), "there is no driver")
        assert rig.cards is None
        fake.load_driver()
        assert (await rig.known())[0].name == RTX_4090.name


async def test_no_library_says_what_to_do(tmp_path: Path) -> None:
    missing = str(tmp_path / "libnvidia-ml.so.1")
    offer = await probe(missing)
    assert missing in offer.problem
    assert "install the NVIDIA driver" in offer.problem
    gpus = NvmlGpus(
        settings=config.Nvml(),
        library=missing,
        clock=SystemClock(),
        wake=lambda _: None,
    )
    task = asyncio.create_task(gpus.run())
    await gpus.settled()
    with pytest.raises(Unsupported, match=r"paths\.nvml_library"):
        gpus.drain()
    task.cancel()


async def test_a_host_without_cards_has_none_and_finds_one_that_appears(driver: Driver) -> None:
    fake = driver()
    async with running(fake, retry_max=0.3, slow_interval=0.2) as rig:
        assert await rig.known() == ()
        gpu = fake.add_gpu(RTX_4090)
        await rig.until(lambda: rig.cards, "it is found")
        assert rig.card(0).uuid == gpu.uuid
        rig.listing.mkdir()  # The kernel module is there ...
        second = fake.add_gpu(L40S)
        (rig.listing / second.pci_bus_id).mkdir()  # ... and lists what was plugged in.
        await rig.until(lambda: len(rig.cards or ()) == 2, "so is a second one")
        for each in (gpu, second):
            fake.remove_gpu(each)
        (rig.listing / second.pci_bus_id).rmdir()
        await rig.until(lambda: rig.cards == (), "and missed when it is gone")
        kinds = [e.kind for e in rig.events if e.kind != "gpu-blind"]
        assert kinds == ["gpu-found"] * 2 + ["gpu-removed"] * 2
        assert rig.error is None


async def test_a_killed_child_is_replaced(driver: Driver) -> None:
    fake = driver(RTX_4090)
    async with running(fake) as rig:
        await rig.known()
        first = rig.gpus.child
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await rig.until(lambda: rig.gpus.child not in (None, first), "there is a new child")
        at = time.monotonic()
        await rig.until(lambda: rig.since(at, fake.gpus[0].uuid), "and it reads")
        assert rig.card(0).blind == ""
        assert gone(first)


async def test_a_stopped_child_is_replaced(driver: Driver) -> None:
    """SIGSTOP: no call hangs, but nothing happens either."""
    fake = driver(RTX_4090)
    async with running(fake) as rig:
        await rig.known()
        first = rig.gpus.child
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        await rig.until(lambda: rig.gpus.child not in (None, first), "there is a new child")
        assert gone(first)


async def test_errors_of_one_call_are_not_errors_of_the_card(driver: Driver) -> None:
    fake = driver(RTX_4090)
    fake.fail("nvmlDeviceGetUtilizationRates", 999)
    async with running(fake) as rig:
        (card,) = await rig.known()
        await rig.until(lambda: rig.newest("gpu_power_watts", card.uuid), "the rest is read")
        assert rig.newest("gpu_utilization_ratio", card.uuid) is None
        for name in (
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetTemperatureV",
        ):
            fake.fail(name, 999)
        await rig.until(lambda: rig.card(0).blind, "when every call fails, the card is blind")
        assert "answers nothing" in rig.card(0).blind
