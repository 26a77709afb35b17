"""host.tool: programs that end, hang, flood, leave children behind, or are not there."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from gpuagent.errors import Refused, Unavailable, Unsupported
from gpuagent.host.tool import KEPT_BYTES, find, run
from tests.host.nvml_rig import gone, until


async def test_what_it_says_and_how_it_ends_is_told() -> None:
    ran = await run(["sh", "-c", "echo one; echo two >&2; exit 3"], seconds=20)
    assert (ran.code, ran.text, ran.line, ran.in_time) == (3, "one\ntwo\n", "two", True)
    ran = await run(["sh", "-c", "kill -9 $$"], seconds=20)
    assert (ran.code, ran.line) == (-9, "it says nothing")


async def test_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {note}; echo waiting; trap '' TERM; wait"
    ran = await run(["sh", "-c", script], seconds=0.5)
    assert (ran.code, ran.text, ran.in_time) == (None, "waiting\n", False)
    child = int(note.read_text())
    await until(lambda: gone(child))


async def test_a_cancelled_caller_leaves_nothing_behind(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    task = asyncio.create_task(run(["sh", "-c", f"echo $$ > {note}; exec sleep 60"], seconds=60))
    await until(lambda: note.exists() and note.read_text().strip())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(int(note.read_text()))


async def test_a_flood_is_read_and_its_end_kept() -> None:
    ran = await run(["sh", "-c", "yes | head -c 3000000; echo end"], seconds=30)
    assert ran.code == 0
    assert ran.line == "end"
    assert len(ran.text) == KEPT_BYTES


async def test_a_child_that_keeps_the_pipe_open_holds_nobody_up() -> None:
    began = time.monotonic()
    ran = await run(["sh", "-c", "sleep 3 & echo done"], seconds=30)
    assert (ran.code, ran.text) == (0, "done\n")
    assert time.monotonic() - began < 2.5


async def test_it_gets_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/secret")
    ran = await run(["sh", "-c", "env; pwd; cat"], seconds=20)
    assert "NOTIFY_SOCKET" not in ran.text
    assert ran.line == "/"
    assert len(os.listdir("/proc/self/fd")) < 64


async def test_it_is_told_and_its_complaint_is_kept_apart() -> None:
    script = 'read a; read b; echo "$b$a"; echo "$C" >&2; cat'
    ran = await run(["sh", "-c", script], seconds=20, said="1\n2\n", env={"C": "no"}, apart=True)
    assert (ran.code, ran.text, ran.complaint, ran.whole) == (0, "21\n", "no\n", True)


async def test_one_that_does_not_listen_is_told_all_the_same() -> None:
    for _ in range(20):
        assert (await run(["true"], seconds=20, said="quit\n")).code == 0


async def test_what_is_not_all_is_known_not_to_be() -> None:
    for size, whole in ((999, True), (1000, True), (1001, False), (300_000, False)):
        ran = await run(["sh", "-c", f"yes | head -c {size}"], seconds=30, kept=1000)
        assert (len(ran.text), ran.whole) == (min(size, 1000), whole)


async def test_what_cannot_be_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no-such-tool is not in PATH: get it"):
        find("no-such-tool", "get it")
    with pytest.raises(Unsupported, match="is not there"):
        find(str(tmp_path / "nothing"), "get it")
    with pytest.raises(Refused, match="may not be run"):
        await run([str(tmp_path)], seconds=1)
    with pytest.raises(Unavailable, match="cannot be started"):
        await run([str(tmp_path / "nothing")], seconds=1)
    broken = tmp_path / "broken"
    broken.write_text("no program\n")
    broken.chmod(0o755)
    with pytest.raises(Unavailable, match="cannot be started"):
        await run([find(str(broken), "")], seconds=1)


async def test_no_descriptor_is_left_open() -> None:
    await run(["true"], seconds=20)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await run(["true"], seconds=20)
        await run(["sleep", "60"], seconds=0.05)
    assert len(set(os.listdir("/proc/self/fd"))) == len(before)
