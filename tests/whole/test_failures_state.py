"""What the agent keeps, and what it reads, fails (DESIGN 9): disks, files, the clock, mounts, pages."""

import contextlib
import http.server
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import GIB
from tests.sense.pages import vllm
from tests.stage import Daemon, until
from tests.whole.conftest import Host, fill
from tests.whole.watch import events, goes_on, knob, metric, sensor

# -- the state directory -------------------------------------------------------------------------------


def read_only(folder: Path, *, so: bool) -> None:
    mode = "ro" if so else "rw"
    subprocess.run(["mount", "-o", f"remount,bind,{mode}", folder], check=True)


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """A folder that can be made read-only."""
    folder.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class Disk:
    """The state directory on a disk of its own, whose file system can break as a real one does."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.state = state
        self._image = folder / "disk.img"
        with self._image.open("wb") as image:
            image.truncate(8 * 2**20)
        state.mkdir(mode=0o700)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", self._image], check=True)
        self._mount()
        state.chmod(0o700)

    def break_down(self) -> None:
        """The file system has met an error: it is read-only until it is checked (ext4(5), abort)."""
        subprocess.run(["mount", "-o", "remount,abort", self.state], check=True)

    def mend(self) -> None:
        """Once nobody uses it."""
        self.close()
        done = subprocess.run(["e2fsck", "-fy", self._image], capture_output=True, check=False)
        assert done.returncode in (0, 1), done.stdout
        self._mount()

    def close(self) -> None:
        subprocess.run(["umount", self.state], check=True)

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.state], check=True)


@pytest.fixture
def disk(host: Host) -> Iterator[Disk]:
    folder = host.stage.folder
    if shutil.which("mke2fs") is None or not os.path.exists("/dev/loop-control"):
        pytest.skip("needs e2fsprogs and loop devices")
    made = Disk(folder, folder / "state")
    yield made
    host.stage.close_daemons()
    made.close()


def test_a_state_disk_that_breaks_stops_new_changes_but_no_putting_back(
    host: Host, disk: Disk
) -> None:
    daemon = host.run()
    host.press()
    disk.break_down()
    for _ in range(20):
        host.work(grow=GIB // 16)
    host.relax()
    host.put_back(seconds=40)

    def refused() -> bool:
        host.work(grow=2 * GIB)
        told = knob(daemon)
        return told is not None and told["result"] == "refused"

    until("nothing new is begun that could not be put back after a crash", refused, seconds=40)
    assert host.untouched()
    assert not sensor(daemon, "ledger")["up"]
    assert "ead-only" in sensor(daemon, "ledger")["why"]
    goes_on(daemon, host.work)
    assert daemon.log.count('"cannot read"') == 1, "that it is down is said once"
    daemon.stop(40)
    disk.mend()
    host.relax()
    assert host.stage.command("restore").returncode == 0
    daemon = host.run()
    host.press()
    assert daemon.stop() == 0
    assert host.untouched()


def test_a_state_directory_that_is_read_only_from_the_start_is_a_clear_error(host: Host) -> None:
    with mounted(host.stage.folder / "state") as state:
        read_only(state, so=True)
        done = host.stage.command("daemon")
        assert done.returncode == 1
        assert "state" in done.stderr
        assert "ead-only" in done.stderr
        assert "Traceback" not in done.stderr


# -- what has been started with `gpuagent run` ----------------------------------------------------------


def reserve(host: Host, name: str) -> "subprocess.Popen[str]":
    words = ("run", "--sla", "L3", "--gpu-memory", "1GiB", "--name", name)
    waits = ("sh", "-c", "echo up; exec cat")
    return subprocess.Popen(
        host.stage.words(*words, "--", *waits),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def job(host: Host) -> Iterator["subprocess.Popen[str]"]:
    """A run of an agent that is killed once it has started it."""
    daemon = host.run()
    with reserve(host, "job") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            daemon.kill()
            yield process
        finally:
            process.kill()


def runs(daemon: Daemon) -> list[Any]:
    return [r["name"] for r in daemon.client.get("/v1/runs")["items"]]


@pytest.mark.parametrize("how", ["torn", "a pipe"])
def test_a_torn_list_of_runs_costs_reservations_and_nothing_else(
    host: Host, job: "subprocess.Popen[str]", how: str
) -> None:
    file = host.stage.folder / "state" / "runs.json"
    raw = file.read_bytes()
    file.unlink()
    if how == "a pipe":
        os.mkfifo(file, 0o600)
    else:
        file.write_bytes(raw[: len(raw) // 2])
        file.chmod(0o600)
    daemon = host.run()
    assert len(events(daemon, "runs-unreadable")) == 1
    assert runs(daemon) == []
    goes_on(daemon, host.work)
    assert job.poll() is None
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


def test_on_a_full_disk_nothing_is_started_that_a_restart_would_forget(
    host: Host, small: Path
) -> None:
    daemon = host.run()
    fill(small)
    with reserve(host, "job") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "a restart of the agent would not remember it" in " ".join(said.split())
    assert runs(daemon) == []
    goes_on(daemon, host.work)
    (small / "filler").unlink()
    with reserve(host, "job") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert runs(daemon) == ["job"]
        process.kill()
    assert daemon.stop() == 0


# -- the clock -----------------------------------------------------------------------------------------

_DAY = 86400.0
STEPPED = """
import time
true = time.time
def stepped():
    with open({file!r}) as file:
        return true() + float(file.read())
