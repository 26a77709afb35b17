"""The guard: its timing as a pure thing, and that nothing it is told leaves a file frozen."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.host import guard
from gpuagent.host.guard import RUNNING_LEAST_SECONDS, RUNNING_MOST_SECONDS, Guard, Turn

pulses = st.floats(0.01, 2.0)
ratios = st.floats(0.01, 0.99)
lateness = st.lists(st.floats(0, 0.5), min_size=2, max_size=40)


def turns(turn: Turn, late: list[float]) -> list[tuple[bool, float, float]]:
    """(frozen, how long, how late it was ended) of each stretch, each ended so late."""
    assert turn.step(turn.due)
    found = []
    for delay in late:
        frozen, since = turn.frozen, turn.since
        now = turn.due + delay
        assert turn.step(now)
        found.append((frozen, now - since, delay))
    return found


@given(pulses, ratios, st.integers(1, 30))
def test_a_punctual_guard_gives_the_share_that_was_asked(
    pulse: float, ratio: float, cycles: int
) -> None:
    found = turns(Turn(pulse, ratio, 0.0), [0.0] * 2 * cycles)
    frozen = sum(length for was, length, _ in found if was)
    running = sum(length for was, length, _ in found if not was)
    assert all(length <= pulse * (1 + 1e-9) for was, length, _ in found if was)
    assert all(length >= RUNNING_LEAST_SECONDS * (1 - 1e-9) for was, length, _ in found if not was)
    share = running / (running + frozen)
    assert share >= ratio * (1 - 1e-6)
    if pulse * ratio / (1 - ratio) >= RUNNING_LEAST_SECONDS:
        assert share == pytest.approx(ratio, rel=1e-6)
        longest = max(length for _, length, _ in found)
        assert longest <= max(pulse, RUNNING_MOST_SECONDS) * (1 + 1e-9)


@given(pulses, ratios, lateness)
def test_however_late_it_comes_nobody_gets_less_than_his_share(
    pulse: float, ratio: float, late: list[float]
) -> None:
    found = turns(Turn(pulse, ratio, 0.0), late[: len(late) // 2 * 2])
    for (_, frozen, delay), (_, running, _) in zip(found[::2], found[1::2], strict=True):
        assert frozen <= pulse + delay + 1e-9
        assert running / (running + frozen) >= ratio * (1 - 1e-6)


@given(
    st.lists(st.tuples(st.sampled_from(["step", "change", "rest", "resume"]), pulses, ratios)),
    pulses,
    ratios,
)
def test_whatever_is_asked_meanwhile_no_pulse_is_longer_than_the_longest_asked(
    doings: list[tuple[str, float, float]], pulse: float, ratio: float
) -> None:
    now, turn, longest = 0.0, Turn(pulse, ratio, 0.0), pulse
    frozen_since = math.inf
    for what, a, b in doings:
        if what == "change":
            turn.change(a, b)
            longest = max(longest, a)
        elif what == "rest":
            turn.rest(now)
        elif what == "resume" and turn.due == math.inf:
            turn.resume(now)
        elif what == "step" and turn.due < math.inf:
            now = max(now, turn.due)
            assert turn.step(now)
        if turn.frozen:
            frozen_since = min(frozen_since, now)
            assert turn.due - frozen_since <= longest + 1e-9
        else:
            frozen_since = math.inf


@pytest.mark.parametrize("text", ["0", "-1", "1", "1e999", "nan", "inf", "", "0,5", "half"])
def test_what_is_no_fraction(text: str) -> None:
    with pytest.raises(ValueError, match=r"convert|between"):
        guard.fraction(text, 1.0)


# -- a line to it ----------------------------------------------------------------------------------------


class Files:
    """Two plain files that stand for a cgroup's."""

    def __init__(self, folder: Path, *, frozen: bool = True) -> None:
        self.freeze = folder / "cgroup.freeze"
        self.freeze.write_text("0\n")
        self.events = folder / "cgroup.events"
        self.events.write_text(f"populated 1\nfrozen {frozen:d}\n")

    @property
    def told(self) -> str:
        return self.freeze.read_text().strip()

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[int]]:
        fds = [os.open(self.freeze, os.O_RDWR), os.open(self.events, os.O_RDONLY)]
        try:
            yield fds
        finally:
            for fd in fds:
                os.close(fd)


