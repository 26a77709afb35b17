"""The fake driver: initialising, events, faults, and many processes at once."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import (
    GIB,
    L40S,
    FakeNvml,
)
from tests.fakes.nvml.client import (
    INVALID,
    LOST,
    NO_FUNCTION,
    NOT_FOUND,
    NOT_LOADED,
    RESET,
    TIMEOUT,
    UNINITIALIZED,
    UNSUPPORTED,
    Client,
    answers,
)
from tests.stage import until

# ---- initialising ----


def test_calls_before_init_and_after_shutdown_are_uninitialized(nvml: Client) -> None:
    nvml("h = gpu(0)\np.nvmlInit()")
    nvml("p.nvmlShutdown()")
    assert nvml("p.nvmlDeviceGetCount()") == 4, "initialised twice, shut down once"
    nvml("p.nvmlShutdown()")
    for call in ("p.nvmlDeviceGetCount()", "p.nvmlDeviceGetName(h)", "p.nvmlEventSetCreate()"):
        with answers(UNINITIALIZED):
            nvml(call)
    nvml("p.nvmlInit()")
    assert nvml("p.nvmlDeviceGetName(h)") == "NVIDIA H100 80GB HBM3"


def test_error_strings(nvml: Client) -> None:
    assert nvml("p.nvmlErrorString(15)") == "GPU is lost"
    assert nvml("p.nvmlErrorString(26)") == "Requested functionality has been deprecated"
    assert nvml("p.nvmlErrorString(4711)") == "Unknown Error"
    assert all(nvml(f"p.nvmlErrorString({code})") != "Unknown Error" for code in range(30))


def test_versions(nvml: Client) -> None:
    assert nvml("p.nvmlSystemGetDriverVersion()") == "590.48.01"
    assert nvml("p.nvmlSystemGetNVMLVersion()") == "13.590.48.01"
    assert nvml("p.nvmlSystemGetCudaDriverVersion_v2()") == 13010
    assert nvml("p.nvmlSystemGetProcessName(os.getpid())") == sys.executable
    with answers(NOT_FOUND):
        nvml("p.nvmlSystemGetProcessName(2**22 + 1)")


def test_550_lacks_newer_symbols(tmp_path: Path) -> None:
    fake = FakeNvml.create(tmp_path, [L40S], variant="550")
    with Client(os.environ | fake.env) as old:
        old("p.nvmlInit()")
        assert old("p.nvmlSystemGetDriverVersion()") == "550.163.01"
        with answers(NO_FUNCTION):  # from pynvml itself
            old("p.nvmlDeviceGetTemperatureV(gpu(0), 0)")
        assert old("p.nvmlDeviceGetTemperature(gpu(0), 0)") == 50
        with pytest.raises(KeyError):
            fake.calls("nvmlDeviceGetTemperatureV")


def test_holders_are_the_live_processes_that_hold_the_library(fake: FakeNvml) -> None:
    with Client(os.environ | fake.env) as one, Client(os.environ | fake.env) as two:
        one("p.nvmlInit()")
        two("p.nvmlInit()\np.nvmlInit()")
        assert fake.holders == sorted([one.pid, two.pid])
        with pytest.raises(OSError, match="in use"):
            fake.unload_driver()
        one("p.nvmlShutdown()")
        assert fake.holders == [two.pid]
        two.kill()
        assert fake.holders == []
    fake.unload_driver()


def test_a_forked_child_counts_as_a_holder_once_it_calls(fake: FakeNvml) -> None:
    with Client(os.environ | fake.env) as parent:
        parent("p.nvmlInit()")
        held = parent("""
