"""Nobody who is stuck, and nobody who crowds, keeps the agent or its administrators waiting."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuagent.expose.sockets import admin_path
from tests.cli.stage import run
from tests.stage import ApiError, Client, Stage, cgroup2_mount, until
from tests.whole.conftest import Host


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """A pipe that takes nothing more; nobody reads it."""
    here, there = os.pipe()
    os.set_blocking(there, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(there, b"x" * 4096)
    os.set_blocking(there, True)
    yield there
    os.close(here)
    os.close(there)


def test_a_log_that_nobody_reads_stops_nothing(host: Host, full_pipe: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuagent", "--config", str(host.stage.config), "daemon"],
        env=os.environ | host.stage.driver.env,
        stderr=full_pipe,
    )
    client = Client(str(host.stage.folder / "agent.sock"))

    def up() -> bool:
        with contextlib.suppress(OSError, ApiError):
            return client.text("/readyz").startswith("ready")
        return False

    try:
        until("it is up", up)
        host.settle()
        host.press()
        for _ in range(20):
            client.post("/v1/unpause")  # each command is logged
        assert client.text("/healthz") == "ok\n"
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert host.untouched()


def test_an_audit_log_that_is_a_pipe_holds_up_neither_the_end_nor_a_restore(host: Host) -> None:
    audit = host.stage.folder / "state" / "audit.jsonl"
    daemon = host.run()
    audit.unlink(missing_ok=True)
    os.mkfifo(audit)
    host.press()
    assert daemon.stop() == 0
    assert host.untouched()
    assert host.stage.command("restore").returncode == 0


CROWDS = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
full = 0
print("begun", flush=True)
while os.getppid() == int(sys.argv[2]):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as one:
        if one.connect_ex(sys.argv[1]):
            full += 1
            if full == 100:
                print("full", flush=True)
"""


@pytest.fixture
def open_stage() -> Iterator[Stage]:
    """A stage in a folder that every user may enter."""
    if cgroup2_mount() is None or os.getuid():
        pytest.skip("needs root, and a writable cgroup v2 mount")
    with tempfile.TemporaryDirectory(prefix="ga-") as folder:
        os.chmod(folder, 0o755)
        with Stage(Path(folder)) as stage:
            yield stage


@contextlib.contextmanager
def crowding(path: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of nobody's that connect and hang up without end."""
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", CROWDS, path, str(os.getpid())],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        yield crowd
    finally:
        for one in crowd:
            one.kill()
            one.communicate()


def test_a_crowd_at_the_socket_keeps_no_administrator_out(open_stage: Stage) -> None:
    daemon = open_stage.daemon().ready()
    path = str(open_stage.folder / "agent.sock")
    with crowding(path) as crowd:
        for one in crowd:
            assert one.stdout is not None
            assert [one.stdout.readline(), one.stdout.readline()] == ["begun\n", "full\n"]
        done = [run("--socket", path, what) for what in ("status", "pause") for _ in range(10)]
    assert [x.exit_code for x in done] == [0] * 20, [x.stderr for x in done]
    assert daemon.stop() == 0
    assert not os.path.exists(admin_path(path))
