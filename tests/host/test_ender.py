"""Signals to real processes, each surely the one that was meant; commands as another user."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.host import ender as module
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.ender import ProcessEnder, caught, is_sandboxed
from gpuagent.host.procfs import parse_stat
from gpuagent.ports import Ender
from tests.stage.cgroups import cgroup2_mount, remove

_fits: type[Ender] = ProcessEnder

CATCHES = (
    "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True));"
    "print('ready', flush=True)\nwhile True: signal.pause()"
)
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: None); print('ready', flush=True)\n"
    "while True: signal.pause()"
)


def started(pid: int) -> int:
    return parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).started


class Child:
    """A Python process, once it is ready."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"
        self.pid = self.process.pid
        self.started = started(self.pid)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    with contextlib.ExitStack() as stack:

        def start(code: str) -> Child:
            made = Child(code)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def ender(tmp_path: Path) -> ProcessEnder:
    mount = cgroup2_mount()
    return ProcessEnder(CgroupTree(str(mount or tmp_path)))


# -- signals ---------------------------------------------------------------------------------------------


async def test_what_a_process_catches(ender: ProcessEnder, child: Callable[[str], Child]) -> None:
    one = child(CATCHES)
    assert await ender.catches(one.pid, one.started, signal.SIGUSR1)
    assert not await ender.catches(one.pid, one.started, signal.SIGUSR2)
    assert not await ender.catches(one.pid, one.started, signal.SIGTERM)
    await ender.send(one.pid, one.started, signal.SIGUSR1)
    assert one.line() == "heard"
    assert await ender.alive(one.pid, one.started)


async def test_another_with_its_number_is_never_hit(
    ender: ProcessEnder, child: Callable[[str], Child]
) -> None:
    one = child(CATCHES)
    other = one.started + 1
    assert not await ender.alive(one.pid, other)
    with pytest.raises(Gone):
        await ender.send(one.pid, other, signal.SIGKILL)
    with pytest.raises(Gone):
        await ender.catches(one.pid, other, signal.SIGUSR1)
    assert await ender.ended(one.pid, other, 0)
    assert one.process.poll() is None
    for pid in (0, -1, 2**22 + 1):
        with pytest.raises(Gone):
            await ender.send(pid, 1, signal.SIGKILL)


async def test_an_end_is_seen_when_it_comes(
    ender: ProcessEnder, child: Callable[[str], Child]
) -> None:
    one = child(CATCHES)
    assert not await ender.ended(one.pid, one.started, 0.05)
    waiting = asyncio.create_task(ender.ended(one.pid, one.started, 30))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await ender.send(one.pid, one.started, signal.SIGTERM)
    assert await waiting
    assert time.monotonic() - began < 5
    # It is not reaped, and has ended all the same.
    assert not await ender.alive(one.pid, one.started)
    with pytest.raises(Gone):
        await ender.send(one.pid, one.started, signal.SIGKILL)


async def test_one_that_does_not_listen_goes_on(
    ender: ProcessEnder, child: Callable[[str], Child]
) -> None:
    one = child(DEAF)
    await ender.send(one.pid, one.started, signal.SIGTERM)
    assert not await ender.ended(one.pid, one.started, 0.1)
    await ender.send(one.pid, one.started, signal.SIGKILL)
    assert await ender.ended(one.pid, one.started, 10)


async def test_neither_init_nor_the_agent_is_signalled(ender: ProcessEnder) -> None:
    for pid in (1, os.getpid()):
        with pytest.raises(Refused):
            await ender.send(pid, started(pid), signal.SIGTERM)


@given(st.binary())
def test_no_status_of_a_process_is_too_strange(raw: bytes) -> None:
    assert caught(raw) >= 0
    assert caught(b"Name:\tx\n" + raw.replace(b"\n", b"") + b"\nSigCgt:\t0000000000000002\n") in {
        2,
        caught(raw),
    }


