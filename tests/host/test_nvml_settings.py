"""host.nvml_settings over the fake driver: locks of clocks, compute mode, persistence mode."""

import time

import pytest

from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.nvml_settings import NvmlSettings
from tests.fakes.nvml import GIB, H100_80GB, L40S, RTX_4090
from tests.host.nvml_rig import Driver, running

MHZ = 1e6


@pytest.mark.parametrize(
    ("hertz", "locked"),
    [
        (1407.9 * MHZ, (210 * MHZ, 1395 * MHZ)),
        (1 * MHZ, (210 * MHZ, 210 * MHZ)),
        (9e12, (210 * MHZ, 1980 * MHZ)),
    ],
)
async def test_clocks_are_locked_within_what_the_card_supports(
    driver: Driver, hertz: float, locked: tuple[float, float]
) -> None:
    fake = driver(H100_80GB, L40S)
    card = fake.gpus[0]
    async with running(fake) as rig:
        await rig.known()
        settings = NvmlSettings(rig.gpus)
        await settings.set_clock_limit(card.uuid, hertz)
        assert [gpu.locked_clocks_hertz for gpu in fake.gpus] == [locked, None]
        await settings.set_clock_limit(card.uuid, None)
        assert [gpu.locked_clocks_hertz for gpu in fake.gpus] == [None, None]


async def test_clocks_are_locked_where_the_card_tells_no_steps(driver: Driver) -> None:
    fake = driver(H100_80GB)
    fake.fail("nvmlDeviceGetSupportedGraphicsClocks", 3)
    async with running(fake) as rig:
        await rig.known()
        await NvmlSettings(rig.gpus).set_clock_limit(fake.gpus[0].uuid, 1407.9 * MHZ)
        assert fake.gpus[0].locked_clocks_hertz == (0, 1407 * MHZ)


async def test_modes_are_read_and_set(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    card = fake.gpus[1]
    async with running(fake) as rig:
        await rig.known()
        settings = NvmlSettings(rig.gpus)
        card.persistence = False
        assert await settings.persistence_mode(card.uuid) is False
        await settings.set_persistence_mode(card.uuid, True)
        assert card.persistence
        assert await settings.persistence_mode(card.uuid) is True
        assert await settings.compute_mode(card.uuid) == 0
        await settings.set_compute_mode(card.uuid, 3)
        assert (card.compute_mode, fake.gpus[0].compute_mode) == (3, 0)
        card.compute_mode = 2  # somebody ran nvidia-smi -c 2
        assert await settings.compute_mode(card.uuid) == 2


async def test_each_refusal_says_which_setting_it_is_about(driver: Driver) -> None:
    fake = driver(H100_80GB)
    card = fake.gpus[0]
    async with running(fake) as rig:
        await rig.known()
        settings = NvmlSettings(rig.gpus)
        with pytest.raises(Refused, match="takes no compute mode of 1"):
            await settings.set_compute_mode(card.uuid, 1)
        with pytest.raises(Gone, match="no GPU GPU-nobody"):
            await settings.set_persistence_mode("GPU-nobody", True)
        fake.privileged = False
        with pytest.raises(Refused, match="only root set the clock limit"):
            await settings.set_clock_limit(card.uuid, 1e9)
        with pytest.raises(Refused, match="only root set the persistence mode"):
            await settings.set_persistence_mode(card.uuid, not card.persistence)
        fake.privileged = True
        fake.fail("nvmlDeviceSetGpuLockedClocks", 3)
        with pytest.raises(Unsupported, match="no clock limit"):
            await settings.set_clock_limit(card.uuid, 1e9)
        fake.fail("nvmlDeviceGetComputeMode", 999)
        with pytest.raises(Unavailable):
            await settings.compute_mode(card.uuid)
        assert card.locked_clocks_hertz is None


async def test_a_lock_that_hangs_is_reported_and_blinds_the_card(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    async with running(fake) as rig:
        await rig.known()
        settings = NvmlSettings(rig.gpus)
        fake.hang("nvmlDeviceSetGpuLockedClocks", gpu=0)
        with pytest.raises(Unavailable):
            await settings.set_clock_limit(fake.gpus[0].uuid, 1e9)
        await rig.until(lambda: rig.card(0).blind, "the card is blind")
        at = time.monotonic()
        await rig.until(lambda: rig.since(at, fake.gpus[1].uuid), "the other goes on")
        await settings.set_clock_limit(fake.gpus[1].uuid, 1e9)
        assert fake.gpus[1].locked_clocks_hertz == (210 * MHZ, 990 * MHZ)


async def test_memory_of_a_process_is_told_by_lists_that_are_new_enough(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    first, second = fake.gpus
    first.add_process(41, memory_bytes=2 * GIB)
    second.add_process(41, memory_bytes=GIB)
    second.add_process(42, memory_bytes=None)
    async with running(fake) as rig:
        await rig.known()
        memory, clock = rig.gpus.memory, rig.gpus._clock
        first_look = clock.now().mono - 60
        assert memory.memory_of(41, first_look) == {first.uuid: 2 * GIB, second.uuid: GIB}
        assert memory.memory_of(42, first_look) is None
        assert memory.memory_of(43, first_look) == {}
        asked = clock.now().mono
        assert memory.memory_of(41, asked + 60) is None
        first.remove_process(41)
        second.remove_process(41)
        await rig.until(lambda: memory.memory_of(41, asked) == {}, "a newer list has come")
        await rig.until(lambda: memory.memory_free(second.uuid, asked), "a newer sample has come")
        free = memory.memory_free(second.uuid, asked)
        assert free == second.raw.memory_total_bytes - second.raw.memory_used_bytes
        assert memory.memory_free(second.uuid, asked + 60) is None
        assert memory.memory_free("GPU-nobody", 0) is None
