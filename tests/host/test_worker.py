"""host.worker: children that answer, hang, stand still, talk nonsense, and die."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Unavailable
from gpuagent.host.child import CallSlot
from gpuagent.host.nvml_frames import decode
from gpuagent.host.worker import Ending, Worker
from tests.host.nvml_rig import children, gone, until

MODULE = "tests.host.frames_child"
SECONDS = 20.0


class Heard(msgspec.Struct):
    heard: str


class Child:
    def __init__(self, *, deadline: float = 5.0, quiet: float = 10.0, **settings: Any) -> None:
        self.heard: list[str] = []
        self.worker: Worker[Heard] = Worker(
            MODULE,
            settings=settings,
            decode=msgspec.json.Decoder(Heard).decode,
            take=lambda frame: self.heard.append(frame.heard),
            deadline=deadline,
            quiet=quiet,
        )


@contextlib.asynccontextmanager
async def started(child: Child) -> AsyncIterator[asyncio.Task[Ending]]:
    task = asyncio.create_task(child.worker.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert child.worker.pid not in children()


async def test_commands_go_in_and_frames_come_out_until_it_is_stopped() -> None:
    child = Child(do="echo")
    with pytest.raises(Unavailable, match="not running"):
        child.worker.send({"n": 1})
    async with started(child) as task:
        await until(lambda: child.worker.pid)
        for n in range(3):
            child.worker.send({"n": n})
        await until(lambda: len(child.heard) == 3)
        child.worker.stop("enough")
        ending = await task
    assert child.heard == ['{"n": 0}', '{"n": 1}', '{"n": 2}']
    assert ending == Ending("enough", asked=True)
    assert not child.worker.alive
    with pytest.raises(Unavailable):
        child.worker.send({"n": 4})


async def test_a_call_past_its_deadline_ends_the_child_and_is_named() -> None:
    child = Child(do="hang", deadline=0.2)
    async with started(child) as task:
        ending = await task
    assert child.heard == ["about to hang"]
    assert ending == Ending("a_call did not return in 0.2 s", call="a_call", target=7)
    assert not child.worker.alive


async def test_a_child_that_shows_no_life_is_ended() -> None:
    child = Child(do="stand still", quiet=0.5)
    async with started(child) as task:
        ending = await task
    assert "no sign of life" in ending.why
    assert not child.worker.alive


@pytest.mark.parametrize(
    ("junk", "times"),
    [
        (b"nonsense\n", 1),
        (b"\xff\xfe\n", 1),
        (b'{"heard": 3}\n', 1),
        (b"[]\n", 1),
        (b"x", 2**20 + 9),
    ],
)
async def test_a_frame_that_cannot_be_read_ends_the_child(junk: bytes, times: int) -> None:
    child = Child(do="junk", hex=junk.hex(), times=times)
    async with started(child) as task:
        ending = await task
    assert "sent a frame that cannot be read" in ending.why
    assert child.heard == []


async def test_what_a_library_prints_is_no_frame_and_last_words_are_kept() -> None:
    child = Child(do="print")
    async with started(child) as task:
        ending = await task
    assert child.heard == ["said"]
    assert ending.exit_code == 1
    assert ending.why == f"{MODULE} ended with exit code 1: and then it failed"


async def test_a_killed_child_is_noticed_and_reaped() -> None:
    child = Child(do="ignore")
    async with started(child) as task:
        await until(lambda: child.heard)
        assert child.worker.pid is not None
        os.kill(child.worker.pid, signal.SIGKILL)
        ending = await task
    assert ending.exit_code == -signal.SIGKILL
    assert "killed by signal 9" in ending.why


async def test_signals_of_the_terminal_do_not_end_it_but_a_cancelled_parent_does() -> None:
    child = Child(do="echo")
    async with started(child):
        await until(lambda: child.worker.pid)
        child.worker.send({"n": 1})
        await until(lambda: len(child.heard) == 1)
        assert child.worker.pid is not None
        assert os.getpgid(child.worker.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child.worker.pid, number)
        # A signal that is not ignored ends it before it runs on: it could not answer.
        child.worker.send({"n": 2})
        await until(lambda: len(child.heard) == 2)
    assert gone(child.worker.pid)


async def test_a_parent_that_does_not_read_makes_nobody_grow(tmp_path: Path) -> None:
    report = tmp_path / "report"
    child = Child(do="flood", seconds=1.0, report=str(report))
    async with started(child) as task:
        await until(lambda: child.worker.pid)
        end = time.monotonic() + SECONDS
        while not report.exists() and time.monotonic() < end:
            time.sleep(0.05)  # noqa: ASYNC251 - the loop that does not turn is what is tested
        await task
    sent, dropped, resident_kib = map(int, report.read_text().split())
    assert dropped > sent / 2
    assert resident_kib < 20 * 1024
    assert 0 < len(child.heard) < sent


async def test_a_module_that_does_not_exist_says_so() -> None:
    worker: Worker[Heard] = Worker(
        "gpuagent.host.no_such_module",
        settings={},
        decode=msgspec.json.Decoder(Heard).decode,
        take=lambda _: None,
        deadline=1,
        quiet=5,
    )
    ending = await worker.run()
    assert "No module named gpuagent.host.no_such_module" in ending.why


async def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed as an out-of-memory killer would: nothing of it can run any more."""
    note = tmp_path / "pid"
    program = f"""
        import asyncio
        from tests.host.test_worker import Child
        async def main():
            child = Child(do="ignore")
            task = asyncio.create_task(child.worker.run())
            while not child.heard:
                await asyncio.sleep(0.01)
            open({str(note)!r}, "w").write(str(child.worker.pid) + "\\n")
            await task
        asyncio.run(main())
    """
    parent = subprocess.Popen(  # noqa: ASYNC220 - quick, and ended by this test alone
        [sys.executable, "-c", textwrap.dedent(program)], cwd=Path(__file__).parents[2]
    )
    try:
        await until(lambda: note.exists() and note.read_text().endswith("\n"))
        pid = int(note.read_text())
        assert not gone(pid)
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: gone(pid))


