"""Reservations over a restart, whatever their file holds; and the last refusals of each user."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuagent.errors import Unavailable
from gpuagent.model.inventory import Level
from gpuagent.model.run import (
    REFUSALS_OF_USER,
    REFUSED_USERS,
    Refusal,
    Reservation,
    RunList,
)
from gpuagent.runbook import RunBook
from tests.sense.fakes import OwnClock


def book(folder: Path, boot: str = "b1") -> RunBook:
    return RunBook(str(folder), boot=boot, clock=OwnClock())


def made(name: str = "job", pid: int = 100, **fields: Any) -> Reservation:
    return Reservation(
        **{
            "name": name,
            "level": Level.L3,
            "pid": pid,
            "started": 5,
            "uid": 1000,
            "by": "user 1000",
            "gpus": ("GPU-a",),
            "memory_bytes": 1 << 30,
            "began_wall": 7.0,
            **fields,
        }
    )


async def test_it_is_there_after_a_restart_and_not_after_a_boot(tmp_path: Path) -> None:
    first = book(tmp_path)
    await first.add(made("b", cgroup="/x.slice/\udcff.scope"))
    await first.add(made("a", pid=101))
    again = book(tmp_path)
    assert again.begin() == ()
    assert [r.name for r in again.active()] == ["a", "b"]
    assert again.active() == first.active()
    for boot in ("b2", ""):
        other = book(tmp_path, boot)
        assert other.begin() == ()
        assert other.active() == ()


async def test_what_has_ended_or_is_known_better_is_so_after_a_restart(tmp_path: Path) -> None:
    first = book(tmp_path)
    await first.add(made("a"))
    await first.add(made("b", pid=101))
    first.end([made("a").key, (7, 7)])
    first.amend(msgspec.structs.replace(made("b", pid=101), cgroup="/x.scope", unit="x.scope"))
    first.amend(made("gone", pid=102))
    assert [r.cgroup for r in first.active()] == ["/x.scope"]
    await first.close()
    again = book(tmp_path)
    again.begin()
    assert again.active() == first.active()


async def test_the_same_object_while_nothing_changes(tmp_path: Path) -> None:
    one = book(tmp_path)
    await one.add(made())
    before = one.active()
    one.end([(9, 9)])
    assert one.active() is before
    assert one.told() is one.told()


async def test_what_cannot_be_kept_is_not_admitted(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with pytest.raises(Unavailable, match="not started, since a restart"):
        await book(folder).add(made())
    failed = book(folder)
    with pytest.raises(Unavailable):
        await failed.add(made())
    assert failed.active() == ()
    assert "cannot be written" in failed.trouble


async def test_it_is_written_again_until_the_disk_takes_it(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    folder.mkdir()
    one = book(folder)
    await one.add(made())
    folder.rename(tmp_path / "away")
    one.end([made().key])
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0.05)
    (tmp_path / "away").rename(folder)
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not json.loads((folder / "runs.json").read_text())["runs"]:
            break
    running.cancel()
    assert json.loads((folder / "runs.json").read_text())["runs"] == []


ROW = msgspec.to_builtins(made())
CHANGES: list[dict[str, Any]] = [
    {"name": "../x"},
    {"name": "unit:x"},
    {"pid": 0},
    {"uid": -1},
    {"memory_bytes": 0},
    {"memory_bytes": 2**60},
    {"share_ratio": 2.0},
    {"cgroup": "x"},
    {"cgroup": "/" + "x" * 5000},
    {"gpus": ["x"] * 65},
    {"notes": ["x"] * 9},
    {"level": 7},
]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version":2,"boot":"b1","runs":[]}',
        b"\xff\xfe",
        b"[" * 100_000,
        *[json.dumps({"version": 1, "boot": "b1", "runs": [ROW | c]}).encode() for c in CHANGES],
        json.dumps({"version": 1, "boot": "b1", "runs": [ROW, ROW | {"pid": 7}]}).encode(),
        json.dumps({"version": 1, "boot": "b1", "runs": [ROW, ROW | {"name": "x"}]}).encode(),
        json.dumps(
            {
                "version": 1,
                "boot": "b1",
                "runs": [ROW | {"name": f"n{i}", "pid": i + 1} for i in range(257)],
            }
        ).encode(),
    ],
)
def test_a_file_that_is_none_of_ours_reserves_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "runs.json"
    file.write_bytes(content)
    file.chmod(0o600)
    one = book(tmp_path)
    (event,) = one.begin()
    assert event.kind == "runs-unreadable"
    assert one.active() == ()


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_whatever_the_file_holds_it_starts(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "runs.json"
    file.write_bytes(content)
    file.chmod(0o600)
    assert len(book(tmp_path).begin()) == 1


def test_a_file_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"version": 1, "boot": "b1", "runs": [ROW]}))
    file.chmod(0o666)
    one = book(tmp_path)
    assert len(one.begin()) == 1
    assert one.active() == ()


def test_the_last_refusals_of_each_user_are_kept_and_no_more(tmp_path: Path) -> None:
    one = book(tmp_path)
    for number in range(20):
        one.refuse(Refusal(kind="refused", why=f"no {number}", uid=1000))
    one.refuse(Refusal(kind="refused", why="other", uid=1001))
    told = one.told().refused
    assert [r.why for r in told if r.uid == 1000] == [
        f"no {n}" for n in range(20 - REFUSALS_OF_USER, 20)
    ]
    assert [r.number for r in told] == sorted(r.number for r in told)
    for uid in range(5000, 5000 + 2 * REFUSED_USERS):
        one.refuse(Refusal(kind="refused", why="x", uid=uid))
    assert len({r.uid for r in one.told().refused}) == REFUSED_USERS
    assert one.told().active == RunList().active
