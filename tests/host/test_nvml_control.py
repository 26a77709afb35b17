"""host.nvml over the fake driver: power limits, letting go and taking up, new settings, check."""

import time

import pytest

from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.nvml_probe import probe
from tests.fakes.nvml import (
    H100_80GB,
    H100_MIG,
    L40S,
    RTX_4090,
)
from tests.host.nvml_rig import Driver, Rig, gone, running

# -- power limits -------------------------------------------------------------------------------------


async def test_the_power_limit_is_read_and_set(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    gpu = fake.gpus[1]
    async with running(fake) as rig:
        await rig.known()
        assert await rig.gpus.power_limit(gpu.uuid) == 350
        await rig.gpus.set_power_limit(gpu.uuid, 250.5)
        assert gpu.power_limit_watts == 250.5
        assert await rig.gpus.power_limit(gpu.uuid) == 250.5
        assert fake.gpus[0].power_limit_watts == 450
        with pytest.raises(Refused, match="outside its range, 100 to 350 W"):
            await rig.gpus.set_power_limit(gpu.uuid, 400)
        with pytest.raises(Gone, match="no GPU GPU-nobody"):
            await rig.gpus.set_power_limit("GPU-nobody", 300)
        fake.privileged = False
        with pytest.raises(Refused, match="only root"):
            await rig.gpus.set_power_limit(gpu.uuid, 300)
        fake.fail("nvmlDeviceSetPowerManagementLimit", 3)
        with pytest.raises(Unsupported, match="no power limit"):
            await rig.gpus.set_power_limit(gpu.uuid, 300)
        assert gpu.power_limit_watts == 250.5


async def test_a_write_that_hangs_is_reported_and_blinds_the_card(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    async with running(fake) as rig:
        await rig.known()
        fake.hang("nvmlDeviceSetPowerManagementLimit", gpu=0)
        with pytest.raises(Unavailable):
            await rig.gpus.set_power_limit(fake.gpus[0].uuid, 300)
        await rig.until(lambda: rig.card(0).blind, "the card is blind")
        at = time.monotonic()
        await rig.until(lambda: rig.since(at, fake.gpus[1].uuid), "the other goes on")
        assert await rig.gpus.power_limit(fake.gpus[1].uuid) == 350


# -- letting go ---------------------------------------------------------------------------------------


async def test_release_closes_every_handle_and_resume_takes_them_up(driver: Driver) -> None:
    fake = driver(H100_80GB)
    async with running(fake) as rig:
        await rig.known()
        assert fake.holders == [rig.gpus.child]
        await rig.gpus.release()
        assert fake.holders == []
        fake.gpus[0].configure_mig(H100_MIG.migs)
        fake.unload_driver()
        fake.load_driver()
        await rig.until(lambda: rig.error is not None, "it is said why")
        assert "gpuagent resume" in str(rig.error)
        assert "released" in rig.card(0).blind
        with pytest.raises(Unavailable, match="released"):
            await rig.gpus.power_limit(fake.gpus[0].uuid)
        assert fake.holders == []
        await rig.gpus.resume()
        await rig.until(lambda: not rig.card(0).blind, "the card is back")
        assert len(rig.card(0).mig) == 4


async def test_release_while_a_call_hangs_lets_go_all_the_same(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    async with running(fake) as rig:
        await rig.known()
        fake.hang("nvmlDeviceGetPowerUsage", gpu=0)
        await rig.gpus.release()
        assert fake.holders == []
        fake.unhang("nvmlDeviceGetPowerUsage", gpu=0)
        await rig.gpus.resume()
        at = time.monotonic()
        await rig.until(lambda: rig.since(at, fake.gpus[0].uuid), "it is read again")


async def test_new_settings_count_at_once(driver: Driver) -> None:
    fake = driver(RTX_4090)
    async with running(fake, sample_interval=10.0) as rig:
        await rig.known()
        child = rig.gpus.child
        rig.gpus.reconfigure(Rig(fake).settings)
        before = fake.calls("nvmlDeviceGetPowerUsage")
        await rig.until(lambda: fake.calls("nvmlDeviceGetPowerUsage") > before + 5, "it samples")
        assert rig.gpus.child == child


async def test_the_end_leaves_no_process_behind(driver: Driver) -> None:
    fake = driver(RTX_4090)
    async with running(fake) as rig:
        await rig.known()
        child = rig.gpus.child
    assert child is not None
    assert gone(child)
    assert fake.holders == []


async def test_check_tells_what_there_is(driver: Driver) -> None:
    fake = driver(H100_MIG, RTX_4090, L40S)
    fake.gpus[1].lose()
    offer = await probe(str(fake.library))
    assert offer.driver == "590.48.01"
    assert [c.name for c in offer.cards] == [H100_MIG.name, "", L40S.name]
    assert "fallen off" in offer.cards[1].blind
    assert (offer.problem, offer.missing) == ("", ())
    fake.hang("nvmlDeviceGetName", gpu=0)
    offer = await probe(str(fake.library), deadline=0.3)
    assert "nvmlDeviceGetName did not return" in offer.problem
    fake.unhang("nvmlDeviceGetName")
    fake.unload_driver()
    offer = await probe(str(fake.library))
    assert "modprobe nvidia" in offer.problem
    assert offer.cards == ()