# -- commands --------------------------------------------------------------------------------------------

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that every user can write to, under a path that every user can pass."""
    for part in (tmp_path, *tmp_path.parents):
        if part.stat().st_uid == os.geteuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)
    return tmp_path


SAYS = (
    "(id -u; id -g; id -G; pwd; env; ps -o sid= -o pgid= -p $$; readlink /proc/self/fd/0) > {out}"
)


@needs_root
async def test_a_command_runs_as_the_user_with_nothing_of_ours(
    ender: ProcessEnder, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the agent")
    out = open_folder / "out"
    await ender.run_as(NOBODY, ["sh", "-c", SAYS.format(out=out)], 20)
    said = out.read_text()
    user = pwd.getpwuid(NOBODY)
    uid, gid, groups, where, *rest = said.splitlines()
    assert (int(uid), int(gid), where) == (NOBODY, user.pw_gid, "/")
    assert groups.split() == [str(user.pw_gid)]
    assert "SECRET" not in said
    assert f"HOME={user.pw_dir}" in rest
    assert f"USER={user.pw_name}" in rest
    sid, pgid = rest[-2].split()
    assert sid == pgid
    assert int(sid) != os.getsid(0)
    assert rest[-1] == "/dev/null"
    assert out.stat().st_uid == NOBODY


@needs_root
async def test_a_command_runs_in_the_tenants_cgroup(open_folder: Path) -> None:
    mount = cgroup2_mount()
    if mount is None:
        pytest.skip("needs a writable cgroup v2 mount: run as root where one is mounted")
    folder = mount / f"gpuagent-ender-{os.getpid()}"
    folder.mkdir()
    out = open_folder / "out"
    try:
        ender = ProcessEnder(CgroupTree(str(mount)))
        command = ["sh", "-c", f"cat /proc/self/cgroup > {out}"]
        path, inode = f"/{folder.name}", folder.stat().st_ino
        await ender.run_as(NOBODY, command, 20, cgroup=path, inode=inode)
        assert f"0::{path}" in out.read_text().splitlines()
        # One that is not there, or is another by now, keeps nothing from being run.
        await ender.run_as(NOBODY, command, 20, cgroup=path, inode=inode + 1)
        assert f"0::{path}" not in out.read_text().splitlines()
    finally:
        remove(folder)


SEES = """
import os, sys
from gpuagent.host import runas
before = os.path.exists(sys.argv[2])
runas.see_the_host(f"/proc/{sys.argv[1]}/ns/mnt")
print(before, os.path.exists(sys.argv[2]))
"""


@needs_root
def test_a_command_sees_the_mounts_of_the_host(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare(1)")
    script = (
        f"mount -t tmpfs none {tmp_path} && touch {tmp_path}/x && "
        f'exec {sys.executable} -c "$CODE" {os.getpid()} {tmp_path}/x'
    )
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", script],
        env={**os.environ, "CODE": SEES},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"no mounts of our own here: {done.stderr}")
    assert done.stdout.split() == ["True", "False"]


async def test_how_a_command_fails_is_said(ender: ProcessEnder, tmp_path: Path) -> None:
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    with pytest.raises(Unavailable, match="exit status 3"):
        await ender.run_as(uid, ["sh", "-c", "exit 3"], 20)
    with pytest.raises(Unavailable, match="signal 9"):
        await ender.run_as(uid, ["sh", "-c", "kill -9 $$"], 20)
    with pytest.raises(Refused, match="not found"):
        await ender.run_as(uid, ["no-such-program"], 20)
    with pytest.raises(Refused, match="No such file"):
        await ender.run_as(uid, ["/no/such/program"], 20)
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(Refused, match="Permission denied"):
        await ender.run_as(uid, [str(plain)], 20)
    for nothing in ([], ["sh\0"]):
        with pytest.raises(Refused, match="no command"):
            await ender.run_as(uid, nothing, 20)
    with pytest.raises(Refused, match="no user"):
        await ender.run_as(2**31 - 7, ["true"], 20)


LIKE_THE_UNIT = """
import asyncio, ctypes, os, sys
from gpuagent.errors import AgentError
from gpuagent.host import ender as module
from gpuagent.host.cgroups import CgroupTree
from gpuagent.host.ender import ProcessEnder
if sys.argv[1] == "sandboxed":
    assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
