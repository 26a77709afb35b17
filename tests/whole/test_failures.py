"""Failure is normal (DESIGN 9): each one is made to happen to a running daemon."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.nvml import GIB, H100_80GB, L40S, FakeNvml
from tests.stage import ApiError, Client, Stage, until
from tests.whole.conftest import Host, fill
from tests.whole.watch import goes_on, gpus, metric, sensor

# -- the driver --------------------------------------------------------------------------------------


def test_a_hanging_call_blinds_one_card_and_nothing_else(tmp_path: Path) -> None:
    with Stage(tmp_path, [H100_80GB, L40S]) as stage:
        stage.configure('call_deadline = "500ms"\n')
        daemon = stage.daemon().ready()
        until("both cards are read", lambda: len(metric(daemon, "gpuagent_gpu_power_watts")) == 2)
        stage.driver.hang("nvmlDeviceGetPowerUsage", gpu=1)
        until("card 1 is blind", lambda: [bool(g["blind"]) for g in gpus(daemon)] == [False, True])
        until(
            "its readings expire and the other's do not",
            lambda: len(metric(daemon, "gpuagent_gpu_power_watts")) == 1,
        )
        assert daemon.client.get("/v1/health")["ok"] is False
        stage.driver.unhang("nvmlDeviceGetPowerUsage", gpu=1)
        until("card 1 is back", lambda: len(metric(daemon, "gpuagent_gpu_power_watts")) == 2)


def test_a_lost_card_and_its_return(tmp_path: Path) -> None:
    with Stage(tmp_path, [H100_80GB, L40S]) as stage:
        daemon = stage.daemon().ready()
        until("both cards are read", lambda: len(metric(daemon, "gpuagent_gpu_power_watts")) == 2)
        stage.cards[0].lose()
        until("card 0 is blind", lambda: any("lost" in g["blind"] for g in gpus(daemon)))
        stage.cards[0].recover()
        until("card 0 is back", lambda: not any(g["blind"] for g in gpus(daemon)))


@pytest.mark.parametrize("how", ["lost", "reset"])
def test_a_card_that_fails_while_its_limit_is_held(tmp_path: Path, how: str) -> None:
    with Stage(tmp_path, [H100_80GB, H100_80GB]) as stage:
        stage.configure('[power]\nbudget = "800W"\n')
        daemon = stage.daemon().ready()
        failing, other = stage.cards
        until(
            "both are limited", lambda: failing.power_limit_watts + other.power_limit_watts <= 800
        )
        held = failing.power_limit_watts
        failing.lose() if how == "lost" else failing.require_reset()
        until("it is blind", lambda: any(how in g["blind"] for g in gpus(daemon)))
        goes_on(daemon)
        assert other.power_limit_watts + held <= 800, "what it draws is not known to be less"
        failing.recover()
        until("it is back", lambda: not any(g["blind"] for g in gpus(daemon)))
        assert daemon.stop() == 0
        assert failing.power_limit_watts == other.power_limit_watts == 700


def test_driver_unloaded_and_loaded_again(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        daemon = stage.daemon().ready()
        until("the card is read", lambda: sensor(daemon, "gpus")["up"])
        stage.driver.unload_driver(force=True)
        until("the loss is said", lambda: "driver" in sensor(daemon, "gpus")["why"].lower())
        stage.driver.load_driver()
        until("the card is read again", lambda: sensor(daemon, "gpus")["up"])


def test_no_card_at_all_and_then_one(tmp_path: Path) -> None:
    with Stage(tmp_path, []) as stage:
        stage.configure('retry_max = "1s"\n')
        daemon = stage.daemon().ready()
        assert gpus(daemon) == []
        stage.driver.add_gpu(H100_80GB)
        until("the new card is found", lambda: len(gpus(daemon)) == 1)


def test_no_library_at_all(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.environment["LD_LIBRARY_PATH"] = ""
        daemon = stage.daemon().ready()
        until("it is said what is missing", lambda: "librar" in sensor(daemon, "gpus")["why"])
        assert daemon.stop() == 0


def test_release_lets_go_and_resume_takes_up_again(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        daemon = stage.daemon().ready()
        until("the driver is held", lambda: stage.driver.holders)
        assert stage.command("release").returncode == 0
        assert stage.driver.holders == []
        stage.driver.unload_driver()
        stage.driver.load_driver()
        assert stage.command("resume").returncode == 0
        until("the card is read again", lambda: sensor(daemon, "gpus")["up"])


def test_the_child_that_reads_the_driver_may_die(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        daemon = stage.daemon().ready()
        [first] = until("a child holds the driver", lambda: stage.driver.holders)
        os.kill(first, signal.SIGKILL)
        until("another one does", lambda: set(stage.driver.holders) - {first})
        until("the card is read again", lambda: sensor(daemon, "gpus")["up"])


# -- tenants and cgroups -----------------------------------------------------------------------------


def test_without_cgroup_v2_the_agent_says_so_and_goes_on(host: Host) -> None:
    (host.stage.tree / "cgroup.controllers").unlink()
    daemon = host.stage.daemon().ready()
    until("it is said", lambda: "no cgroup v2 mount" in sensor(daemon, "cgroups")["why"])
    assert daemon.client.get("/v1/health")["ok"] is False
    assert '"cannot read"' in daemon.log
    until("cards are read", lambda: sensor(daemon, "gpus")["up"])
    names = [t["name"] for t in daemon.client.get("/v1/tenants")["items"]]
    assert {"serve", "train"} <= set(names)
    (host.stage.tree / "cgroup.controllers").write_text("cpu\n")
    until("it is read once it is there", lambda: sensor(daemon, "cgroups")["up"])


def test_the_cgroup_vanishes_while_it_is_held(host: Host) -> None:
    daemon = host.run()
    host.press()
    host.card.remove_process(host.train.pid)
    host.train.end()
    host.train.cgroup.vanish()
    until(
        "the tenant has left",
        lambda: "train" not in [t["name"] for t in daemon.client.get("/v1/tenants")["items"]],
    )
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


def test_a_file_that_cannot_be_written_is_refused_with_the_reason(host: Host) -> None:
    control = host.train.cgroup.files / "cpu.max"
    subprocess.run(["mount", "--bind", control, control], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", control], check=True)
        daemon = host.run()

        def refused() -> bool:
            host.work(grow=GIB // 2)
            knobs = {k["knob"]: k for k in daemon.client.explain("train")["knobs"]}
            said = knobs["cgroup_cpu_max"]
            return said["result"] == "refused" and "ead-only" in said["outcome_why"] + said["why"]

        until("the refusal is said", refused)
        assert host.untouched()
    finally:
        subprocess.run(["umount", control], check=True)


def test_hostile_names_do_no_harm(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        evil = tmp_path / "a\x1b[2Jb\nc"
        shutil.copy(shutil.which("sleep") or "/bin/sleep", evil)
        process = subprocess.Popen([evil, "3600"])
        try:
            stage.cards[0].add_process(process.pid, kind="compute", memory_bytes=GIB)
            daemon = stage.daemon().ready()
            until("it is found", lambda: daemon.client.get("/v1/tenants")["items"])
            for text in (
                daemon.client.text("/metrics"),
                stage.command("tenants").stdout,
                daemon.log,
            ):
                assert "\x1b" not in text
        finally:
            process.kill()
            process.wait()


# -- the state directory, the configuration, the socket ------------------------------------------------


def test_a_full_disk_stops_new_changes_but_no_putting_back(host: Host, small: Path) -> None:
    daemon = host.run()
    held = host.press()
    fill(small)
    for _ in range(30):
        host.work(grow=GIB // 16)
    assert daemon.process.poll() is None
    host.relax()
    host.put_back()
    assert held
    daemon.stop()
    assert host.untouched()


def test_with_a_full_disk_from_the_start_nothing_is_changed(host: Host, small: Path) -> None:
    fill(small)
    daemon = host.run()
    for _ in range(40):
        host.work(grow=GIB // 4)
    assert host.untouched()
    knobs = {k["knob"]: k for k in daemon.client.explain("train")["knobs"]}
    assert knobs["cgroup_cpu_max"]["result"] == "refused"
    until("the ledger is down", lambda: "recorded" in sensor(daemon, "ledger")["why"])


def test_a_state_directory_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        (tmp_path / "state").write_text("")
        done = stage.command("daemon")
        assert done.returncode != 0
        assert "state_dir" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_torn_ledger_loses_only_what_was_torn(host: Host) -> None:
    daemon = host.run()
    host.press()
    daemon.kill()
    ledger = host.stage.folder / "state" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"v":1,"crc":"0')
    host.relax()
    host.stage.daemon().ready()
    host.put_back()


def test_a_broken_configuration_at_reload_changes_nothing(host: Host) -> None:
    daemon = host.run()
    host.press()
    good = host.stage.config.read_text()
    host.stage.config.write_text(good + '\n[backpressure]\nmemory_hihg = "9 parrots"\n')
    with pytest.raises(ApiError, match=r"gpuagent\.toml:\d+"):
        daemon.client.post("/v1/reload")
    assert "gpuagent.toml:" in daemon.client.get("/v1/health")["config_error"]
    assert metric(daemon, "gpuagent_config_error") == [1.0]
    assert "reload refused" in daemon.log
    assert not host.untouched(), "the running configuration stays in force"
    host.stage.config.write_text(good)
    daemon.client.post("/v1/reload")
    assert daemon.client.get("/v1/health")["config_error"] == ""
    assert metric(daemon, "gpuagent_config_error") == [0.0]


def test_a_broken_configuration_at_start_is_exit_code_two(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.config.write_text("[backpressure]\nmemory_hihg = 1\n[power]\nbudget = 'much'\n")
        done = stage.command("daemon")
        assert done.returncode == 2
        assert "gpuagent.toml:2: backpressure.memory_hihg: unknown key" in done.stderr
        assert "gpuagent.toml:4: power.budget" in done.stderr


def test_the_second_agent_refuses_and_the_first_goes_on(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        first = stage.daemon().ready()
        second = stage.command("daemon")
        assert second.returncode == 1
        assert f"pid {first.process.pid}" in second.stderr
        assert first.client.text("/readyz")


def test_a_socket_that_somebody_else_uses(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage, socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "agent.sock"))
        other.listen()
        done = stage.command("daemon")
        assert done.returncode == 1
        assert "agent.sock" in done.stderr
        assert (tmp_path / "agent.sock").exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        daemon = stage.daemon().ready()
        daemon.kill()
        assert (tmp_path / "agent.sock").exists()
        stage.daemon().ready()


# -- the agent itself --------------------------------------------------------------------------------


def test_the_third_crash_within_ten_minutes_only_observes(host: Host) -> None:
    for _ in range(3):
        host.stage.daemon().ready().kill()
    daemon = host.run()
    for _ in range(30):
        host.work(grow=GIB // 4)
    assert host.untouched()
    said = daemon.client.get("/v1/health")
    assert said["acts"] is False
    assert "3 crashes" in said["passive_why"]
    knobs = {k["knob"]: k for k in daemon.client.explain("train")["knobs"]}
    assert knobs["cgroup_cpu_max"]["result"] == "would"


BUG = """
import sys
from gpuagent import core, process
from gpuagent.decide.backpressure import Backpressure

