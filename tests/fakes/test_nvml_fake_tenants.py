"""The fake driver: processes and MIG."""

import os

import pytest

from tests.fakes.nvml import (
    GIB,
    H100_MIG,
    MIB,
    FakeNvml,
)
from tests.fakes.nvml.client import (
    IN_USE,
    INVALID,
    NOT_FOUND,
    SECOND,
    START,
    TOO_SMALL,
    UNSUPPORTED,
    Client,
    answers,
    raw,
)

# ---- processes ----


def test_process_lists(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    card.add_process(11, memory_bytes=2 * GIB)
    card.add_process(12, kind="compute+graphics", memory_bytes=None)
    card.add_process(13, kind="mps", memory_bytes=GIB)
    card.add_process(14, kind="graphics", memory_bytes=0)
    listed = nvml("p.nvmlDeviceGetComputeRunningProcesses(gpu(0))")
    assert [(entry["pid"], entry["usedGpuMemory"]) for entry in listed] == [
        (11, 2 * GIB),
        (12, None),
    ]
    assert listed[0]["gpuInstanceId"] == 2**32 - 1
    for call, pids in (
        ("Graphics", [12, 14]),
        ("MPSCompute", [13]),
    ):
        found = nvml(f"p.nvmlDeviceGet{call}RunningProcesses(gpu(0))")
        assert [entry["pid"] for entry in found] == pids
    card.add_process(11, memory_bytes=GIB)
    card.remove_process(12)
    listed = nvml("p.nvmlDeviceGetComputeRunningProcesses_v2(gpu(0))")
    assert [(entry["pid"], entry["usedGpuMemory"]) for entry in listed] == [(11, GIB)]
    assert card.pids == [13, 14, 11]
    with pytest.raises(KeyError):
        card.remove_process(12)


def test_lists_tell_how_much_room_they_want(fake: FakeNvml, nvml: Client) -> None:
    for pid in (11, 12, 13):
        fake.gpus[0].add_process(pid)
    nvml("count, room = ctypes.c_uint(0), (p.c_nvmlProcessInfo_v3_t * 8)()\n1")
    call = raw("nvmlDeviceGetComputeRunningProcesses_v3", "gpu(0)", "ctypes.byref(count)", "room")
    nothing = call.replace("room", "None")
    assert nvml(f"[{nothing}, count.value]") == [TOO_SMALL, 3]
    assert nvml(f"count.value = 2\n[{call}, count.value, room[1].pid]") == [TOO_SMALL, 3, 12]
    assert nvml(f"count.value = 8\n[{call}, count.value, room[2].pid]") == [0, 3, 13]
    for pid in (11, 12, 13):
        fake.gpus[0].remove_process(pid)
    assert nvml(f"count.value = 0\n[{nothing}, count.value]") == [0, 0]


def test_process_utilization_wants_the_last_timestamp_back(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    call = "p.nvmlDeviceGetProcessUtilization(gpu(0), {})"
    with answers(NOT_FOUND):
        nvml(call.format(0))
    card.utilization_sample(11, sm=0.9, memory=0.4)
    fake.clock_us += SECOND
    card.utilization_sample(11, sm=0.8, memory=0.3)
    card.utilization_sample(12, encoder=0.5, decoder=0.25)
    samples = {sample["pid"]: sample for sample in nvml(call.format(0))}
    assert (samples[11]["smUtil"], samples[11]["memUtil"]) == (80, 30), "the last one of each"
    assert (samples[12]["encUtil"], samples[12]["decUtil"]) == (50, 25)
    assert samples[12]["timeStamp"] == START + SECOND
    assert len(nvml(call.format(START + SECOND - 1))) == 2
    with answers(NOT_FOUND):
        nvml(call.format(START + SECOND))
    info = nvml("p.nvmlDeviceGetProcessesUtilizationInfo(gpu(0), 0)")
    assert {entry["pid"]: entry["smUtil"] for entry in info} == {11: 80, 12: 0}
    for number in range(300):
        card.utilization_sample(100 + number, sm=0.1)
    assert len(nvml(call.format(0))) == 256, "the ring"


def test_accounting(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[0]
    card.account(
        18679, utilization=0.99, memory_utilization=0.13, memory_bytes=MIB, seconds=153.712
    )
    with answers(UNSUPPORTED):
        nvml("p.nvmlDeviceGetAccountingPids(gpu(0))")
    nvml("p.nvmlDeviceSetAccountingMode(gpu(0), 1)")
    assert card.accounting
    assert nvml("p.nvmlDeviceGetAccountingPids(gpu(0))") == [18679]
    stats = nvml("p.nvmlDeviceGetAccountingStats(gpu(0), 18679)")
    assert (stats["gpuUtilization"], stats["memoryUtilization"]) == (99, 13)
    assert (stats["time"], stats["maxMemoryUsage"], stats["isRunning"]) == (153_712, MIB, 0)
    assert stats["startTime"] == START - 153_712_000
    with answers(NOT_FOUND):
        nvml("p.nvmlDeviceGetAccountingStats(gpu(0), 1)")
    nvml("p.nvmlDeviceClearAccountingPids(gpu(0))")
    assert nvml("p.nvmlDeviceGetAccountingPids(gpu(0))") == []


# ---- MIG ----


def test_mig_devices(fake: FakeNvml, nvml: Client) -> None:
    card = fake.gpus[1]
    card.load()
    assert nvml("p.nvmlDeviceGetMigMode(gpu(1))") == [1, 1]
    assert nvml("p.nvmlDeviceGetMigMode(gpu(0))") == [0, 0]
    assert nvml("[p.nvmlDeviceGetMaxMigDeviceCount(gpu(i)) for i in (1, 2)]") == [7, 0]
    assert nvml("[p.nvmlDeviceGetUUID(mig(1, j)) for j in range(4)]") == card.mig_uuids
    assert nvml("p.nvmlDeviceGetName(mig(1, 0))") == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    ids = "[[f(mig(1, j)) for j in range(4)] for f in (p.nvmlDeviceGetGpuInstanceId, p.nvmlDeviceGetComputeInstanceId, p.nvmlDeviceGetIndex)]"
    assert nvml(ids) == [[2, 3, 9, 10], [0] * 4, [0, 1, 2, 3]]
    memory = nvml("p.nvmlDeviceGetMemoryInfo(mig(1, 0))")
    assert (memory["total"], memory["used"]) == (40_448 * MIB, 11_091 * MIB)
    attributes = nvml("p.nvmlDeviceGetAttributes(mig(1, 1))")
    assert (attributes["multiprocessorCount"], attributes["memorySizeMB"]) == (32, 20_096)
    assert nvml("[p.nvmlDeviceIsMigDeviceHandle(h).value for h in (gpu(1), mig(1, 0))]") == [0, 1]
    parent = "p.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig(1, 3))"
    assert nvml(f"p.nvmlDeviceGetUUID({parent})") == card.uuid
    assert nvml(f"p.nvmlDeviceGetIndex(p.nvmlDeviceGetHandleByUUID({card.mig_uuids[2]!r}))") == 2
    with answers(NOT_FOUND):
        nvml("mig(1, 4)")
    with answers(INVALID):
        nvml("mig(1, 7)")
    with answers(UNSUPPORTED):
        nvml("p.nvmlDeviceGetPowerUsage(mig(1, 0))")


def test_processes_under_mig(fake: FakeNvml, nvml: Client) -> None:
    fake.gpus[1].add_process(21180, memory_bytes=2296 * MIB, mig=0)
    fake.gpus[1].add_process(21181, memory_bytes=9 * MIB, mig=3)
    entries = nvml("p.nvmlDeviceGetComputeRunningProcesses(gpu(1))")
    assert [(entry["pid"], entry["gpuInstanceId"]) for entry in entries] == [
        (21180, 2),
        (21181, 10),
    ]
    inside = nvml("p.nvmlDeviceGetComputeRunningProcesses(mig(1, 3))")
    assert [(entry["pid"], entry["computeInstanceId"]) for entry in inside] == [(21181, 0)]


def test_mig_can_be_changed_only_when_nobody_holds_the_card(fake: FakeNvml, nvml: Client) -> None:
    with pytest.raises(OSError, match="in use"):
        fake.gpus[0].configure_mig(H100_MIG.migs)
    nvml("h = mig(1, 0)\n1")
    nvml("p.nvmlShutdown()")
    fake.gpus[0].configure_mig(H100_MIG.migs[:2])
    fake.gpus[1].configure_mig([])
    nvml("p.nvmlInit()")
    assert nvml("p.nvmlDeviceGetMigMode(gpu(0))") == [1, 1]
    assert len(fake.gpus[0].mig_uuids) == 2
    with answers(INVALID):
        nvml("p.nvmlDeviceGetMemoryInfo(h)")


def test_setting_the_mig_mode_waits_for_other_clients(fake: FakeNvml, nvml: Client) -> None:
    with Client(os.environ | fake.env) as other:
        other("p.nvmlInit()")
        assert nvml("p.nvmlDeviceSetMigMode(gpu(0), 1)") == IN_USE
        assert nvml("p.nvmlDeviceGetMigMode(gpu(0))") == [0, 1]
        other("p.nvmlShutdown()")
    assert nvml("p.nvmlDeviceSetMigMode(gpu(0), 1)") == 0
    assert nvml("p.nvmlDeviceGetMigMode(gpu(0))") == [1, 1]
