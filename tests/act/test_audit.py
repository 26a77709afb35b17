"""The audit log is complete, bounded, and in nobody's way."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.audit import KEPT, AuditLog
from gpuagent.model.audit import Action
from tests.act.host import seat


def action(number: int = 0, why: str = "because") -> Action:
    return Action(
        wall=1_700_000_000.5 + number,
        knob="cgroup_cpu_max",
        subject=seat("a"),
        did="set",
        result="applied",
        why=why,
    )


def test_each_action_is_one_line_with_its_time_in_words(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path))
    for number in range(3):
        log.record(action(number))
    log.close()
    lines = [json.loads(x) for x in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [x["time"] for x in lines] == [f"2023-11-14T22:13:2{n}.500+00:00" for n in range(3)]
    assert lines[0]["subject"]["cgroup"] == "/a"


def test_its_size_is_bounded_and_the_newest_lines_stay(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), file_bytes=1000, files=3)
    for number in range(200):
        log.record(action(number))
    log.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())
    kept = [
        json.loads(x)["wall"]
        for name in reversed(files)
        for x in (tmp_path / name).read_text().splitlines()
    ]
    assert kept == [1_700_000_000.5 + n for n in range(200 - len(kept), 200)]
    assert log.dropped == 0


def test_a_single_file_starts_over(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), file_bytes=500, files=1)
    for number in range(20):
        log.record(action(number))
    log.close()
    assert [p.name for p in tmp_path.iterdir()] == ["audit.jsonl"]


def test_a_disk_that_takes_nothing_is_counted_and_survived(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")
    log = AuditLog(str(tmp_path))
    log.record(action())
    log.close()
    assert log.dropped == 1
    assert "audit.jsonl" in log.trouble
    log.record(action())
    assert log.dropped == 2


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_said_and_nothing_waits_for_it(
    tmp_path: Path, made: Callable[[Path], None]
) -> None:
    made(tmp_path / "audit.jsonl")
    log = AuditLog(str(tmp_path))
    log.record(action())
    log.close(20)
    assert log.dropped == 1
    assert "cannot write" in log.trouble


def test_a_pipe_that_somebody_reads_is_no_file_either(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "audit.jsonl")
    reader = os.open(tmp_path / "audit.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = AuditLog(str(tmp_path))
        log.record(action())
        log.close(20)
        assert "not a file" in log.trouble
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


# -- in memory -------------------------------------------------------------------------------------------


def test_the_latest_are_in_memory_too_numbered_and_bounded(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path))
    assert log.latest() == ()
    for number in range(KEPT + 7):
        log.record(action(number))
    latest = log.latest()
    assert [a.number for a in latest] == list(range(8, KEPT + 8))
    assert [a.wall for a in latest[-2:]] == [action(KEPT + 5).wall, action(KEPT + 6).wall]
    assert log.latest() is latest, "made once, and again after the next action only"
    log.record(action())
    assert log.latest() is not latest
    log.close()


def test_they_come_back_after_a_restart_and_the_count_goes_on(tmp_path: Path) -> None:
    before = AuditLog(str(tmp_path))
    for number in range(5):
        before.record(action(number))
    before.close()
    log = AuditLog(str(tmp_path))
    log.recall()
    log.record(action(5))
    assert [a.wall - action().wall for a in log.latest()] == [0, 1, 2, 3, 4, 5]
    assert [a.number for a in log.latest()] == [1, 2, 3, 4, 5, 6]
    assert log.latest()[0] == msgspec.structs.replace(action(), number=1)
    log.close()
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 6


def test_what_was_rotated_is_recalled_before_it(tmp_path: Path) -> None:
    before = AuditLog(str(tmp_path), file_bytes=1500, files=4)
    for number in range(30):
        before.record(action(number))
    before.close()
    log = AuditLog(str(tmp_path))
    log.recall()
    walls = [a.wall - action().wall for a in log.latest()]
    newest = (tmp_path / "audit.jsonl").read_text().count("\n")
    assert newest < len(walls) <= 30
    assert walls == list(range(30 - len(walls), 30))
    log.close()


def test_of_a_long_file_the_end_is_read_only(tmp_path: Path) -> None:
    before = AuditLog(str(tmp_path))
    for number in range(9000):
        before.record(action(number))
    before.close()
    assert (tmp_path / "audit.jsonl").stat().st_size > 1.5 * 2**20
    log = AuditLog(str(tmp_path))
    log.recall()
    assert [a.wall - action().wall for a in log.latest()] == list(range(9000 - KEPT, 9000))
    log.close()


def test_infinite_numbers_do_not_cost_the_line(tmp_path: Path) -> None:
    before = AuditLog(str(tmp_path))
    before.record(msgspec.structs.replace(action(), numbers=(("a", math.inf), ("b", 2.0))))
    before.close()
    log = AuditLog(str(tmp_path))
    log.recall()
    assert [a.numbers for a in log.latest()] == [(("b", 2.0),)]
    log.close()


@given(st.lists(st.binary(max_size=60) | st.just(b"whole"), max_size=8))
def test_torn_and_foreign_lines_are_passed_over(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("audit")
    before = AuditLog(str(folder))
    before.record(action())
    before.close()
    line = (folder / "audit.jsonl").read_bytes()
    lines = [line if part == b"whole" else part + b"\n" for part in parts]
    (folder / "audit.jsonl").write_bytes(b"".join(lines) + line[: len(line) // 2])
    log = AuditLog(str(folder))
    log.recall()
    assert len(log.latest()) == parts.count(b"whole")
    log.close()


def test_a_hostile_line_does_not_stop_the_start(tmp_path: Path) -> None:
    before = AuditLog(str(tmp_path))
    before.record(action())
    before.close()
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(deep)
    log = AuditLog(str(tmp_path))
    log.recall()
    assert len(log.latest()) == 1
    log.close()


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir])
def test_recalling_waits_for_no_pipe(tmp_path: Path, made: Callable[[Path], None]) -> None:
    made(tmp_path / "audit.jsonl")
    log = AuditLog(str(tmp_path))
    log.recall()
    assert log.latest() == ()
    log.close()


HUNG = """
import sys, threading
from gpuagent.act.audit import AuditLog
from tests.act.test_audit import action

class Hung(AuditLog):
    "On a disk that does not answer."
    def _write(self, batch):
        threading.Event().wait()

log = Hung(sys.argv[1])
log.record(action())
log.close(0.1)
print("closed")
"""


def test_a_disk_that_hangs_keeps_no_process_from_ending(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HUNG, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "closed" in done.stdout
    assert "the disk does not answer" in done.stdout, "logged, to where nothing is set up"


@given(st.text() | st.sampled_from(["\udc80", "\n\x1b[2J", "\u202e"]))
def test_any_words_stay_on_one_line(tmp_path_factory: object, words: str) -> None:
    folder = tmp_path_factory.mktemp("audit")  # type: ignore[attr-defined]
    log = AuditLog(str(folder))
    log.record(action(why=words))
    log.close()
    content = (folder / "audit.jsonl").read_bytes()
    assert content.count(b"\n") == 1
    json.loads(content)