def test_the_slot_tells_the_call_and_when_it_was_entered() -> None:
    fd = os.memfd_create("slot")
    os.ftruncate(fd, CallSlot.SIZE)
    mine, theirs = CallSlot(fd), CallSlot(fd)
    os.close(fd)
    assert theirs.inside() is None
    assert theirs.last_alive() == 0
    before = time.monotonic()
    mine.enter(3, b"nvmlDeviceGetName")
    inside = theirs.inside()
    assert inside is not None
    assert inside[0] >= before
    assert inside[1:] == (3, "nvmlDeviceGetName")
    assert theirs.last_alive() >= before
    mine.leave()
    assert theirs.inside() is None
    mine.close()
    theirs.close()


@given(st.binary(max_size=300))
def test_frames_of_any_bytes_are_refused_and_not_more(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        decode(data)


@given(
    st.dictionaries(
        st.sampled_from(["t", "i", "uuid", "at", "r", "mig", "p", "xid", "id", "why", "code"]),
        st.one_of(
            st.sampled_from(["rows", "card", "procs", "xid", "blind", "answer", "hello", "bye"]),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.none(),
            st.lists(st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=5)),
        ),
    )
)
def test_frames_of_the_right_words_and_wrong_values_are_refused(frame: dict[str, object]) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        decode(msgspec.json.encode(frame))


async def test_without_free_file_descriptors_no_child_is_started_and_nothing_is_left_behind() -> (
    None
):
    """With none at all, with one, and so on: each step of the start fails once."""
    others = children()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_before = set(os.listdir("/proc/self/fd"))
    highest = max(int(fd) for fd in open_before)
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 1 - len(open_before))]
    failed: list[str] = []
    try:
        for free in range(24):
            child = Child(do="echo")
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(holes, default=highest) + 1 + free, before[1])
            )
            task = asyncio.ensure_future(child.worker.run())
            await asyncio.sleep(0)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            child.worker.stop("enough")
            try:
                await task
            except Unavailable as error:
                failed.append(str(error))
            assert not child.worker.alive
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in holes:
            os.close(fd)
    assert 5 < len(failed) < 24
    assert all("Too many open files" in why for why in failed), failed
    assert children() <= others
    assert set(os.listdir("/proc/self/fd")) == open_before
