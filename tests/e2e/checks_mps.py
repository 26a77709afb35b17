"""The checks of MPS: a control daemon of the agent's own, in its own unit."""

from pathlib import Path

from tests.e2e import systemd
from tests.e2e.host import Host

_UNIT = "gpuagent-mps@e2e.service"
_FAKE = Path(__file__).parents[1] / "fakes" / "mps" / "control.py"
_CONTROL = Path("/usr/local/bin/nvidia-cuda-mps-control")
_SOCKET = Path("/run/e2e-mps/control")
_CONFIG = """
[mps]
control = "{control}"
[[mps.groups]]
name = "e2e"
own = true
gpus = ["{card}"]
pipe_directory = "{pipes}"
"""


def check_own_mps_daemon_outlives_the_agent(host: Host) -> None:
    """An agent that stops leaves it, the next finds it, and `systemctl stop` has it quit by itself."""
    _CONTROL.write_text(f"#!/usr/bin/python3 -IS\n{_FAKE.read_text()}")
    _CONTROL.chmod(0o755)
    try:
        _live_and_end(host)
    finally:
        systemd.run("systemctl", "stop", _UNIT)
    host.configure()
    host.agent.start()


def _live_and_end(host: Host) -> None:
    host.configure(_CONFIG.format(control=_CONTROL, card=host.card.uuid, pipes=_SOCKET.parent))
    host.agent.reload()
    host.until("it is up", lambda: _is_up(host), units=20)
    pid = _main_pid()
    host.agent.stop()
    assert _main_pid() == pid != "0"
    host.agent.start()
    host.until("it is found", lambda: _is_up(host), units=20)
    assert _main_pid() == pid
    assert _SOCKET.exists()
    host.agent.stop()
    systemd.call("systemctl", "stop", _UNIT)
    assert systemd.show(_UNIT, "ActiveState") == {"ActiveState": "inactive"}
    assert not _SOCKET.exists(), "killed, and not told to quit: it has left its socket"
    systemd.call("systemctl", "start", _UNIT)
    systemd.call("systemctl", "restart", _UNIT)
    assert _main_pid() not in {pid, "0"}


def _is_up(host: Host) -> bool:
    """Up and proven: one that the agent is still starting ends with the agent."""
    daemons = host.agent.client.get("/v1/mps")["daemons"]
    knobs = host.agent.client.get("/v1/plan")["knobs"]
    started = [k["mps"] for k in knobs if (k["knob"], k["result"]) == ("mps_daemon", "applied")]
    return started == ["e2e"] == [d["name"] for d in daemons or () if d["up"]]


def _main_pid() -> str:
    return systemd.show(_UNIT, "MainPID")["MainPID"]