@pytest.fixture
def handlers() -> Iterator[None]:
    """What `Guard.run` does to this process's signals is undone."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    signal.set_wakeup_fd(-1)
    for number, was in zip(numbers, before, strict=True):
        signal.signal(number, was)


words = st.sampled_from(["pulse", "thaw", "beat", "1", "7", "0.5", "0.2", "-3", "nan", "", "x"])
messages = st.one_of(st.binary(min_size=1, max_size=40), st.lists(words).map(" ".join))


@pytest.mark.usefixtures("handlers")
@given(st.lists(st.one_of(messages, st.just("PULSE")), max_size=8))
def test_whatever_it_is_told_it_leaves_nothing_frozen(told: list[bytes | str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, files.opened() as fds:
            for each in told:
                if each == "PULSE":
                    socket.send_fds(ours, [b"pulse 7 0.5 0.2"], fds)
                elif each:
                    ours.send(each if isinstance(each, bytes) else each.encode())
            ours.close()
            made = Guard(theirs)
            with contextlib.suppress(ValueError):
                made.run()
        assert files.told == "0"
    assert len(os.listdir("/proc/self/fd")) == before


@contextlib.contextmanager
def running_guard() -> Iterator[tuple["subprocess.Popen[bytes]", socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=theirs.fileno(),
            stderr=subprocess.DEVNULL,
        )
    ours.settimeout(10)
    with ours, process:
        try:
            yield process, ours
        finally:
            process.kill()


def frozen(files: Files, line: socket.socket, ratio: str = "0.2") -> None:
    """Pulsed so long that it stays frozen while the test looks."""
    with files.opened() as fds:
        socket.send_fds(line, [f"pulse 7 9 {ratio}".encode()], fds)
    assert line.recv(100) == b"frozen 7"
    assert files.told == "1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_thaws(tmp_path: Path, number: int) -> None:
    files = Files(tmp_path)
    with running_guard() as (process, line):
        frozen(files, line)
        process.send_signal(number)
        assert process.wait(10) == 0
        assert files.told == "0"


@pytest.mark.parametrize("message", [b"pulse 8 0.5 x", b"\xff", b"freeze", b"pulse 7 0.5 1.5"])
def test_a_message_that_is_not_understood_ends_it_and_thaws(tmp_path: Path, message: bytes) -> None:
    files = Files(tmp_path)
    with running_guard() as (process, line):
        frozen(files, line)
        line.send(message)
        assert process.wait(10) != 0
        assert files.told == "0"


def test_what_it_has_let_go_is_not_taken_again_by_a_change(tmp_path: Path) -> None:
    """The agent may not have heard of it when it asks for another share."""
    files = Files(tmp_path)
    with running_guard() as (_, line):
        frozen(files, line)
        line.send(b"pulse 8 0.5 0.2")
        line.send(b"beat")
        assert line.recv(100).startswith(b"beat 7:")


def test_the_end_of_the_line_thaws(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with running_guard() as (process, line):
        frozen(files, line)
        line.close()
        assert process.wait(10) == 0
        assert files.told == "0"


def test_it_counts_what_it_has_frozen(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with running_guard() as (_, line):
        began = time.monotonic()
        frozen(files, line)
        line.send(b"thaw 7")
        word, number, count, seconds = line.recv(100).decode().split()
        assert (word, number, count) == ("thawed", "7", "1")
        assert 0 < float(seconds) <= time.monotonic() - began
        assert files.told == "0"
        line.send(b"thaw 7")
        assert line.recv(100) == b"thawed 7 0 0"


def test_what_does_not_come_to_rest_is_let_go(tmp_path: Path) -> None:
    files = Files(tmp_path, frozen=False)
    with running_guard() as (_, line), files.opened() as fds:
        socket.send_fds(line, [b"pulse 7 0.05 0.5"], fds)
        said = line.recv(200).decode()
        assert said.startswith(
            "lost 7 it did not come to rest within the pulse: a longer [freeze] pulse"
        )
        assert files.told == "0"


def pulses_of(line: socket.socket) -> int:
    """How many it has counted of 7; fails where it has let go of it."""
    line.send(b"beat")
    word, told = line.recv(100).decode().split()
    assert word == "beat", told
    number, counted, _ = told.split(":")
    assert number == "7"
    return int(counted)


def test_who_only_opens_and_closes_takes_nothing_and_is_left_nothing_frozen(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with running_guard() as (_, line), files.opened() as fds:
        socket.send_fds(line, [b"pulse 7 0.1 0.5"], fds)
        assert line.recv(100) == b"frozen 7"
        until = time.monotonic() + 1
        while time.monotonic() < until:
            if files.told == "1":
                files.freeze.open("r+").close()
            time.sleep(0.01)
        assert pulses_of(line) >= 2
        line.send(b"thaw 7")
        assert line.recv(100).startswith(b"thawed 7 ")
    assert files.told == "0"


def test_where_it_cannot_tell_whose_a_freeze_is_it_thaws_at_the_end_of_the_pulse(
    tmp_path: Path,
) -> None:
    """As of a plain file, whose time of modification every write changes."""
    files = Files(tmp_path)
    with running_guard() as (_, line), files.opened() as fds:
        socket.send_fds(line, [b"pulse 7 2 0.2"], fds)
        assert line.recv(100) == b"frozen 7"
        time.sleep(0.2)  # not in the same moment as the guard
        with files.freeze.open("r+") as file:
            file.write("1")
        assert files.told == "1"
        assert line.recv(100) == b"lost 7 another"
        assert files.told == "0"
        files.freeze.write_text("1\n")  # and now it is surely his
        line.send(b"beat")
        assert line.recv(100) == b"beat"
    assert files.told == "1"


def test_it_imports_little_and_nothing_of_ours() -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, guard.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert not {m for m in loaded if m.split(".")[0] in {"gpuagent", "msgspec", "asyncio", "json"}}
