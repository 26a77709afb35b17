"""What is left when the usual way is barred: a fault anywhere, a broken file, a demoted agent."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuagent.record import decode
from gpuagent.salvage import salvaged
from tests.stage import ApiError, Daemon, Stage, until
from tests.whole.conftest import Host

FAULT = """
import sys
from gpuagent import process
from gpuagent.act.cpu import CpuMax

async def set(self, subject, raw):
    raise KeyError("a fault in an actuator")

CpuMax.set = set
process.run(sys.argv[1])
"""


def test_a_fault_in_a_lane_is_exit_70_with_a_dump_that_replays(host: Host) -> None:
    log = host.stage.folder / "faulty.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", FAULT, str(host.stage.config)],
            env=os.environ | host.stage.driver.env,
            stderr=out,
        )

    def ended() -> bool:
        host.work(grow=2**29)
        return process.poll() is not None

    try:
        host.settle()
        until("the fault has ended it", ended, seconds=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 70, log.read_text()
    assert "a fault in an actuator" in log.read_text()
    assert host.untouched()
    frames = decode((host.stage.folder / "state" / "crash-frames.msgpack").read_bytes())
    assert any(s.gpus for f in frames for s in f.sensed)
    assert any(s.tenants for f in frames for s in f.sensed)


@pytest.mark.parametrize("how", ["an unknown key", "no TOML at all"])
def test_restore_works_with_a_broken_file(host: Host, how: str) -> None:
    daemon = host.run()
    host.press()
    daemon.kill()
    text = host.stage.config.read_text()
    broken = text.replace("[log]", "[lgo]") if how == "an unknown key" else text + "\n= = =\n"
    host.stage.config.write_text(broken)
    assert host.stage.command("config", "check").returncode == 2
    done = host.stage.command("restore", "--rescue")
    assert done.returncode == 0, done.stderr
    assert host.untouched()


def test_restore_never_says_done_of_a_guessed_place(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        stage.config.write_text("nonsense")
        done = stage.command("restore")
        assert done.returncode != 0
        assert "--config" in done.stderr


def test_paths_are_salvaged_as_far_as_they_can_be(tmp_path: Path) -> None:
    file = tmp_path / "gpuagent.toml"
    file.write_text('[paths]\nstate_dir = "/a"\ncgroup_root = 7\nsocket = "/s"\n[x]\ny = 1\n')
    assert salvaged(str(file)) == {"state_dir": "/a", "socket": "/s"}
    file.write_text("[paths]\n  state_dir = '/b'\nbroken =\n")
    assert salvaged(str(file)) == {"state_dir": "/b"}
    assert salvaged(str(tmp_path / "none")) == {}


@pytest.mark.parametrize("how", ["restore", "start"])
@pytest.mark.parametrize("key", ["state_dir", "cgroup_root"])
def test_paths_that_were_changed_since_lose_nothing(host: Host, how: str, key: str) -> None:
    daemon = host.run()
    host.press()
    daemon.kill()
    text = host.stage.config.read_text()
    old = next(line for line in text.splitlines() if line.startswith(key))
    (host.stage.folder / "other").mkdir()
    host.stage.config.write_text(text.replace(old, f'{key} = "{host.stage.folder}/other"'))
    host.relax()
    if how == "restore":
        assert host.stage.command("restore", "--rescue").returncode == 0
    else:
        host.stage.daemon().ready()
    assert host.untouched()


def test_paths_cannot_be_moved_while_something_is_held(host: Host) -> None:
    daemon = host.run()
    host.press()
    text = host.stage.config.read_text()
    moved = text.replace(f"{host.stage.folder}/state", f"{host.stage.folder}/elsewhere")
    host.stage.config.write_text(moved)
    with pytest.raises(ApiError, match="cannot change while settings are held"):
        daemon.client.post("/v1/reload")


def test_a_stop_while_the_driver_is_let_go_of_leaves_no_limit(host: Host) -> None:
    text = host.stage.config.read_text()
    host.stage.config.write_text(text + '[power]\nbudget = "500W"\n')
    daemon = host.run()
    until("the limit is set", lambda: host.card.power_limit_watts == 500)
    assert host.stage.command("release").returncode == 0
    assert daemon.stop() == 0
    assert host.card.power_limit_watts == 700
    assert host.stage.driver.holders == []


def test_a_stop_while_the_driver_hangs_puts_back_what_it_can_and_says_the_rest(
    host: Host,
) -> None:
    text = host.stage.config.read_text()
    host.stage.config.write_text(
        text.replace("[nvml]", '[nvml]\ncall_deadline = "500ms"') + '[power]\nbudget = "500W"\n'
    )
    daemon = host.run()
    until("the limit is set", lambda: host.card.power_limit_watts == 500)
    host.stage.driver.hang("nvmlDeviceSetPowerManagementLimit", gpu=0)
    assert daemon.stop(40) != 0
    assert "not everything is put back" in daemon.log
    host.stage.driver.unhang("nvmlDeviceSetPowerManagementLimit", gpu=0)
    assert host.stage.command("restore").returncode == 0
    assert host.card.power_limit_watts == 700


def test_a_hangup_in_the_first_moment_does_no_harm(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        daemon = stage.daemon()
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline and daemon.process.poll() is None:
            if (tmp_path / "state" / "lock").exists() or _past_imports(daemon):
                daemon.signal(signal.SIGHUP)
            time.sleep(0.02)
        daemon.ready()
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def _past_imports(daemon: Daemon) -> bool:
    """Whether the process ignores or handles SIGHUP: from then on it may be sent."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    masks = {
        k: int(v, 16) for k, v in re.findall(r"^(Sig(?:Ign|Cgt)):\t(\w+)$", status, re.MULTILINE)
    }
    return bool((masks["SigIgn"] | masks["SigCgt"]) & 1)


def test_the_service_manager_hears_what_the_agent_does_now(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        stage.configure(mode="observe")
        stage.environment |= {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        daemon = stage.daemon()

        def heard(what: str) -> str:
            while True:
                said = manager.recv(4096).decode()
                if what in said:
                    return said

        assert "STATUS=observe" in heard("READY=1")
        stage.configure(mode="enforce")
        daemon.signal(signal.SIGHUP)
        heard("RELOADING=1")
        assert "STATUS=enforce" in heard("READY=1"), "ready once the new file is in force"
        assert stage.command("pause").returncode == 0
        heard("STATUS=paused")
        assert stage.command("unpause").returncode == 0
        heard("STATUS=enforce")
        daemon.signal(signal.SIGTERM)
        heard("STOPPING=1")
        heard("EXTEND_TIMEOUT_USEC=")
        assert daemon.stop() == 0
        assert stage.command("restore", "--rescue").returncode == 0
        heard("EXTEND_TIMEOUT_USEC=")


def test_a_demoted_agent_holds_the_budget_and_a_pause_ends_that(host: Host) -> None:
    text = host.stage.config.read_text()
    host.stage.config.write_text(text + '[power]\nbudget = "500W"\n')
    for _ in range(3):
        daemon = host.stage.daemon().ready()
        until("the limit is set", lambda: host.card.power_limit_watts == 500)
        daemon.kill()
    daemon = host.run()
    assert "crashes" in daemon.client.get("/v1/health")["passive_why"]
    assert host.card.power_limit_watts == 500, "held: nobody knows yet what goes wrong"
    assert host.stage.command("pause").returncode == 0
    until("the limit is put back", lambda: host.card.power_limit_watts == 700)
