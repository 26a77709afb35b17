"""host.nvml over the fake driver: what is read, how often, and what is told of it."""

import psutil
import pytest

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
    RTX_4090,
)
from tests.host.nvml_rig import Driver, Rig, running, until

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
    gpu.add_process(11, kind="compute", memory_bytes=11 * MIB)
    gpu.add_process(12, kind="graphics", memory_bytes=12 * MIB)
    gpu.add_process(13, kind="mps", memory_bytes=13 * MIB)
    gpu.add_process(14, kind="compute+graphics", memory_bytes=14 * MIB)
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
        await rig.until(
            lambda: sum(r.signal.name == "gpu_temperature_celsius" for r in rig.readings) >= 3,
            "temperature is read again and again",
        )
        assert rig.error is None
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


async def test_the_child_is_small(driver: Driver) -> None:
    fake = driver(*[H100_80GB] * 8)
    async with running(fake) as rig:
        assert len(await rig.known()) == 8
        assert rig.gpus.child is not None
        assert psutil.Process(rig.gpus.child).memory_info().rss < 32 * MIB


async def test_samples_between_two_drains_are_kept_but_not_without_bound(driver: Driver) -> None:
    fake = driver(RTX_4090)
    async with running(fake, sample_interval=0.02) as rig:
        await rig.known()
        before = fake.calls("nvmlDeviceGetPowerUsage")
        await until(lambda: fake.calls("nvmlDeviceGetPowerUsage") >= before + 80)
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
        await rig.until(lambda: fake.calls("nvmlEventSetWait_v2") > polls + 1, "asked again")
        expected = [(fake.gpus[0].uuid, 13.0)] + [
            (fake.gpus[1].uuid, x) for x in (31.0, 31.0, 43.0)
        ]
        assert told() == sorted(expected)