async def main():
    for code in ("exit 1", "exit 38", "kill -SYS $$", "exit 3", "kill -9 $$"):
        try:
            await ProcessEnder(CgroupTree("/nowhere")).run_as(int(sys.argv[2]), ["sh", "-c", code], 20)
        except AgentError as error:
            print("gpuagent.service" in str(error) and "MemoryDenyWriteExecute" in str(error))
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["sandboxed", "free"])
def test_a_command_that_may_have_been_forbidden_something_is_told_of_the_sandbox(how: str) -> None:
    if is_sandboxed(Path("/proc/self/status").read_bytes()) and how == "free":
        pytest.skip("these tests run in a sandbox themselves")
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    command = [sys.executable, "-c", LIKE_THE_UNIT, how, str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = ["True"] * 3 + ["False"] * 2 if how == "sandboxed" else ["False"] * 5
    assert done.stdout.split() == expected


@pytest.mark.parametrize("what", ["the directory service", "the mount"])
async def test_what_is_not_found_in_time_holds_up_nobody_else(
    ender: ProcessEnder, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    hung, known, there = threading.Event(), pwd.getpwuid, shutil.which

    def user(number: int) -> pwd.struct_passwd:
        if number == 7 and what == "the directory service":
            hung.wait(30)
        return known(uid)

    def which(program: str, path: str) -> str | None:
        if program == "elsewhere":
            hung.wait(30)
        return there(program, path=path)

    monkeypatch.setattr("pwd.getpwuid", user)
    monkeypatch.setattr("shutil.which", which)
    monkeypatch.setattr(module, "LOOK_UP_SECONDS", 0.1)
    command = ["true" if what == "the directory service" else "elsewhere"]
    try:
        late = asyncio.create_task(_longest_lap(1.5))
        for _ in range(10):  # more than there are threads
            with pytest.raises(
                Unavailable, match=r"not found within 0\.1 s: see to .*getent passwd 7"
            ):
                await ender.run_as(7, command, 20)
        assert await late < 0.5
        monkeypatch.setattr(module, "LOOK_UP_SECONDS", 20.0)
        await asyncio.gather(*(ender.run_as(uid, ["true"], 20) for _ in range(3)))
    finally:
        hung.set()


async def _longest_lap(seconds: float) -> float:
    """For how long the loop has not turned."""
    longest, before = 0.0, time.monotonic()
    until = before + seconds
    while before < until:
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
        before = time.monotonic()
    return longest


@given(st.binary())
def test_no_status_is_too_strange_to_tell_of_a_sandbox(raw: bytes) -> None:
    is_sandboxed(raw)
    other = b"".join(c for c in (raw,) if b"Seccomp" not in c and b"NoNewPrivs" not in c)
    assert is_sandboxed(other + b"\nNoNewPrivs:\t1\nSeccomp:\t2\n")
    assert not is_sandboxed(b"NoNewPrivs:\t0\nSeccomp:\t0\n" + other)


async def test_a_command_has_its_time_and_no_more(ender: ProcessEnder, open_folder: Path) -> None:
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    out = open_folder / "pids"
    script = f"trap '' TERM; sleep 1000 & echo $$ $! > {out}; wait; sleep 1000"
    began = time.monotonic()
    with pytest.raises(Unavailable, match="not done within 1 s"):
        await ender.run_as(uid, ["sh", "-c", script], 1)
    assert time.monotonic() - began < 10
    for pid in map(int, out.read_text().split()):
        until = time.monotonic() + 5
        while _runs(pid):
            assert time.monotonic() < until, f"{pid} of the command lives on"
            await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).state not in b"ZX"
    except FileNotFoundError:
        return False


@needs_root
async def test_nothing_that_others_can_change_is_run_as_root(
    ender: ProcessEnder, open_folder: Path
) -> None:
    script = open_folder / "run"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    with pytest.raises(Refused, match="others than root can change"):
        await ender.run_as(0, [str(script)], 20)
    os.chown(script, NOBODY, NOBODY)
    with pytest.raises(Refused, match="others than root can change"):
        await ender.run_as(0, [str(script)], 20)
    await ender.run_as(0, ["true"], 20)


async def test_without_the_right_to_it_nobody_is_run_as(ender: ProcessEnder) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may become anybody")
    with pytest.raises(Refused, match="may not run anything"):
        await ender.run_as(NOBODY, ["true"], 20)
