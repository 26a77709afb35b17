"""`gpuagent top` as a process on a terminal of its own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from tests.cli.stage import agent
from tests.cli.terminal import resize, terminal, written
from tests.expose import snapshots
from tests.expose.full import full
from tests.expose.scene import short_folder

_LOGIN = (
    "import os, sys\n"
    "os.login_tty(int(sys.argv[1]))\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'gpuagent', *sys.argv[2:]])"
)


class Session:
    """`gpuagent top` on a terminal of its own."""

    def __init__(self, path: str, ours: int, theirs: int, **environment: str) -> None:
        self.ours = ours
        self.theirs = theirs
        self.before = termios.tcgetattr(theirs)
        self.text = ""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LOGIN, str(theirs)),
                *("--socket", path, "top", "--interval", "0.2"),
            ],
            pass_fds=[theirs],
            env={**os.environ, "TERM": "xterm", **environment},
        )

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def until(self, *words: str, without: str = "\0") -> str:
        """Wait until the picture has these words; returns it."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self.text += written(self.ours, 0.05).decode()
            frame = self.text.rpartition("\x1b[H")[2]
            if all(w in frame for w in words) and without not in frame:
                return frame
        raise AssertionError(f"no {words} in {self.text[-2000:]!r}")

    def end(self) -> int:
        """Wait for the end; the exit code."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            self.text += written(self.ours, 0.05).decode()
        self.text += written(self.ours).decode()
        return self.process.wait(timeout=1)

    @property
    def restored(self) -> bool:
        same = termios.tcgetattr(self.theirs) == self.before
        return same and self.text.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")


@contextlib.contextmanager
def session(path: str, **environment: str) -> Iterator[Session]:
    with terminal() as (ours, theirs):
        one = Session(path, ours, theirs, **environment)
        try:
            yield one
        finally:
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait()


def test_keys_work_on_a_terminal_and_it_is_restored() -> None:
    with agent(snapshots.busy()) as path, session(path) as top:
        top.until("> serve", "train")
        top.press("jw")
        top.until("> train", "Why train", "cut twice")
        top.press("/tra\r")
        top.until("filter: tra", without="serve   ")
        top.press("\x1b")
        top.until("filter: all", "serve   ")
        top.press("s?")
        top.until("sort: level", "this list, or back")
        top.press("q")
        assert top.end() == 0
        assert top.restored


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)]
)
def test_a_signal_ends_it_with_the_terminal_restored(number: signal.Signals, code: int) -> None:
    with agent(snapshots.busy()) as path, session(path) as top:
        top.until("train")
        top.process.send_signal(number)
        assert top.end() == code
        assert top.restored


def test_ctrl_z_gives_the_terminal_back_for_a_while() -> None:
    with agent(snapshots.busy()) as path, session(path) as top:
        top.until("train")
        os.kill(top.process.pid, signal.SIGTSTP)
        _, status = os.waitpid(top.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        top.text += written(top.ours, 0.1).decode()
        assert top.restored
        top.text = ""
        os.kill(top.process.pid, signal.SIGCONT)
        assert "\x1b[?1049h" in top.until("train") or "\x1b[?1049h" in top.text
        top.press("q")
        assert top.end() == 0


def test_it_follows_the_size_of_the_terminal() -> None:
    with agent(snapshots.large(4, 60)) as path, session(path) as top:
        top.until("tenant-")
        top.text = ""
        resize(top.ours, 40, 10)
        frame = top.until("tenant-", "q quit")
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame)
        drawn = [line.rstrip("\r") for line in plain.split("\n")]
        assert len(drawn) == 10
        assert max(map(len, drawn)) <= 40
        top.press("q")
        assert top.end() == 0


def test_the_agent_may_go_and_come_back() -> None:
    with short_folder() as folder:
        link = f"{folder}/link"
        with session(link) as top:
            top.until("No answer", "does not run")
            for _ in range(2):
                with agent(snapshots.busy()) as path:
                    os.symlink(path, link)
                    top.until("train", without="No answer")
                os.unlink(link)
                top.until("train", "No answer")
            top.press("q")
            assert top.end() == 0
            assert top.restored


def test_an_agent_that_hangs_holds_up_no_key() -> None:
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as deaf:
        path = f"{folder}/s"
        deaf.bind(path)
        deaf.listen()
        with session(path) as top:
            top.until("q quit")
            top.press("?")
            top.until("this list, or back")
            top.until("has not answered for")
            top.press("q")
            assert top.end() == 0
            assert top.restored


def test_without_colour_nothing_but_positions_is_sent() -> None:
    with agent(full()) as path:
        with session(path, NO_COLOR="1") as top:
            top.until("> ", "Card 1 cannot be read")
            top.press("q")
            assert top.end() == 0
        assert not re.search(r"\x1b\[[0-9;]*m", top.text)
        with session(path) as top:
            top.until("> ")
            top.press("q")
            assert top.end() == 0
        assert re.search(r"\x1b\[[0-9;]*m", top.text)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    with agent(snapshots.busy()) as path, session(path, TERM="dumb") as top:
        top.until("> serve")
        top.press("j")
        top.until("> train")
        top.press("q")
        assert top.end() == 0
        assert "\x1b" not in top.text
        assert termios.tcgetattr(top.theirs) == top.before


def test_no_hostile_name_reaches_the_terminal() -> None:
    with agent(snapshots.hostile()) as path, session(path, NO_COLOR="1") as top:
        top.until("> ")
        top.press("w")
        top.until("Why ")
        top.press("q")
        assert top.end() == 0
        ours = r"\x1b\[(\?(1049|25|7)[hl]|H|J|K|2J)"
        rest = re.sub(ours, "", top.text).replace("\r", "").replace("\n", "")
        assert rest.isprintable(), repr(rest)
