"""CUDA MPS fails (DESIGN 9): a daemon that dies or faults, one of our own that dies under its clients."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gpuagent.host.mps_keeper import MARK
from tests.fakes.mps import Program, carries, fake, real
from tests.fakes.nvml import GIB
from tests.host.mps_rig import Programs, programs
from tests.stage import Daemon, until
from tests.whole.conftest import Host
from tests.whole.watch import events, goes_on, metric

__all__ = ["programs"]

# A daemon of our own keeps its logs in a folder of the host.
INSIDE = 'mount -t tmpfs none /var/log && exec "$@"'
SERVER = 70000


def group(program: Program, *more: str) -> str:
    lines = ('name = "g"', f'pipe_directory = "{program.pipes}"', *more)
    return f'[mps]\ncontrol = "{program.path}"\n[[mps.groups]]\n' + "\n".join(lines) + "\n"


def say(program: Program, *commands: str) -> list[str]:
    async def said() -> list[str]:
        return [await program.say(command) for command in commands]

    return asyncio.run(said())


class Guest:
    """The sensor of MPS asks when the processes on the cards change: so somebody comes and goes."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pid = host.stage.tenant("guest").pid

    def stir(self) -> None:
        for _ in range(10):
            self._host.work()
        if self._pid in self._host.card.pids:
            self._host.card.remove_process(self._pid)
        else:
            self._host.card.add_process(self._pid, kind="compute", memory_bytes=GIB)


def until_told(guest: Guest, daemon: Daemon, kind: str) -> None:
    def told() -> list[Any]:
        guest.stir()
        return events(daemon, kind)

    until(f"{kind} is told", told, seconds=60)


def test_a_control_daemon_that_dies_is_said_once_in_each_direction(
    host: Host, programs: Programs
) -> None:
    program = programs.take(real("550", programs.folder))
    asyncio.run(program.start())
    host.stage.configure(host.rules + group(program))
    daemon, guest = host.run(), Guest(host)
    until("it is read", lambda: metric(daemon, "gpuagent_mps_up") == [1.0])
    asyncio.run(program.end())
    until_told(guest, daemon, "mps-down")
    assert metric(daemon, "gpuagent_mps_up") == [0.0]
    goes_on(daemon, host.work)
    host.press()  # what is no business of MPS goes on
    asyncio.run(program.start())
    until_told(guest, daemon, "mps-up")
    assert len(events(daemon, "mps-down")) == 1
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


def test_a_server_that_faults_is_said_once_with_everybody_it_reaches(
    host: Host, programs: Programs
) -> None:
    program = programs.take(fake(programs.folder))
    asyncio.run(program.start())
    pids = (host.serve.pid, host.train.pid)
    say(program, f"fake_server {SERVER} ACTIVE", *(f"fake_client {SERVER} {p}" for p in pids))
    host.stage.configure(host.rules + group(program))
    daemon, guest = host.run(), Guest(host)
    until_told(guest, daemon, "mps-shared-with-l1")
    say(program, f"fake_server {SERVER} FAULT")
    until_told(guest, daemon, "mps-fault")
    goes_on(daemon, host.work, passes=8)
    (told,) = events(daemon, "mps-fault")
    for who in ("serve (L1)", "train (L3)", *map(str, pids)):
        assert who in told["text"]
    assert daemon.stop() == 0


@pytest.fixture
def own(host: Host, programs: Programs) -> Iterator[Program]:
    """A daemon of the agent's own."""
    program = programs.take(fake(programs.folder))
    host.stage.before = ("unshare", "--mount", "sh", "-c", INSIDE, "sh")
    host.stage.configure(host.rules + group(program, "own = true", f'gpus = ["{host.card.uuid}"]'))
    yield program
    host.stage.close_daemons()


def kept(program: Program) -> list[int]:
    """The daemon that the agent has started; not those who only ask it."""
    return [pid for pid in program.processes() if carries(pid, f"{MARK}=g")]


def test_a_daemon_of_our_own_that_dies_under_its_clients_is_started_again(
    host: Host, own: Program
) -> None:
    daemon, guest = host.run(), Guest(host)
    until("it is proven", lambda: metric(daemon, "gpuagent_mps_up") == [1.0], seconds=60)
    say(own, f"fake_server {SERVER} ACTIVE", f"fake_client {SERVER} {host.train.pid}")
    (first,) = kept(own)
    os.kill(first, signal.SIGKILL)

    def again() -> bool:
        guest.stir()
        return bool(kept(own)) and kept(own) != [first]

    # It may be up again before anybody has looked: then there is nothing to say.
    until("it is started again", again, seconds=60)
    assert len(events(daemon, "mps-down")) <= 1
    (second,) = kept(own)
    goes_on(daemon, host.work)
    daemon.kill()
    assert kept(own) == [second], "it outlives the agent"


def test_a_daemon_of_our_own_whose_server_cannot_start_is_not_left(
    host: Host, programs: Programs
) -> None:
    """There are no cards here, so that the real server of the real daemon ends at once."""
    program = programs.take(real("550", programs.folder, server=False))
    host.stage.before = ("unshare", "--mount", "sh", "-c", INSIDE, "sh")
    more = ("own = true", f'gpus = ["{host.card.uuid}"]')
    host.stage.configure(host.rules + group(program, *more))
    daemon = host.run()

    def said() -> list[str]:
        host.work()
        items = daemon.client.get("/v1/audit")["items"]
        return [a["why"] for a in items if a["knob"] == "mps_daemon" and a["did"] == "not set"]

    why = until("it is said", said, seconds=60)
    assert "every client would fail; it has been taken down" in why[0]
    assert not program.processes()
    goes_on(daemon, host.work)
    assert len(said()) == 1
    assert daemon.stop() == 0