class Faulty(Backpressure):
    def decide(self, memory, state):
        held = memory.held
        if held:
            raise ZeroDivisionError("a bug in a policy")
        return super().decide(memory, state)

core.POLICIES = (Faulty,)
process.run(sys.argv[1])
"""


def test_a_bug_in_a_policy_ends_the_run_puts_back_and_leaves_a_record(host: Host) -> None:
    log = host.stage.folder / "faulty.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", BUG, str(host.stage.config)],
            env=os.environ | host.stage.driver.env,
            stderr=out,
        )
    try:
        client = Client(str(host.stage.folder / "agent.sock"))

        def up() -> bool:
            with contextlib.suppress(OSError, ApiError):
                return client.text("/readyz").startswith("ready")
            return False

        until("it is up", up)
        host.settle()
        for _ in range(200):
            host.work(grow=GIB // 2)
            if process.poll() is not None:
                break
        assert process.wait(10) == 70
    finally:
        process.kill()
        process.wait()
    assert host.untouched()
    assert "a bug in a policy" in log.read_text()
    state = host.stage.folder / "state"
    assert (state / "crash-frames.msgpack").stat().st_size > 0
    assert "Held(" in (state / "crash-memories.txt").read_text()


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        stage.environment |= {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "5000000",
        }
        daemon = stage.daemon()

        def heard(what: str) -> str:
            while True:
                said = manager.recv(4096).decode()
                if what in said:
                    return said

        assert "STATUS=enforce" in heard("READY=1")
        heard("WATCHDOG=1")
        daemon.signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in heard("RELOADING=1")
        heard("READY=1")
        daemon.signal(signal.SIGTERM)
        heard("STOPPING=1")
        assert daemon.process.wait(20) == 0


def test_a_daemon_that_is_stopped_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        for _ in range(3):
            daemon = stage.daemon()
            until("it has begun", (tmp_path / "state" / "lock").exists)
            daemon.process.terminate()
            daemon.process.wait(20)
        assert not stage.driver.holders
        stage.daemon().ready()


def test_the_fake_driver_is_what_the_daemon_reads(tmp_path: Path) -> None:
    """Guards the tests above: without it they would pass on a machine with cards of its own."""
    with Stage(tmp_path) as stage:
        assert isinstance(stage.driver, FakeNvml)
        daemon = stage.daemon().ready()
        until("the card is read", lambda: gpus(daemon))
        assert [g["uuid"] for g in gpus(daemon)] == [stage.cards[0].uuid]
