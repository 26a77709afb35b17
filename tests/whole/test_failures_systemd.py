"""systemd fails (DESIGN 9): slow, silent, gone while something is held, and a unit started again."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.nvml import GIB
from tests.fakes.systemd import DAEMON, INFINITY, NONE_HERE, Bus, FakeSystemd, Unit
from tests.stage import until
from tests.whole.conftest import Host
from tests.whole.watch import goes_on, knob

pytestmark = pytest.mark.skipif(DAEMON is None, reason=NONE_HERE)

# The daemon sees the bus of the test at /run, and the stage's tree where systemd has its own.
INSIDE = 'mount --bind "$1" /run && mount --bind "$2" /sys/fs/cgroup && shift 2 && exec "$@"'
QUOTA = "CPUQuotaPerSecUSec"


class Manager:
    """A bus and a systemd on it that has one unit: train's. They live in a thread of their own."""

    def __init__(self, host: Host) -> None:
        self.run = host.stage.folder / "run"
        self.unit = host.stage.unit("train")
        self.fake = FakeSystemd(self.run, host.stage.tree)
        self.fake.units[self.unit] = Unit(host.train.cgroup.path)
        self._bus = Bus(self.run)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def begin(self) -> None:
        async def start() -> None:
            await self._bus.start()
            await self.fake.start(f"unix:path={self._bus.socket}")

        self._do(start)

    def die(self) -> None:
        """The bus ends with all who were on it, as by SIGKILL: its socket stays."""

        async def end() -> None:
            self.fake.stop()
            await asyncio.sleep(0.01)
            await self._bus.kill()

        self._do(end)

    def unlink(self) -> None:
        self._bus.socket.unlink()

    def quota(self) -> int:
        """CPU of the unit, in microseconds a second, as systemd has it in memory."""
        return self.fake.units[self.unit].properties[QUOTA]

    def clean(self) -> bool:
        """Nothing of ours is left with systemd."""
        return self.quota() == INFINITY and not self.fake.folder(self.unit).exists()

    def close(self) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(what(), self._loop).result(30)


@pytest.fixture
def manager(host: Host) -> Iterator[Manager]:
    made = Manager(host)
    host.stage.before = (
        *("unshare", "--mount", "sh", "-c", INSIDE, "sh"),
        *(str(made.run), str(host.stage.tree)),
    )
    try:
        made.begin()
        yield made
    finally:
        host.stage.close_daemons()
        made.close()


def test_a_systemd_that_takes_seconds_for_an_answer(host: Host, manager: Manager) -> None:
    daemon = host.run()
    manager.fake.slow_seconds = 0.7
    host.press(seconds=40)
    assert manager.quota() < INFINITY
    goes_on(daemon, host.work)
    host.relax()
    host.put_back(seconds=40)
    until("nothing is left with systemd", manager.clean)
    assert daemon.stop(40) == 0


def test_a_systemd_that_never_answers(host: Host, manager: Manager) -> None:
    daemon = host.run()
    manager.fake.silent = True

    def said() -> bool:
        host.work(grow=GIB // 4)
        told = knob(daemon)
        return told is not None and "D-Bus" in told["outcome_why"]

    until("it is said who does not answer", said, seconds=40)
    assert knob(daemon)["result"] == "in flight"
    goes_on(daemon, host.work)
    assert host.untouched(), "nothing is written of which it is not known what was there before"
    assert manager.clean()
    manager.fake.silent = False
    host.press(seconds=40)
    assert manager.quota() < INFINITY
    assert daemon.stop(40) == 0
    assert manager.clean()


def test_the_bus_is_gone_while_something_is_held_and_comes_back(
    host: Host, manager: Manager
) -> None:
    daemon = host.run()
    host.press()
    assert manager.quota() < INFINITY
    manager.die()
    goes_on(daemon, host.work)
    assert not host.untouched(), "it is held all the same"
    host.relax()
    host.put_back(seconds=30)
    goes_on(daemon, host.work)
    assert not manager.clean(), "only systemd could say that its own is put back"
    told = knob(daemon)
    assert told is not None, "the hold has not ended while there is no systemd to end it"
    assert told["result"] == "in flight"
    assert "D-Bus" in told["outcome_why"]
    manager.begin()

    def clean() -> bool:
        host.work()
        return manager.clean()

    until("what systemd was told is taken back", clean, seconds=30)
    assert host.untouched()
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


def test_a_stop_without_a_bus_says_what_is_left_and_a_restore_does_it(
    host: Host, manager: Manager
) -> None:
    daemon = host.run()
    host.press()
    manager.die()
    manager.unlink()
    assert daemon.stop(40) != 0
    assert daemon.log.count("not everything is put back") == 1
    assert host.untouched(), "the file, at least, is as it was"
    assert host.stage.command("restore").returncode != 0
    manager.begin()
    done = host.stage.command("restore")
    assert done.returncode == 0, done.stderr
    assert manager.clean()
    assert host.untouched()


def test_a_unit_that_is_started_again_while_it_is_held(host: Host, manager: Manager) -> None:
    daemon = host.run()
    host.press()
    restart(host, manager)

    def held_anew() -> bool:
        """Given back first, so that the limit of before is not taken for the new one's own."""
        host.work(grow=GIB // 4)
        return manager.fake.calls.count("SetUnitProperties") >= 2 and manager.quota() < INFINITY

    until("it is held where it is now", held_anew, seconds=40)
    goes_on(daemon, host.work)
    host.relax()
    host.put_back(seconds=40)
    until("nothing is left with systemd", manager.clean)
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


def restart(host: Host, manager: Manager) -> None:
    """`systemctl restart`: another process, in a cgroup made anew at the same path."""
    files, fresh = host.train.cgroup.files, host.stage.folder / "fresh"
    shutil.copytree(files, fresh)
    # Kept elsewhere, so that its inode is not given again at once.
    manager.fake.calls.clear()
    files.rename(host.stage.folder / "gone")
    fresh.rename(files)
    manager.fake.started_again(manager.unit)
    assert not host.untouched(), "systemd writes into the new cgroup what it was told"
    host.card.add_process(host.train.one_more(), kind="compute", memory_bytes=20 * GIB)
    before = host.train.processes.pop(0)
    host.card.remove_process(before.pid)
    before.kill()
    before.wait()
