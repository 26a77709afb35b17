"""The fake driver: power, energy, and what root can set."""

import itertools
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.nvml import (
    H100_80GB,
    FakeNvml,
)
from tests.fakes.nvml.client import (
    INVALID,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_LOADED,
    SECOND,
    START,
    UNSUPPORTED,
    Client,
    answers,
    raw,
)

# ---- power and energy ----


def test_the_limit_bites_after_its_delay(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    card.load()
    fake.clock_us = START + 2 * SECOND
    nvml("p.nvmlDeviceSetPowerManagementLimit(gpu(0), 300000)")
    assert card.power_limit_watts == 300
    assert nvml("p.nvmlDeviceGetPowerManagementLimit(gpu(0))") == 300_000
    assert nvml("p.nvmlDeviceGetEnforcedPowerLimit(gpu(0))") == 700_000, "not yet"
    assert card.draw_watts == 629.45
    fake.clock_us += 100_000
    assert nvml("p.nvmlDeviceGetEnforcedPowerLimit(gpu(0))") == 300_000
    assert card.draw_watts == 300
    average, instant = nvml("p.nvmlDeviceGetFieldValues(gpu(0), [185, 186])")
    assert instant["value"]["uiVal"] == 300_000
    assert average["value"]["uiVal"] == 629_450
    fake.clock_us += SECOND // 2
    assert nvml("p.nvmlDeviceGetPowerUsage(gpu(0))") == (629_450 + 300_000) // 2
    assert nvml("p.nvmlDeviceGetCurrentClocksEventReasons(gpu(0))") == 0x4
    violation = nvml("p.nvmlDeviceGetViolationStatus(gpu(0), 0)")
    assert violation["violationTime"] == SECOND // 2 * 1000


def test_the_limit_is_checked(fake: FakeNvml, nvml: Client) -> None:
    for milliwatts in (199_999, 700_001):
        with answers(INVALID):
            nvml(f"p.nvmlDeviceSetPowerManagementLimit(gpu(0), {milliwatts})")
    fake.privileged = False
    with answers(NO_PERMISSION):
        nvml("p.nvmlDeviceSetPowerManagementLimit(gpu(0), 300000)")
    fake.gpus[0].raw.power_management = 0
    with answers(UNSUPPORTED):
        nvml("p.nvmlDeviceSetPowerManagementLimit(gpu(0), 300000)")
    assert fake.gpus[0].power_limit_watts == 700
    fake.privileged = True
    scoped = "value = p.c_nvmlPowerValue_v2_t(p.nvmlPowerValue_v2, 0, 300000)\n"
    assert (
        nvml(scoped + raw("nvmlDeviceSetPowerManagementLimit_v2", "gpu(2)", "ctypes.byref(value)"))
        == 0
    )
    assert fake.gpus[2].power_limit_watts == 300


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_process_that_is_not_root_may_read_only(fake: FakeNvml, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    fake.path.chmod(0o666)
    with Client(os.environ | fake.env) as client:
        client("p.nvmlInit()\nos.seteuid(65534)")
        assert client("p.nvmlDeviceGetPowerManagementLimit(gpu(0))") == 700_000
        with answers(NO_PERMISSION):
            client("p.nvmlDeviceSetPowerManagementLimit(gpu(0), 300000)")


def test_a_limiter_outside_nvml_lowers_what_is_enforced(fake: FakeNvml, nvml: Client) -> None:
    fake.gpus[0].load()
    fake.gpus[0].set(board_cap_watts=400)
    assert nvml("p.nvmlDeviceGetPowerManagementLimit(gpu(0))") == 700_000
    assert nvml("p.nvmlDeviceGetEnforcedPowerLimit(gpu(0))") == 400_000
    assert fake.gpus[0].draw_watts == 400


def test_settings_are_lost_with_the_driver(fake: FakeNvml, nvml: Client) -> None:
    for index in (0, 2):
        nvml(f"p.nvmlDeviceSetPowerManagementLimit(gpu({index}), 250000)")
    nvml("p.nvmlDeviceSetGpuLockedClocks(gpu(2), 300, 900)")
    assert fake.deinitialise_idle_gpus() == [], "somebody holds the library"
    nvml("p.nvmlShutdown()")
    assert fake.deinitialise_idle_gpus() == [fake.gpus[2], fake.gpus[3]]
    assert [fake.gpus[index].power_limit_watts for index in (0, 2)] == [250, 350]
    assert fake.gpus[2].locked_clocks_hertz is None
    fake.unload_driver()
    with answers(NOT_LOADED):
        nvml("p.nvmlInit()")
    fake.load_driver()
    nvml("p.nvmlInit()")
    assert nvml("p.nvmlDeviceGetPowerManagementLimit(gpu(0))") == 700_000
    assert nvml("p.nvmlDeviceGetPersistenceMode(gpu(0))") == 0


Change = tuple[int, str, int]
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 3 * SECOND),
        st.sampled_from(["demand", "limit", "limit by nvml", "cap"]),
        st.integers(200, 700),
    ),
    max_size=100,
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=CHANGES)
def test_energy_is_the_integral_of_power(
    fake: FakeNvml, nvml: Client, changes: list[Change]
) -> None:
    """Against a slow integral in small steps of what the card is told to do."""
    card = fake.gpus[0]
    before = nvml("p.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    joules = 0.0
    for wait, what, watts in changes:
        joules += _draw(fake, fake.clock_us, wait)
        fake.clock_us += wait
        if what == "demand":
            card.set(demand_watts=watts)
        elif what == "limit":
            card.power_limit_watts = watts
        elif what == "cap":
            card.set(board_cap_watts=watts)
        else:
            nvml(f"p.nvmlDeviceSetPowerManagementLimit(gpu(0), {watts * 1000})")
    after = nvml("p.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    assert after - before == pytest.approx(joules * 1e3, abs=1 + 1e-6 * joules)
    assert card.energy_joules == after / 1e3, "C and Python agree"
    instant = nvml("p.nvmlDeviceGetFieldValues(gpu(0), [186])")[0]["value"]["uiVal"]
    assert card.draw_watts == instant / 1e3


def _draw(fake: FakeNvml, start_us: int, wait_us: int) -> float:
    """Joules drawn in the time to come, from the rules alone: no ring, no steps."""
    card = fake.gpus[0].raw
    ends = sorted({start_us, start_us + wait_us, card.limit_from_us})
    ends = [end for end in ends if start_us <= end <= start_us + wait_us]
    joules = 0.0
    for begin, end in itertools.pairwise(ends):
        limit = card.limit_mw if begin >= card.limit_from_us else card.limit_before_mw
        limit = min(limit, card.board_cap_mw or limit)
        joules += min(card.demand_mw, limit) / 1e3 * (end - begin) / SECOND
    return joules


def test_energy_survives_a_change_of_clocks(tmp_path: Path, child: Client) -> None:
    fake = FakeNvml.create(tmp_path, [H100_80GB])
    child.use(fake.env)
    first = child("p.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    time.sleep(0.05)
    second = child("p.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    assert 3_400 <= second - first < 70_000, "69.85 W for 50 ms or a little more"
    fake.clock_us = 5 * SECOND
    third = child("p.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    fake.clock_us += 10 * SECOND
    assert second <= third
    assert child("p.nvmlDeviceGetTotalEnergyConsumption(gpu(0))") - third == 698_500


def test_samples(fake: FakeNvml, nvml: Client) -> None:
    fake.clock_us += 10 * SECOND
    fake.gpus[0].load()
    fake.clock_us += SECOND
    kind, samples = nvml(f"p.nvmlDeviceGetSamples(gpu(0), 0, {START + 9 * SECOND})")
    assert kind == 1
    assert [sample["sampleValue"]["uiVal"] for sample in samples] == [69_850] * 9 + [629_450] * 11
    with answers(NOT_FOUND):
        nvml(f"p.nvmlDeviceGetSamples(gpu(0), 1, {fake.clock_us})")


# ---- settings ----


def test_clocks_can_be_locked_and_not_read_back(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    card.load()
    nvml("p.nvmlDeviceSetGpuLockedClocks(gpu(0), 300, 1200)")
    nvml("p.nvmlDeviceSetMemoryLockedClocks(gpu(0), 1593, 9999)")
    assert card.locked_clocks_hertz == (300_000_000, 1_200_000_000)
    assert card.locked_memory_clocks_hertz == (1_593_000_000, 2_619_000_000)
    assert nvml("p.nvmlDeviceGetClockInfo(gpu(0), p.NVML_CLOCK_SM)") == 1200
    assert nvml("p.nvmlDeviceGetClock(gpu(0), p.NVML_CLOCK_GRAPHICS, 0)") == 1200
    for low, high in ((900, 300), (5000, 6000)):
        with answers(INVALID):
            nvml(f"p.nvmlDeviceSetGpuLockedClocks(gpu(0), {low}, {high})")
    nvml("p.nvmlDeviceResetGpuLockedClocks(gpu(0))")
    nvml("p.nvmlDeviceResetMemoryLockedClocks(gpu(0))")
    assert [card.locked_clocks_hertz, card.locked_memory_clocks_hertz] == [None, None]
    assert nvml("p.nvmlDeviceGetClockInfo(gpu(0), p.NVML_CLOCK_SM)") == 1980
    fake.privileged = False
    with answers(NO_PERMISSION):
        nvml("p.nvmlDeviceResetGpuLockedClocks(gpu(0))")


def test_modes(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[2]
    for what, field in (("Persistence", "persistence"), ("Compute", "compute_mode")):
        value = 3 if what == "Compute" else 1
        nvml(f"p.nvmlDeviceSet{what}Mode(gpu(2), {value})")
        assert nvml(f"p.nvmlDeviceGet{what}Mode(gpu(2))") == value
        assert getattr(card, field) == value
        with answers(INVALID):
            nvml(f"p.nvmlDeviceSet{what}Mode(gpu(2), 7)")
    with answers(INVALID):
        nvml("p.nvmlDeviceSetComputeMode(gpu(2), 1)")
    nvml("p.nvmlDeviceSetEccMode(gpu(2), 0)")
    assert nvml("p.nvmlDeviceGetEccMode(gpu(2))") == [1, 0]


def test_supported_clocks(nvml: Client) -> None:
    (memory,) = nvml("p.nvmlDeviceGetSupportedMemoryClocks(gpu(0))")
    graphics = nvml(f"p.nvmlDeviceGetSupportedGraphicsClocks(gpu(0), {memory})")
    assert (memory, graphics[0], graphics[-1]) == (2619, 1980, 210)