time.time = stepped
"""


@pytest.fixture
def step(host: Host) -> Callable[[float], None]:
    """Steps the clock on the wall, by so many seconds, of what the stage starts."""
    offset, site = host.stage.folder / "offset", host.stage.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STEPPED.format(file=str(offset)))
    host.stage.environment["PYTHONPATH"] = str(site)

    def by(seconds: float) -> None:
        (site / "new").write_text(str(seconds))
        (site / "new").replace(offset)

    by(0.0)
    return by


def test_a_clock_that_is_stepped_changes_no_hold(host: Host, step: Callable[[float], None]) -> None:
    daemon = host.run()
    host.press()
    for seconds in (_DAY, -_DAY):
        step(seconds)
        goes_on(daemon, host.work)
        assert not host.untouched(), "nobody is let go of"
        assert metric(daemon, "gpuagent_gpu_power_watts"), "and no reading has expired"
        assert daemon.client.text("/healthz") == "ok\n"
    host.relax()
    host.put_back()
    newest = daemon.client.get("/v1/audit")["items"][0]
    assert abs(newest["wall"] - time.time() + _DAY) < 60, "the clock has been stepped"
    assert daemon.stop() == 0


# -- the tree of cgroups -------------------------------------------------------------------------------


def test_a_tree_that_becomes_read_only_while_it_is_held_is_said_and_put_back_later(
    host: Host,
) -> None:
    with mounted(host.stage.tree) as tree:
        daemon = host.run()
        host.press()
        host.relax()
        for _ in range(3):
            host.work()
        # The tests write through the folder below the mount, as the kernel does.
        read_only(tree, so=True)

        def said() -> bool:
            told = knob(daemon)
            return (
                told is not None
                and told["result"] == "refused"
                and "ead-only" in told["outcome_why"]
            )

        until("the refusal is said", said, seconds=40)
        goes_on(daemon)
        assert daemon.stop(40) != 0
        assert daemon.log.count("not everything is put back") == 1
        read_only(tree, so=False)
        assert host.stage.command("restore").returncode == 0
        assert host.untouched()


# -- a tenant's page of metrics ------------------------------------------------------------------------


class Page:
    """Answers as the test wants: at once, never to its end, or with a drop at a time."""

    def __init__(self) -> None:
        self.how = "at once"
        self.over = threading.Event()
        page = self

        class Answer(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                page.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"

    def answer(self, to: http.server.BaseHTTPRequestHandler) -> None:
        body = vllm([0.4]).encode()
        to.send_response(200)
        to.send_header("Connection", "close")
        if self.how == "at once":
            to.send_header("Content-Length", str(len(body)))
        to.end_headers()
        with contextlib.suppress(OSError):
            if self.how == "at once":
                to.wfile.write(body)
            while self.how == "endless" and not self.over.is_set():
                to.wfile.write(b"# " + b"x" * 4000 + b"\n")
            while self.how == "slow" and not self.over.wait(0.2):
                to.wfile.write(b"# x\n")


@pytest.fixture
def page() -> Iterator[Page]:
    one = Page()
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    yield one
    one.over.set()
    one.server.shutdown()
    thread.join()
    one.server.server_close()


@pytest.mark.parametrize("how", ["endless", "slow"])
def test_a_page_of_latency_without_end_holds_up_nothing(host: Host, page: Page, how: str) -> None:
    source = f"""latency_slo = "1s"
[tenants.latency_from]
url = "{page.url}"
metric = "vllm:e2e_request_latency_seconds"
interval = "500ms"
window = "10s"
"""
    host.stage.configure(host.serve_rule + source + host.stage.rule("train", "L3"))
    daemon = host.run()

    def up() -> Any:
        host.work()
        return daemon.client.explain("serve")["latency_source"]["up"]

    until("it is read", up, seconds=30)
    page.how = how
    until("it is down", lambda: up() is False, seconds=30)
    why = daemon.client.explain("serve")["latency_source"]["why"]
    assert "within 0.5 s" in why or "longer than" in why or "too busy" in why
    goes_on(daemon, host.work)
    host.press()
    until("that is told", lambda: events(daemon, "latency-source-down"))
    page.how = "at once"
    until("it is read again", up, seconds=60)
    assert len(events(daemon, "latency-source-down")) == 1
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