read, write = os.pipe()
pid = os.fork()
if pid == 0: p.nvmlDeviceGetCount(); os.write(write, b"x"); time.sleep(60); os._exit(0)
os.read(read, 1)
pid
""")
        assert fake.holders == sorted([parent.pid, held])
        os.kill(held, signal.SIGKILL)
        parent("os.waitpid(pid, 0)[0]")
        assert fake.holders == [parent.pid]


# ---- events ----

CREATE = """
events = p.nvmlEventSetCreate()
for i in range(p.nvmlDeviceGetCount()): p.nvmlDeviceRegisterEvents(gpu(i), p.nvmlEventTypeXidCriticalError, events)
1
"""


def wait(client: Client, milliseconds: int = 0, *, events: str = "events") -> tuple[int, int]:
    """XID and card of the next event."""
    event: list[Any] = client(
        f"e = p.nvmlEventSetWait_v2({events}, {milliseconds})\n"
        "[e.eventType, e.eventData, p.nvmlDeviceGetIndex(e.device)]"
    )
    assert event[0] == 8
    return event[1], event[2]


def test_every_event_set_gets_each_xid_once(fake: FakeNvml, nvml: Client) -> None:
    fake.gpus[0].xid(13)
    nvml(CREATE)
    nvml("other = p.nvmlEventSetCreate()\n1")
    fake.gpus[2].xid(14)
    nvml("p.nvmlDeviceRegisterEvents(gpu(2), 8, other)")
    with Client(os.environ | fake.env) as second:
        second("p.nvmlInit()")
        second(CREATE)
        for code in (31, 31, 48):
            fake.gpus[2].xid(code)
        fake.gpus[3].xid(43)
        for client in (nvml, second):
            heard = [(31, 2), (31, 2), (48, 2), (43, 3)]
            heard = [(14, 2), *heard] if client is nvml else heard
            assert [wait(client) for _ in heard] == heard
            with answers(TIMEOUT):
                wait(client)
    assert [wait(nvml, events="other") for _ in range(3)] == [(31, 2), (31, 2), (48, 2)]
    with answers(TIMEOUT):
        wait(nvml, events="other")
    nvml("p.nvmlEventSetFree(other)")
    with answers(INVALID):
        wait(nvml, events="other")


def test_event_types(nvml: Client) -> None:
    nvml(CREATE)
    assert nvml("p.nvmlDeviceGetSupportedEventTypes(gpu(0))") == 0x1F
    assert nvml("p.nvmlDeviceGetSupportedEventTypes(gpu(3))") == 0x1C
    with answers(UNSUPPORTED):
        nvml("p.nvmlDeviceRegisterEvents(gpu(3), p.nvmlEventTypeDoubleBitEccError, events)")
    with answers(INVALID):
        nvml("p.nvmlDeviceRegisterEvents(gpu(0), 8, None)")


def test_an_event_ends_a_wait(fake: FakeNvml, nvml: Client) -> None:
    nvml(CREATE)
    nvml.send("p.nvmlEventSetWait_v2(events, 20000).eventData")
    time.sleep(0.1)
    began = time.monotonic()
    fake.gpus[0].event(0x10, 1)  # a clock change, not asked for
    fake.gpus[0].xid(79)
    assert nvml.receive() == 79
    assert time.monotonic() - began < 5
    assert fake.calls("nvmlEventSetWait_v2") == 1
    began = time.monotonic()
    with answers(TIMEOUT):
        wait(nvml, 150)
    assert time.monotonic() - began >= 0.15


def test_a_lost_card_ends_a_wait_after_its_xid(fake: FakeNvml, nvml: Client) -> None:
    nvml(CREATE)
    fake.gpus[1].xid(79, mig=2)
    fake.gpus[1].lose()
    event = nvml("p.nvmlEventSetWait_v2(events, 0)")
    assert (event["eventData"], event["gpuInstanceId"]) == (79, 9)
    with answers(LOST):
        nvml("p.nvmlEventSetWait_v2(events, 10000)")


# ---- faults ----


def test_lost_and_reset(fake: FakeNvml, nvml: Client) -> None:
    nvml("h = gpu(0)\n1")
    fake.gpus[0].lose()
    for call in ("p.nvmlDeviceGetName(h)", "p.nvmlDeviceGetPowerUsage(h)", "gpu(0)"):
        with answers(LOST):
            nvml(call)
    assert nvml("p.nvmlDeviceGetCount()") == 4
    assert nvml("p.nvmlDeviceGetIndex(gpu(1))") == 1
    fake.gpus[0].require_reset()
    with answers(RESET):
        nvml("p.nvmlDeviceGetPowerUsage(gpu(0))")
    fake.gpus[0].recover()
    assert nvml("p.nvmlDeviceGetPowerUsage(h)") == 69_850


def test_the_driver_can_go_from_under_its_clients(fake: FakeNvml, nvml: Client) -> None:
    nvml("h = gpu(0)\n1")
    fake.unload_driver(force=True)
    with answers(NOT_LOADED):
        nvml("p.nvmlDeviceGetName(h)")
    nvml("p.nvmlShutdown()")
    assert fake.holders == []


def test_any_function_can_fail_on_any_card(fake: FakeNvml, nvml: Client) -> None:
    fake.fail("nvmlDeviceGetUtilizationRates", 999, gpu=2)
    assert nvml("p.nvmlDeviceGetUtilizationRates(gpu(0))")["gpu"] == 0
    with answers(999):
        nvml("p.nvmlDeviceGetUtilizationRates(gpu(2))")
    fake.fail("nvmlDeviceGetUtilizationRates", LOST)
    with answers(LOST):
        nvml("p.nvmlDeviceGetUtilizationRates(gpu(0))")
    fake.fail("nvmlDeviceGetUtilizationRates", 0)
    assert nvml("p.nvmlDeviceGetUtilizationRates(gpu(2))")["gpu"] == 0
    fake.fail("nvmlDeviceGetCount_v2", 999)
    with answers(999):
        nvml("p.nvmlDeviceGetCount()")
    with pytest.raises(KeyError):
        fake.fail("nvmlDeviceGetUtilisationRates", 999)


def test_init_can_fail(fake: FakeNvml, child: Client) -> None:
    fake.fail("nvmlInitWithFlags", 999)
    with answers(999):
        child.use(fake.env)
    assert fake.holders == []
    fake.fail("nvmlInitWithFlags", 0)
    assert child.use(fake.env)("p.nvmlDeviceGetCount()") == 4


def test_calls_are_counted_by_function_and_card(fake: FakeNvml, nvml: Client) -> None:
    fake.reset_calls()
    nvml("handles = [gpu(i) for i in range(3)]\n[p.nvmlDeviceGetPowerUsage(h) for h in handles]")
    nvml("p.nvmlDeviceGetPowerUsage(handles[2])")
    assert fake.calls("nvmlDeviceGetPowerUsage") == 4
    assert fake.calls("nvmlDeviceGetPowerUsage", gpu=fake.gpus[2]) == 2
    assert fake.all_calls() == {"nvmlDeviceGetHandleByIndex_v2": 3, "nvmlDeviceGetPowerUsage": 4}


def test_slow_calls(fake: FakeNvml, nvml: Client) -> None:
    fake.slow("nvmlDeviceGetFanSpeed", 0.1)
    began = time.monotonic()
    nvml("p.nvmlDeviceGetFanSpeed(gpu(3))")
    assert time.monotonic() - began >= 0.1


def test_a_hanging_call_ends_by_sigkill_only_and_stops_nobody_else(
    fake: FakeNvml, nvml: Client
) -> None:
    fake.hang("nvmlDeviceGetPowerUsage", gpu=0)
    tried = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    with Client(os.environ | fake.env) as stuck:
        stuck("p.nvmlInit()")
        stuck.send("p.nvmlDeviceGetPowerUsage(gpu(0))")
        until("it hangs", lambda: signals(stuck.pid, "SigBlk").issuperset(tried))
        for number in tried:
            os.kill(stuck.pid, number)
        until("it has got them", lambda: signals(stuck.pid, "ShdPnd").issuperset(tried))
        assert stuck.pid in fake.holders, "still alive"
        assert nvml("p.nvmlDeviceGetPowerUsage(gpu(2))") == 80_000
        assert nvml("p.nvmlDeviceGetTemperature(gpu(0), 0)") == 41
        stuck.kill()
        assert fake.holders == [nvml.pid]
    nvml.send("p.nvmlDeviceGetPowerUsage(gpu(0))")
    until("this one hangs", lambda: signals(nvml.pid, "SigBlk").issuperset(tried))
    fake.unhang("nvmlDeviceGetPowerUsage")
    assert nvml.receive() == 69_850


def signals(pid: int, field: str) -> set[int]:
    """The signals in one of the masks of /proc/PID/status (proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith(field + ":"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


# ---- many processes ----

READ = """
torn = []
begin = time.monotonic()
while time.monotonic() - begin < 0.7: m = p.nvmlDeviceGetMemoryInfo(gpu(0), p.nvmlMemory_v2); l = p.nvmlDeviceGetComputeRunningProcesses(gpu(0)); torn += [1] * (m.total != m.used + m.free + m.reserved or len({x.usedGpuMemory for x in l}) != 1)
len(torn)
"""


def test_readers_never_see_half_a_change(fake: FakeNvml) -> None:
    """Two processes read while this one writes: a list is of one moment, whole."""
    card = fake.gpus[0]
    for pid in range(1, 33):
        card.add_process(pid, memory_bytes=0)
    with Client(os.environ | fake.env) as one, Client(os.environ | fake.env) as two:
        for reader in (one, two):
            reader("p.nvmlInit()")
            reader.send(READ)
        deadline = time.monotonic() + 0.7
        for size in iter(lambda: time.monotonic() < deadline, False):
            with fake.writing():
                used = time.monotonic_ns() % GIB if size else 0
                card.set(memory_used_bytes=used)
                for process in card.raw.processes[: card.raw.process_count]:
                    process.memory_bytes = used
        assert (one.receive(), two.receive()) == (0, 0)
    assert fake.calls("nvmlDeviceGetComputeRunningProcesses_v3") > 100


def test_a_killed_process_leaves_no_lock_behind(fake: FakeNvml, nvml: Client) -> None:
    for _ in range(5):
        with Client(os.environ | fake.env) as busy:
            busy("p.nvmlInit()")
            busy.send("while True: p.nvmlDeviceSetPowerManagementLimit(gpu(0), 300000)\n1")
            time.sleep(0.02)
            busy.kill()
        fake.gpus[0].set(utilization=0.5)
        assert nvml("p.nvmlDeviceGetUtilizationRates(gpu(0))")["gpu"] == 50


def test_threads_of_a_process_take_turns(nvml: Client) -> None:
    assert nvml("""
failed = []
def read():
    for _ in range(300): failed.append(p.nvmlDeviceGetTemperature(gpu(0), 0) != 41)

threads = [threading.Thread(target=read) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
[len(failed), sum(failed)]
""") == [1200, 0]


def test_threads_of_the_test_may_write_together(fake: FakeNvml) -> None:
    def break_memory() -> None:
        for _ in range(200):
            fake.gpus[0].ecc_errors(1)

    threads = [threading.Thread(target=break_memory) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.gpus[0].raw.ecc[1][0][2] == 800
