"""The fake driver through unmodified pynvml: the library, handles, and what cards say."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.nvml import (
    MIB,
    PROFILES,
    RTX_4090,
    FakeNvml,
    Profile,
    build,
    layout,
)
from tests.fakes.nvml.client import (
    DEPRECATED,
    INVALID,
    LOST,
    MISMATCH,
    NOT_FOUND,
    NOT_LOADED,
    SECOND,
    START,
    TOO_SMALL,
    UNSUPPORTED,
    Client,
    answers,
    raw,
)

# ---- the library and the state ----


def test_layout_is_the_same_in_c_and_in_python(child: Client) -> None:
    rows = child(f"""
class Row(ctypes.Structure):
    _fields_ = [("owner", ctypes.c_char_p), ("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("size", ctypes.c_size_t)]
row = ctypes.CDLL({str(build.library("590"))!r}).fakeNvmlLayout
row.restype = ctypes.POINTER(Row)
rows = []
while row(len(rows)): rows.append(row(len(rows)).contents)
rows
""")
    told = {(row["owner"], row["name"]): (row["offset"], row["size"]) for row in rows}
    ours = {}
    for owner, struct in layout.STRUCTS.items():
        ours[owner, ""] = (0, ctypes.sizeof(struct))
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            ours[owner, name] = (field.offset, field.size)
    assert told == ours


def test_there_are_no_holes_in_the_layout() -> None:
    for struct in layout.STRUCTS.values():
        end = 0
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            assert field.offset == end, f"{struct.__name__}.{name}"
            end = field.offset + field.size


def test_symbols_are_those_of_the_real_libraries() -> None:
    """Counts of the real exports, without nvmlInternalGetExportTable (590 capture, 550 package)."""
    new, old = (set(build.symbols(build.library(variant))) for variant in ("590", "550"))
    assert (len(new), len(old)) == (404, 349)
    assert old < new
    assert {"nvmlDeviceGetTemperatureV", "nvmlDeviceGetDriverModel_v2"} <= new - old


def test_several_processes_may_build_at_once(tmp_path: Path) -> None:
    code = f"from tests.fakes.nvml import build; from pathlib import Path; print(build.library(into=Path({str(tmp_path)!r})))"
    builders = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {builder.communicate()[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert [Path(path).exists() for path in paths] == [True]
    assert len(list(tmp_path.iterdir())) == 1


def test_state_of_another_layout_is_a_version_mismatch(fake: FakeNvml, child: Client) -> None:
    fake.state.size += 8
    with answers(MISMATCH):
        child.use(fake.env)


@pytest.mark.parametrize("path", ["/nonexistent/nvml.state", "/dev/null"])
def test_without_a_state_file_the_driver_is_not_loaded(child: Client, path: str) -> None:
    with answers(NOT_LOADED):
        child.use({"GPUAGENT_FAKE_NVML": path})


# ---- handles ----


def test_every_way_to_a_handle_finds_the_same_card(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[2]
    assert nvml("p.nvmlDeviceGetCount()") == 4
    for handle in (
        "gpu(2)",
        f"p.nvmlDeviceGetHandleByUUID({card.uuid!r})",
        f"p.nvmlDeviceGetHandleByPciBusId({card.pci_bus_id!r})",
        f"p.nvmlDeviceGetHandleBySerial({card.raw.serial.decode()!r})",
    ):
        assert nvml(f"p.nvmlDeviceGetUUID({handle})") == card.uuid
        assert nvml(f"p.nvmlDeviceGetIndex({handle})") == 2


def test_wrong_handles_and_names(nvml: Client) -> None:
    for call in ("gpu(4)", "p.nvmlDeviceGetName(None)", "p.nvmlDeviceGetName(ctypes.c_void_p(64))"):
        with answers(INVALID):
            nvml(call)
    for call in (
        "p.nvmlDeviceGetHandleByUUID('GPU-none')",
        "p.nvmlDeviceGetHandleByPciBusId('0000:ff:00.0')",
        "p.nvmlDeviceGetHandleBySerial('1')",
    ):
        with answers(NOT_FOUND):
            nvml(call)


def test_strings_are_bounded_by_the_callers_buffer(nvml: Client) -> None:
    nvml("text = ctypes.create_string_buffer(22)\n1")
    name = "NVIDIA H100 80GB HBM3"
    assert nvml(raw("nvmlDeviceGetName", "gpu(0)", "text", str(len(name)))) == TOO_SMALL
    assert nvml(raw("nvmlDeviceGetName", "gpu(0)", "text", str(len(name) + 1))) == 0
    assert nvml("text.value") == name
    assert nvml(raw("nvmlDeviceGetName", "gpu(0)", "None", "22")) == INVALID


def test_a_card_that_appears_or_goes_is_seen_by_the_next_init(fake: FakeNvml, nvml: Client) -> None:
    nvml("h = gpu(1)\n1")
    fake.add_gpu(RTX_4090)
    fake.remove_gpu(fake.gpus[1])
    assert nvml("p.nvmlDeviceGetCount()") == 4
    with answers(LOST):
        nvml("p.nvmlDeviceGetName(h)")
    nvml.use(fake.env)
    names = nvml("[p.nvmlDeviceGetName(gpu(i)) for i in range(p.nvmlDeviceGetCount())]")
    assert names == [fake.gpus[i].profile.name for i in (0, 2, 3, 4)]
    assert nvml("p.nvmlDeviceGetMinorNumber(gpu(1))") == 2, "the index moves, the minor does not"


# ---- what cards say of themselves ----


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_profile_reads_back(tmp_path: Path, child: Client, profile: Profile) -> None:
    fake = FakeNvml.create(tmp_path, [profile], clock_us=START)
    child.use(fake.env)
    mhz, mw = 1_000_000, 1_000
    said = {
        "nvmlDeviceGetName(gpu(0))": profile.name,
        "nvmlDeviceGetBrand(gpu(0))": profile.brand,
        "nvmlDeviceGetArchitecture(gpu(0))": profile.architecture,
        "nvmlDeviceGetCudaComputeCapability(gpu(0))": [*profile.compute_capability],
        "nvmlDeviceGetNumGpuCores(gpu(0))": profile.cores,
        "nvmlDeviceGetMemoryBusWidth(gpu(0))": profile.memory_bus_bits,
        "nvmlDeviceGetVbiosVersion(gpu(0))": profile.vbios,
        "nvmlDeviceGetMultiGpuBoard(gpu(0))": 0,
        "nvmlDeviceGetPersistenceMode(gpu(0))": profile.persistence,
        "nvmlDeviceGetDisplayActive(gpu(0))": profile.display_active,
        "nvmlDeviceGetAccountingBufferSize(gpu(0))": 4000,
        "nvmlDeviceGetPowerManagementDefaultLimit(gpu(0))": profile.power_default_watts * mw,
        "nvmlDeviceGetPowerManagementLimit(gpu(0))": profile.power_default_watts * mw,
        "nvmlDeviceGetEnforcedPowerLimit(gpu(0))": profile.power_default_watts * mw,
        "nvmlDeviceGetPowerManagementLimitConstraints(gpu(0))": [
            profile.power_min_watts * mw,
            profile.power_max_watts * mw,
        ],
        "nvmlDeviceGetMaxClockInfo(gpu(0), p.NVML_CLOCK_SM)": profile.graphics_clock_max_hertz
        / mhz,
        "nvmlDeviceGetMaxClockInfo(gpu(0), p.NVML_CLOCK_MEM)": profile.memory_clock_max_hertz / mhz,
        "nvmlDeviceGetMaxClockInfo(gpu(0), p.NVML_CLOCK_VIDEO)": profile.video_clock_max_hertz
        / mhz,
        "nvmlDeviceGetMaxPcieLinkGeneration(gpu(0))": profile.pcie_generation_max,
        "nvmlDeviceGetMaxPcieLinkWidth(gpu(0))": 16,
        "nvmlDeviceGetTemperatureThreshold(gpu(0), 0)": profile.thresholds_celsius[0],
        "nvmlDeviceGetTemperatureThreshold(gpu(0), 1)": profile.thresholds_celsius[1],
        "nvmlDeviceGetTemperatureThreshold(gpu(0), 3)": profile.thresholds_celsius[3],
    }
    for call, value in said.items():
        assert child(f"p.{call}") == value, call


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_loaded_card_reads_back(tmp_path: Path, child: Client, profile: Profile) -> None:
    fake = FakeNvml.create(tmp_path, [profile], clock_us=START)
    fake.gpus[0].load()
    fake.clock_us = START + 2 * SECOND
    child.use(fake.env)
    loaded = profile.loaded
    memory = child("p.nvmlDeviceGetMemoryInfo(gpu(0), p.nvmlMemory_v2)")
    assert memory["used"] == loaded["memory_used_bytes"]
    assert memory["reserved"] == profile.memory_reserved_bytes
    assert memory["total"] == memory["used"] + memory["reserved"] + memory["free"]
    first = child("p.nvmlDeviceGetMemoryInfo(gpu(0))")
    assert first["used"] == memory["used"] + memory["reserved"]
    assert first["free"] == memory["free"]
    assert child("p.nvmlDeviceGetPowerUsage(gpu(0))") == pytest.approx(loaded["demand_watts"] * 1e3)
    assert child("p.nvmlDeviceGetTemperature(gpu(0), 0)") == loaded["temperature_celsius"]
    assert child("p.nvmlDeviceGetTemperatureV(gpu(0), 0)") == loaded["temperature_celsius"]
    for clock, name in enumerate(("graphics", "graphics", "memory", "video")):
        hertz = child(f"p.nvmlDeviceGetClockInfo(gpu(0), {clock})") * 1_000_000
        assert hertz == loaded[f"{name}_clock_hertz"]  # type: ignore[literal-required]
    assert child("p.nvmlDeviceGetPerformanceState(gpu(0))") == loaded["performance_state"]
    assert child("p.nvmlDeviceGetCurrPcieLinkGeneration(gpu(0))") == loaded["pcie_generation"]
    assert child("p.nvmlDeviceGetPcieReplayCounter(gpu(0))") == loaded["pcie_replays"]
    sent = child("p.nvmlDeviceGetPcieThroughput(gpu(0), p.NVML_PCIE_UTIL_TX_BYTES)")
    assert sent * 1024 == loaded["pcie_tx_bytes_per_second"]


def test_utilization(fake: FakeNvml, nvml: Client) -> None:
    fake.gpus[2].load()
    assert nvml("p.nvmlDeviceGetUtilizationRates(gpu(2))") == {"gpu": 9, "memory": 2}
    assert nvml("p.nvmlDeviceGetEncoderUtilization(gpu(2))")[0] == 59
    assert nvml("p.nvmlDeviceGetDecoderUtilization(gpu(2))")[0] == 0
    assert nvml("p.nvmlDeviceGetEncoderStats(gpu(2))") == [2, 243, 3_280_335]
    fake.gpus[2].set(utilization=0.9, decoder_utilization=0.25)
    assert nvml("p.nvmlDeviceGetUtilizationRates(gpu(2))")["gpu"] == 90
    assert nvml("p.nvmlDeviceGetDecoderUtilization(gpu(2))")[0] == 25


def test_what_a_card_does_not_have_is_not_supported(nvml: Client) -> None:
    for call in (
        "nvmlDeviceGetFanSpeed(gpu(0))",
        "nvmlDeviceGetMigMode(gpu(2))",
        "nvmlDeviceGetEccMode(gpu(3))",
        "nvmlDeviceGetTotalEccErrors(gpu(3), 1, 0)",
        "nvmlDeviceGetRemappedRows(gpu(3))",
        "nvmlDeviceGetRemappedRows(gpu(1))",  # so the capture says, under MIG
        "nvmlDeviceGetSerial(gpu(3))",
        "nvmlDeviceGetNvLinkState(gpu(2), 0)",
        "nvmlDeviceGetNumaNodeId(gpu(0))",
        "nvmlDeviceGetDriverModel(gpu(0))",
        "nvmlDeviceGetMarginTemperature(gpu(3))",
        "nvmlDeviceGetUtilizationRates(gpu(1))",
        "nvmlDeviceGetProcessUtilization(gpu(1), 0)",
        "nvmlGpmQueryDeviceSupport(gpu(0))",
    ):
        with answers(UNSUPPORTED):
            nvml(f"p.{call}")
    for call in ("nvmlDeviceGetDisplayMode(gpu(0))", "nvmlDeviceGetApplicationsClock(gpu(0), 0)"):
        with answers(DEPRECATED):
            nvml(f"p.{call}")


def test_heat_slows_the_clocks_and_says_so(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    assert nvml("p.nvmlDeviceGetMarginTemperature(gpu(0))") == 46, "as in the capture"
    assert nvml("p.nvmlDeviceGetCurrentClocksEventReasons(gpu(0))") == 0x1, "idle"
    card.load()
    assert nvml("p.nvmlDeviceGetCurrentClocksEventReasons(gpu(0))") == 0
    card.set(temperature_celsius=90, event_reasons=0x20)
    for name in ("Event", "Throttle"):
        assert nvml(f"p.nvmlDeviceGetCurrentClocks{name}Reasons(gpu(0))") == 0x8 | 0x40 | 0x20
        assert nvml(f"p.nvmlDeviceGetSupportedClocks{name}Reasons(gpu(0))") == 0x1FF


def test_fans(fake: FakeNvml, nvml: Client) -> None:
    fake.gpus[3].set(fan_ratio=0.37)
    assert nvml("p.nvmlDeviceGetNumFans(gpu(3))") == 2
    assert nvml("p.nvmlDeviceGetFanSpeed(gpu(3))") == 37
    assert nvml("p.nvmlDeviceGetFanSpeed_v2(gpu(3), 1)") == 37
    with answers(INVALID):
        nvml("p.nvmlDeviceGetFanSpeed_v2(gpu(3), 2)")


def test_memory_errors_and_remapped_rows(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    card.ecc_errors(3, corrected=True)
    card.ecc_errors(1, location="sram")
    card.remap_rows(corrected=2, uncorrected=1, pending=True)
    assert nvml("p.nvmlDeviceGetEccMode(gpu(0))") == [1, 1]
    assert nvml("p.nvmlDeviceGetTotalEccErrors(gpu(0), 0, 0)") == 3
    assert nvml("p.nvmlDeviceGetTotalEccErrors(gpu(0), 1, 1)") == 1
    assert nvml("p.nvmlDeviceGetMemoryErrorCounter(gpu(0), 1, 0, p.NVML_MEMORY_LOCATION_SRAM)") == 1
    assert nvml("p.nvmlDeviceGetMemoryErrorCounter(gpu(0), 0, 0, p.NVML_MEMORY_LOCATION_DRAM)") == 3
    assert nvml("p.nvmlDeviceGetDetailedEccErrors(gpu(0), 0, 0)")["deviceMemory"] == 3
    assert nvml("p.nvmlDeviceGetRemappedRows(gpu(0))") == [2, 1, 1, 0]
    assert nvml("p.nvmlDeviceGetRowRemapperHistogram(gpu(0))")["max"] == 2560
    nvml("p.nvmlDeviceClearEccErrorCounts(gpu(0), 0)")
    assert nvml("p.nvmlDeviceGetTotalEccErrors(gpu(0), 0, 0)") == 0
    assert nvml("p.nvmlDeviceGetTotalEccErrors(gpu(0), 0, 1)") == 3, "the aggregate stays"


def test_pci(fake: FakeNvml, nvml: Client) -> None:
    info = nvml("p.nvmlDeviceGetPciInfo(gpu(0))")
    assert (info["busId"], info["busIdLegacy"]) == ("00000000:00:09.0", "0000:00:09.0")
    assert (info["pciDeviceId"], info["pciSubSystemId"]) == (0x233010DE, 0x16C110DE)
    assert nvml("p.nvmlDeviceGetBoardId(gpu(0))") == 0x9, "as in the capture"
    extended = """
info = p.nvmlPciInfoExt_v1_t(p.nvmlPciInfoExt_v1)
p.nvmlDeviceGetPciInfoExt(gpu(0), ctypes.byref(info))
info
"""
    assert nvml(extended)["subClass"] == 2
    assert nvml(extended)["busId"] == "00000000:00:09.0"
    assert len({gpu.pci_bus_id for gpu in fake.gpus}) == 4


def test_topology(fake: FakeNvml, nvml: Client) -> None:
    one, two, three, _ = fake.gpus
    fake.connect(one, two, level="single", nvlinks=2)
    fake.connect(one, three, level="system")
    assert nvml("p.nvmlDeviceGetTopologyCommonAncestor(gpu(0), gpu(1))") == 10
    assert nvml("p.nvmlDeviceGetTopologyCommonAncestor(gpu(2), gpu(0))") == 50
    assert nvml("p.nvmlDeviceGetTopologyCommonAncestor(gpu(2), gpu(3))") == 40
    assert nvml("p.nvmlDeviceGetP2PStatus(gpu(0), gpu(1), p.NVML_P2P_CAPS_INDEX_NVLINK)") == 0
    assert nvml("p.nvmlDeviceGetP2PStatus(gpu(0), gpu(2), p.NVML_P2P_CAPS_INDEX_NVLINK)") == 5
    nearest = "p.nvmlDeviceGetTopologyNearestGpus(gpu(0), 10)"
    assert nvml(f"[p.nvmlDeviceGetUUID(h) for h in {nearest}]") == [two.uuid]
    assert nvml("p.nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), 1)")["busId"] == two.pci_bus_id
    assert nvml("p.nvmlDeviceGetCpuAffinity(gpu(0), 2)") == [0xFFFFF, 0], "CPUs 0-19"
    assert nvml("p.nvmlDeviceGetMemoryAffinity(gpu(0), 1, 0)") == [1]


def test_nvlink(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    card.add_link_traffic(tx_bytes=4 * MIB, rx_bytes=MIB, links=range(18))
    card.link_errors(3, "replay", 7)
    card.set_link(17, active=False)
    assert nvml("[p.nvmlDeviceGetNvLinkState(gpu(0), i) for i in (0, 17)]") == [1, 0]
    assert nvml("p.nvmlDeviceGetNvLinkVersion(gpu(0), 0)") == 6
    assert nvml("p.nvmlDeviceGetNvLinkRemoteDeviceType(gpu(0), 0)") == 2, "a switch"
    assert nvml("p.nvmlDeviceGetNvLinkErrorCounter(gpu(0), 3, 0)") == 7
    with answers(INVALID):
        nvml("p.nvmlDeviceGetNvLinkState(gpu(0), 18)")
    everywhere = 2**32 - 1
    fields = [(138, 0), (139, 0), (140, 0), (138, everywhere), (161, 3), 90, 91]
    values = nvml(f"p.nvmlDeviceGetFieldValues(gpu(0), {fields})")
    assert [value["value"]["ullVal"] for value in values[:5]] == [4096, 1024, 4505, 18 * 4096, 7]
    assert [value["value"]["uiVal"] for value in values[5:]] == [26562, 18]


def test_field_values(fake: FakeNvml, nvml: Client) -> None:
    fake.gpus[0].add_pcie_traffic(tx_bytes=5000)
    fields = "[1, 82, 83, 94, 142, 185, 186, 187, 188, 189, 190, 192, 193, 194, 196, 197, 9999]"
    values = nvml(f"p.nvmlDeviceGetFieldValues(gpu(0), {fields})")
    unsigned = {value["fieldId"]: value["value"]["uiVal"] for value in values}
    signed = {value["fieldId"]: value["value"]["siVal"] for value in values}
    assert (unsigned[1], unsigned[82], unsigned[94], unsigned[197]) == (1, 48, 9, 5000)
    assert [unsigned[i] for i in range(185, 191)] == [69850, 69850, 200000, 700000, 700000, 700000]
    assert [signed[i] for i in (193, 194, 196)] == [-8, -2, 0], "as in the capture"
    assert [value["nvmlReturn"] for value in values] == [0] * 16 + [UNSUPPORTED]
    assert {value["timestamp"] for value in values} == {START}
    (hot,) = nvml("p.nvmlDeviceGetFieldValues(gpu(3), [82])")
    assert hot["nvmlReturn"] == UNSUPPORTED
