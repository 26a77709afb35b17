"""Files that are written whole: no pipe and no hung disk keeps anybody waiting, and nothing is forgotten."""

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuagent.errors import Unavailable
from gpuagent.keptfile import Disk, Hung, KeptFile, read_file, replace_file
from gpuagent.starts import PauseMark, Starts
from tests.act.host import Clock


def test_a_pipe_in_its_place_is_neither_read_nor_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    os.mkfifo(tmp_path / "file.new")
    with pytest.raises(OSError, match="no regular file"):
        read_file(str(tmp_path / "file"), 10)
    with pytest.raises(OSError, match="No such device"):
        replace_file(str(tmp_path / "file"), b"x")
    reader = os.open(tmp_path / "file.new", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="no regular file"):
        replace_file(str(tmp_path / "file"), b"x")
    os.close(reader)


def test_pipes_keep_no_run_from_starting(tmp_path: Path) -> None:
    for name in ("starts.json", "starts.json.new", "paused"):
        os.mkfifo(tmp_path / name)
    assert Starts(str(tmp_path), "b1").begin(10.0) == 0
    assert PauseMark(str(tmp_path)).read() == "somebody (the mark cannot be read)"


def test_a_file_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_file(str(file), 2, trusted=True) == b"abc"
    file.chmod(0o620)
    with pytest.raises(OSError, match="others can write it"):
        read_file(str(file), 2, trusted=True)
    assert read_file(str(file), 2) == b"abc"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        read_file(str(tmp_path / "file"), 2)


# -- a disk that hangs ---------------------------------------------------------------------------------------


async def test_a_disk_that_hangs_is_given_up_and_does_one_thing_at_a_time() -> None:
    disk = Disk(seconds=0.02)
    done: list[str] = []
    answers = threading.Event()

    def hang() -> None:
        answers.wait(30)
        done.append("first")

    with pytest.raises(Hung, match="has not answered"):
        await disk.do(hang)
    with pytest.raises(Hung, match="has not answered"):
        await disk.do(lambda: done.append("never"))
    answers.set()
    await until(lambda: bool(done))
    await disk.do(lambda: done.append("second"))
    assert done == ["first", "second"]


async def test_what_a_call_raises_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await Disk().do(lambda: os.unlink(tmp_path / "none"))


async def test_one_who_has_left_is_followed_by_the_next(tmp_path: Path) -> None:
    disk, answers = Disk(seconds=30), threading.Event()
    leaving = asyncio.create_task(disk.do(waiting(answers)))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    answers.set()
    await disk.do((tmp_path / "made").touch)
    assert (tmp_path / "made").exists()


async def until(so: Callable[[], bool]) -> None:
    for _ in range(4000):
        if so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not come so far")


def waiting(answers: threading.Event) -> Callable[[], None]:
    """A call that hangs until the disk answers."""

    def call() -> None:
        answers.wait(30)

    return call


# -- a file that is kept -------------------------------------------------------------------------------------


class Held:
    """A file that is to hold a text."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.text = b"one"
        self.path = folder / "file"
        self.file = KeptFile(str(self.path), self._taken, clock=Clock(), disk=disk)

    def _taken(self) -> Callable[[], bytes]:
        text = self.text
        return lambda: text


async def test_what_the_disk_did_not_take_is_said_and_written_at_the_end(tmp_path: Path) -> None:
    held = Held(tmp_path)
    (tmp_path / "file.new").mkdir()
    with pytest.raises(Unavailable, match=r"cannot be written: .*it is tried again"):
        await held.file.write()
    assert str(held.path) in held.file.trouble
    await held.file.close()
    assert held.file.trouble, "it is no better"
    (tmp_path / "file.new").rmdir()
    held.text = b"two"
    await held.file.close()
    assert held.path.read_bytes() == b"two"
    assert held.file.trouble == ""
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o600


async def test_what_is_as_it_should_be_is_not_written_at_the_end(tmp_path: Path) -> None:
    held = Held(tmp_path)
    await held.file.close()
    assert not held.path.exists()


async def test_it_is_tried_again_until_the_disk_takes_it(tmp_path: Path) -> None:
    held = Held(tmp_path)
    (tmp_path / "file.new").mkdir()
    running = asyncio.create_task(held.file.run())
    held.file.outdated()
    await until(lambda: bool(held.file.trouble))
    (tmp_path / "file.new").rmdir()
    await until(lambda: not held.file.trouble)
    assert held.path.read_bytes() == b"one"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_hung_write_that_ends_late_is_overwritten(tmp_path: Path) -> None:
    disk, answers = Disk(seconds=0.02), threading.Event()
    held = Held(tmp_path, disk)

    def late() -> bytes:
        answers.wait(30)
        return b"late"

    with pytest.raises(Unavailable, match="has not answered"):
        await held.file.write(late)
    assert "has not answered" in held.file.trouble
    answers.set()
    await until(held.path.exists)
    await until(lambda: not any(t.name == "disk" for t in threading.enumerate()))
    await asyncio.sleep(0.01)  # and the loop has been told
    await held.file.close()
    assert held.path.read_bytes() == b"one"
