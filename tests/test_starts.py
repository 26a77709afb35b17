"""What one run leaves for the next: crashes counted, a pause kept, files written whole or not."""

import contextlib
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Unavailable
from gpuagent.keptfile import replace_file
from gpuagent.starts import (
    CRASH_WINDOW_SECONDS,
    CRASHES_TO_OBSERVE,
    PauseMark,
    Starts,
)

BOOT = "b1"


def crashes(folder: Path, *starts: float, boot: str = BOOT) -> list[int]:
    """What each of these runs is told, none of which ends as it should."""
    return [Starts(str(folder), boot).begin(at) for at in starts]


def test_a_file_is_there_for_good_once_its_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[bool, bool]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        written.append((stat.S_ISDIR(os.fstat(fd).st_mode), (tmp_path / "a").exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(str(tmp_path / "a"), b"text")
    assert written == [(False, False), (True, True)], "the file, and then its name"


# -- crashes -----------------------------------------------------------------------------------------


def test_the_first_start_follows_no_crash(tmp_path: Path) -> None:
    assert crashes(tmp_path, 10.0) == [0]


def test_the_third_crash_within_ten_minutes_is_one_too_many(tmp_path: Path) -> None:
    assert crashes(tmp_path, 10, 20, 30, 40) == [0, 1, 2, 3]
    assert CRASHES_TO_OBSERVE == 3


def test_crashes_far_apart_do_not_add_up(tmp_path: Path) -> None:
    far = CRASH_WINDOW_SECONDS + 1
    assert crashes(tmp_path, 0, far, 2 * far, 3 * far) == [0, 1, 1, 1]
    # Three in eleven minutes are never three within ten.
    assert crashes(tmp_path, 4 * far, 4 * far + 330, 4 * far + 660) == [1, 2, 2]


def test_a_clean_end_is_no_crash(tmp_path: Path) -> None:
    for at in (10.0, 20.0, 30.0, 40.0):
        run = Starts(str(tmp_path), BOOT)
        assert run.begin(at) == 0
        run.end()


def test_a_clean_end_is_the_end_of_the_crashes_before(tmp_path: Path) -> None:
    assert crashes(tmp_path, 10, 20) == [0, 1]
    run = Starts(str(tmp_path), BOOT)
    assert run.begin(30) == 2
    run.end()
    assert crashes(tmp_path, 40, 50) == [0, 1]


def test_another_boot_starts_anew(tmp_path: Path) -> None:
    crashes(tmp_path, 10, 20, 30)
    assert crashes(tmp_path, 5, 6, boot="b2") == [0, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"boot": 7}',
        b'{"boot": "b1", "running": "yes"}',
        b'{"boot": "b1", "running": true, "crashes": [null]}',
        b'{"boot": "b1", "running": true, "crashes": [1e999]}',
        b'{"x":' + b"[" * 60_000,
        b'{"boot": "b1", "x": "' + b"a" * 100_000 + b'"}',
    ],
    ids=lambda content: content[:20].decode("latin-1"),
)
def test_a_file_that_makes_no_sense_counts_nothing_and_is_replaced(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "starts.json").write_bytes(content)
    assert crashes(tmp_path, 10, 20) == [0, 1]


@given(st.binary(max_size=60), st.floats(0, 1e9))
def test_junk_stops_nobody(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: float
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    (folder / "starts.json").write_bytes(junk)
    assert crashes(folder, at, at + 1) == [0, 1]


@given(st.lists(st.floats(-1e12, 1e12), max_size=20), st.floats(0, 1e6), st.booleans())
def test_any_list_of_crashes_counts_those_within_the_window(
    tmp_path_factory: pytest.TempPathFactory, listed: list[float], now: float, running: bool
) -> None:
    folder = tmp_path_factory.mktemp("listed")
    book = {"boot": BOOT, "running": running, "crashes": listed}
    (folder / "starts.json").write_bytes(msgspec.json.encode(book))
    recent = sum(0 <= now - c <= CRASH_WINDOW_SECONDS for c in listed)
    assert Starts(str(folder), BOOT).begin(now) == recent + running


def test_no_directory_or_an_unusable_file_stops_nobody(tmp_path: Path) -> None:
    assert crashes(tmp_path / "missing", 10, 20, 30) == [0, 0, 0]
    (tmp_path / "starts.json").mkdir()
    run = Starts(str(tmp_path), BOOT)
    assert run.begin(10) == 0
    run.end()


def test_a_full_disk_keeps_what_was_known(tmp_path: Path) -> None:
    crashes(tmp_path, 10, 20)
    with room_for(0):
        assert crashes(tmp_path, 30, 40) == [2, 2]
    assert crashes(tmp_path, 50) == [2]


# -- pause -------------------------------------------------------------------------------------------


def test_a_pause_is_kept_until_it_is_cleared(tmp_path: Path) -> None:
    mark = PauseMark(str(tmp_path))
    assert mark.read() is None
    mark.set("uid 1000 (alice)")
    assert PauseMark(str(tmp_path)).read() == "uid 1000 (alice)"
    mark.set("uid 0")
    assert mark.read() == "uid 0"
    mark.clear()
    assert mark.read() is None
    mark.clear()


@given(st.text())
def test_whoever_asked_a_pause_is_a_pause(
    tmp_path_factory: pytest.TempPathFactory, by: str
) -> None:
    mark = PauseMark(str(tmp_path_factory.mktemp("mark")))
    mark.set(by)
    assert mark.read()


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"x" * 10_000])
def test_a_mark_that_makes_no_sense_is_a_pause(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "paused").write_bytes(content)
    found = PauseMark(str(tmp_path)).read()
    assert found
    assert len(found) <= 256


def test_a_mark_that_cannot_be_read_or_removed_is_a_pause(tmp_path: Path) -> None:
    (tmp_path / "paused").mkdir()
    mark = PauseMark(str(tmp_path))
    assert mark.read() == "somebody (the mark cannot be read)"
    with pytest.raises(Unavailable, match="cannot remove"):
        mark.clear()
    with pytest.raises(Unavailable, match="a restart will not remember it"):
        mark.set("uid 0")


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    mark = PauseMark(str(tmp_path))
    with room_for(0), pytest.raises(Unavailable, match="a restart will not remember it"):
        mark.set("uid 0")
    with pytest.raises(Unavailable, match="a restart will not remember it"):
        PauseMark(str(tmp_path / "missing")).set("uid 0")


# -- replacing a file --------------------------------------------------------------------------------


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """While inside, no file of this process can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_replaced_whole_and_for_root_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"", b"x" * 1_000_000):
        replace_file(str(path), content)
        assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_where_only_a_part_fits_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(str(path), b"the old one")
    with room_for(100), pytest.raises(OSError, match="too large"):
        replace_file(str(path), b"x" * 5000)
    assert path.read_bytes() == b"the old one"
    replace_file(str(path), b"the new one")
    assert path.read_bytes() == b"the new one"


def test_a_link_laid_in_its_way_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    (tmp_path / "file.new").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(str(tmp_path / "file"), b"x")
    assert victim.read_bytes() == b"untouched"
