"""host.nvml over the fake driver: what is read, what is survived, what is let go."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuagent import config
from gpuagent.clock import SystemClock
from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.nvml import NvmlGpus
from gpuagent.host.nvml_fields import READS
from gpuagent.host.nvml_probe import probe
from gpuagent.model.vocab import SIGNAL
from tests.fakes.nvml import (
    GIB,
    H100_80GB,
    H100_MIG,
    L40S,
    MIB,
    PROFILES,
    RTX_4080_SUPER,
    RTX_4090,
    FakeNvml,
    Profile,
)
from tests.host.nvml_rig import Rig, fake_driver, gone, running

Driver = Callable[..., FakeNvml]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    def make(*profiles: Profile, **options: Any) -> FakeNvml:
        return fake_driver(monkeypatch, tmp_path, *profiles, **options)

    return make


# -- what is read -------------------------------------------------------------------------------------


def test_the_table_gives_signals_that_are_declared() -> None:
    for read in READS:
        for name in read.gives:
            assert name in SIGNAL, name


@pytest.mark.parametrize("name", sorted(PROFILES))
async def test_every_profile_reads_as_it_describes_itself(driver: Driver, name: str) -> None:
    profile = PROFILES[name]
    fake = driver(profile)
    fake.gpus[0].load()
    async with running(fake) as rig:
        (card,) = await rig.known()
        await rig.until(lambda: rig.newest("gpu_pcie_replays_total", card.uuid) is not None, "slow")
    loaded, uuid = profile.loaded, fake.gpus[0].uuid
    assert card.uuid == uuid
    assert card.name == profile.name
    assert card.pci_bus_id == fake.gpus[0].pci_bus_id
    assert card.memory_bytes == profile.memory_total_bytes
    assert card.power_min_watts == profile.power_min_watts
    assert card.power_max_watts == profile.power_max_watts
    assert card.power_default_watts == profile.power_default_watts
    assert card.driver == "590.48.01"
    assert card.numa_node == 0
    assert card.blind == ""
    expected = {
        ("gpu_memory_total_bytes",): profile.memory_total_bytes,
        ("gpu_memory_used_bytes",): loaded["memory_used_bytes"],
        ("gpu_memory_reserved_bytes",): profile.memory_reserved_bytes,
        ("gpu_temperature_celsius",): loaded["temperature_celsius"],
        ("gpu_power_instant_watts",): loaded["demand_watts"],
        ("gpu_power_limit_watts",): profile.power_default_watts,
        ("gpu_power_limit_enforced_watts",): profile.power_default_watts,
        ("gpu_clock_hertz", "sm"): loaded["graphics_clock_hertz"],
        ("gpu_clock_hertz", "graphics"): loaded["graphics_clock_hertz"],
        ("gpu_clock_hertz", "memory"): loaded["memory_clock_hertz"],
        ("gpu_clock_hertz", "video"): loaded["video_clock_hertz"],
        ("gpu_pcie_bytes_per_second", "tx"): loaded["pcie_tx_bytes_per_second"],
        ("gpu_pcie_bytes_per_second", "rx"): loaded["pcie_rx_bytes_per_second"],
        ("gpu_pcie_replays_total",): loaded["pcie_replays"],
    }
    for (signal_name, *dims), value in expected.items():
        assert rig.newest(signal_name, uuid, *dims) == pytest.approx(value), signal_name
    mig = bool(profile.migs)
    utilization = rig.newest("gpu_utilization_ratio", uuid)
    assert utilization == (None if mig else pytest.approx(loaded["utilization"]))
    energy = [r.value for r in rig.readings if r.signal.name == "gpu_energy_joules_total"]
    assert energy == sorted(energy)
    assert energy[0] > 0
    memory_sensor = rig.newest("gpu_memory_temperature_celsius", uuid)
    assert memory_sensor == (
        loaded["memory_temperature_celsius"] if profile.has_memory_temperature else None
    )
    assert (rig.newest("gpu_ecc_errors_total", uuid, "corrected") is not None) == profile.ecc
    assert (rig.newest("gpu_nvlink_bytes_total", uuid, "tx") is not None) == (profile.nvlinks > 0)


async def test_mig_instances_have_memory_of_their_own_and_processes_know_theirs(
    driver: Driver,
) -> None:
    fake = driver(H100_MIG)
    gpu = fake.gpus[0]
    gpu.set(mig_memory_used_bytes=(5 * GIB, 2 * GIB, 0, 0))
    gpu.add_process(4242, memory_bytes=4 * GIB, mig=1)
    gpu.add_process(4243, memory_bytes=None, mig=0)
    async with running(fake) as rig:
        (card,) = await rig.known()
        await rig.until(lambda: rig.processes, "processes are listed")
        await rig.until(lambda: rig.readings, "readings come")
    assert card.mig_enabled is True
    assert [m.uuid for m in card.mig] == gpu.mig_uuids
    assert [m.gpu_instance for m in card.mig] == [2, 3, 9, 10]
    assert card.mig[0].memory_bytes == 40_448 * MIB
    assert rig.newest("gpu_memory_used_bytes", gpu.mig_uuids[0]) == 5 * GIB
    assert rig.newest("gpu_memory_used_bytes", gpu.mig_uuids[1]) == 2 * GIB
    assert rig.newest("gpu_memory_total_bytes", gpu.mig_uuids[2]) == 9_984 * MIB
    assert rig.processes is not None
    of = {p.pid: p for p in rig.processes}
    assert of[4242].mig == gpu.mig_uuids[1]
    assert of[4242].memory_bytes == 4 * GIB
    assert of[4242].utilization_ratio is None
    assert of[4243].mig == gpu.mig_uuids[0]
    assert of[4243].memory_bytes is None


async def test_processes_of_all_kinds_and_how_busy_they_are(driver: Driver) -> None:
    fake = driver(L40S)
    gpu = fake.gpus[0]
    for pid, kind in ((11, "compute"), (12, "graphics"), (13, "mps"), (14, "compute+graphics")):
        gpu.add_process(pid, kind=kind, memory_bytes=pid * MIB)
    gpu.add_process(15, memory_bytes=None)
    async with running(fake) as rig:
        await rig.until(lambda: rig.processes, "processes are listed")
        gpu.utilization_sample(11, sm=0.2)
        gpu.utilization_sample(11, sm=0.6)
        gpu.utilization_sample(13, sm=0.0)
        await rig.until(lambda: busy(rig, 11) is not None, "a share of time is known")
        assert rig.processes is not None
        of = {p.pid: p for p in rig.processes}
        kinds = {pid: p.kind for pid, p in of.items()}
        assert kinds == {11: "compute", 12: "graphics", 13: "mps", 14: "compute", 15: "compute"}
        assert of[12].memory_bytes == 12 * MIB
        assert of[15].memory_bytes is None
        # The first sample was seen with the first answer, of which only the end is now.
        assert of[11].utilization_ratio in (pytest.approx(0.4), pytest.approx(0.6))
        assert of[12].utilization_ratio is None
        await rig.until(lambda: busy(rig, 11) is None, "without samples it is unknown, not idle")
        gpu.utilization_sample(11, sm=0.5)
        gpu.utilization_sample(11, sm=0.1)
        await rig.until(lambda: busy(rig, 11) is not None, "a share of time is known again")


def busy(rig: Rig, pid: int) -> float | None:
    return next((p.utilization_ratio for p in rig.processes or () if p.pid == pid), None)


async def test_links_between_cards(driver: Driver) -> None:
    fake = driver(RTX_4090, RTX_4090, H100_80GB, H100_80GB)
    one, two, three, four = fake.gpus
    fake.connect(one, two, level="single")
    async with running(fake) as rig:
        await rig.known()
        links = {(c.index, link.peer): link for c in rig.cards or () for link in c.links}
        assert links[0, two.uuid].distance == "single"
        assert links[0, two.uuid].kind == "pcie"
        assert links[2, four.uuid].kind == "nvlink"
        assert links[2, four.uuid].lanes == 18
        assert links[2, one.uuid].kind == "pcie"
        assert len(links) == 12
        three.set_link(0, active=False)
        await rig.until(
            lambda: any(n.lanes == 17 for n in rig.card(3).links), "a link down is noticed"
        )


async def test_the_library_of_driver_550_lacks_symbols_and_everything_is_read(
    driver: Driver,
) -> None:
    fake = driver(H100_80GB, variant="550")
    async with running(fake) as rig:
        (card,) = await rig.known()
        await rig.until(
            lambda: rig.newest("gpu_temperature_celsius", card.uuid) == 41, "temperature is read"
        )
        await asyncio.sleep(0.2)
        rig.look()
    assert card.driver == "550.163.01"
    offer = await probe(str(fake.library))
    assert offer.missing == ("nvmlDeviceGetTemperatureV",)


async def test_without_version_2_of_memory_what_is_used_is_an_estimate(driver: Driver) -> None:
    fake = driver(RTX_4090)
    fake.fail("nvmlDeviceGetMemoryInfo_v2", 13)
    async with running(fake) as rig:
        (card,) = await rig.known()
        await rig.until(lambda: rig.newest("gpu_memory_used_bytes", card.uuid), "memory is read")
    used = [r for r in rig.readings if r.signal.name == "gpu_memory_used_bytes"]
    total = [r for r in rig.readings if r.signal.name == "gpu_memory_total_bytes"]
    assert not any(r.exact for r in used)
    assert all(r.exact for r in total)
    assert rig.newest("gpu_memory_reserved_bytes", card.uuid) is None


async def test_what_a_card_does_not_support_is_not_asked_again(driver: Driver) -> None:
    fake = driver(H100_MIG)
    async with running(fake) as rig:
        await rig.known()
        asked = fake.calls("nvmlDeviceGetUtilizationRates")
        before = fake.calls("nvmlDeviceGetTemperatureV")
        await rig.until(
            lambda: fake.calls("nvmlDeviceGetTemperatureV") > before + 5, "samples go on"
        )
        assert fake.calls("nvmlDeviceGetUtilizationRates") == asked


async def test_only_cheap_calls_are_made_at_the_sample_rate(driver: Driver) -> None:
    fake = driver(H100_80GB, L40S)
    async with running(fake, process_interval=60.0, slow_interval=600.0) as rig:
        await rig.known()
        fake.reset_calls()
        await rig.until(
            lambda: fake.calls("nvmlDeviceGetPowerUsage") >= 20, "ten samples of each card"
        )
        often = {name for name, count in fake.all_calls().items() if count >= 20}
    assert often <= {
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetTemperatureV",
    }
    assert "nvmlDeviceGetFanSpeed" not in fake.all_calls()
    assert fake.calls("nvmlDeviceGetComputeRunningProcesses_v3") == 0


async def test_samples_between_two_drains_are_kept_but_not_without_bound(driver: Driver) -> None:
    fake = driver(RTX_4090)
    async with running(fake, sample_interval=0.02) as rig:
        await rig.known()
        before = fake.calls("nvmlDeviceGetPowerUsage")
        async with asyncio.timeout(20):
            while fake.calls("nvmlDeviceGetPowerUsage") < before + 80:
                await asyncio.sleep(0.05)
        said = rig.gpus.drain()
    power = [r for r in said.readings if r.signal.name == "gpu_power_watts"]
    assert 10 < len(power) <= 64
    assert [r.at for r in power] == sorted(r.at for r in power)
    assert len([r for r in said.readings if r.signal.name == "gpu_power_instant_watts"]) == 1


async def test_a_rise_over_a_mark_wakes_once(driver: Driver) -> None:
    fake = driver(RTX_4090)
    gpu = fake.gpus[0]
    async with running(fake) as rig:
        rig.gpus.watch({"gpu_memory_used_ratio": 0.85, "gpu_temperature_celsius": 80.0})
        await rig.known()
        rig.wakes.clear()
        gpu.set(temperature_celsius=81)
        await rig.until(lambda: rig.wakes, "heat wakes")
        gpu.set(memory_used_bytes=int(0.9 * RTX_4090.memory_total_bytes))
        await rig.until(lambda: len(rig.wakes) == 2, "memory wakes")
        count = fake.calls("nvmlDeviceGetPowerUsage")
        await rig.until(lambda: fake.calls("nvmlDeviceGetPowerUsage") > count + 3, "more samples")
        assert "gpu_temperature_celsius" in rig.wakes[0]
        assert "gpu_memory_used_ratio" in rig.wakes[1]
        assert len(rig.wakes) == 2
        gpu.set(temperature_celsius=70)
        await rig.until(lambda: rig.newest("gpu_temperature_celsius", gpu.uuid) == 70, "it cools")
        gpu.set(temperature_celsius=85)
        await rig.until(lambda: len(rig.wakes) == 3, "the next rise wakes again")


async def test_each_xid_is_told_once(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    async with running(fake) as rig:
        await rig.known()
        for code in (31, 31, 43):
            fake.gpus[1].xid(code)
        fake.gpus[0].xid(13)

        def told() -> list[tuple[str, float]]:
            return sorted(
                (e.subject.gpu, dict(e.numbers)["xid"])
                for e in rig.events
                if e.kind == "xid" and e.subject is not None
            )

        await rig.until(lambda: len(told()) >= 4, "all are told")
        polls = fake.calls("nvmlEventSetWait_v2")
        await rig.until(lambda: fake.calls("nvmlEventSetWait_v2") > polls + 3, "asked again")
        expected = [(fake.gpus[0].uuid, 13.0)] + [(fake.gpus[1].uuid, x) for x in (31.0, 31.0, 43.0)]
        assert told() == sorted(expected)


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


async def test_a_card_that_hangs_before_it_has_a_name_is_not_overlooked(driver: Driver) -> None:
    fake = driver(RTX_4090, L40S)
    fake.hang("nvmlDeviceGetUUID", gpu=0)
    async with running(fake) as rig:
        await rig.until(lambda: rig.cards and len(rig.cards) == 2, "both are told of")
        assert rig.card(0).uuid == "unknown-0"
        assert rig.card(0).blind
        await rig.until(lambda: rig.newest("gpu_power_watts", fake.gpus[1].uuid), "one is read")
        fake.unhang("nvmlDeviceGetUUID", gpu=0)
        await rig.until(lambda: rig.card(0).uuid == fake.gpus[0].uuid, "it gets its name")
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
        with pytest.raises(Gone):
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
        await rig.until(lambda: fake.calls("nvmlEventSetWait_v2") > polls + 3, "asked again")
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
    async with running(fake) as rig:
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
