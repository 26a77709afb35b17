"""/proc as it is, and as it could be: a tree of files with hostile, broken and vanishing processes."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Gone, Unavailable
from gpuagent.host.procfs import (
    HostNode,
    ProcTable,
    parse_cgroup,
    parse_pressure,
    parse_stat,
    parse_uid,
    plain,
)
from gpuagent.ports import Node, Processes

_fits: tuple[Processes, Node] = (ProcTable(), HostNode())


class FakeProc:
    """A proc tree in a folder. Processes are written as the kernel would show them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(
        self,
        pid: int,
        *,
        name: bytes = b"python3",
        started: int = 500,
        ppid: int = 1,
        flags: int = 0x400000,
        state: bytes = b"S",
        threads: int = 1,
        uid: int = 0,
        cgroup: bytes = b"0::/x.service\n",
        exe: bytes | None = b"/usr/bin/python3.11",
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = b"%s %d 1 1 0 -1 %d %s %d 0 %d 99 7" % (
            state,
            ppid,
            flags,
            b" ".join([b"0"] * 10),
            threads,
            started,
        )
        (folder / "stat").write_bytes(b"%d (%s) %s\n" % (pid, name, fields))
        (folder / "status").write_bytes(b"Name:\tx\nUid:\t%d\t%d\t0\t0\nGid:\t0\n" % (uid, uid))
        (folder / "cgroup").write_bytes(cgroup)
        link = folder / "exe"
        link.unlink(missing_ok=True)
        if exe is not None:
            os.symlink(exe, os.fsencode(link))

    def remove(self, pid: int) -> None:
        folder = self.root / str(pid)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


@contextlib.contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_this_process_reads_as_psutil_does() -> None:
    mine, theirs = ProcTable().read(os.getpid()), psutil.Process()
    assert (mine.pid, mine.ppid, mine.uid) == (theirs.pid, theirs.ppid(), theirs.uids().real)
    assert mine.user == theirs.username()
    assert mine.exe == theirs.exe()
    ticks = os.sysconf("SC_CLK_TCK")
    assert mine.started / ticks == pytest.approx(theirs.create_time() - psutil.boot_time(), abs=2)
    assert mine.cgroup.startswith("/")


def test_the_table_has_a_real_child_and_no_kernel_threads() -> None:
    with running("sleep", "60") as child:
        table = {p.pid: p for p in ProcTable().table()}
        assert table[child.pid].ppid == os.getpid()
        assert 2 not in table
        assert 1 in table


def test_a_process_that_has_ended_is_gone_even_while_its_parent_does_not_look() -> None:
    table = ProcTable()
    with running("true") as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        with pytest.raises(Gone, match="has ended"):
            table.read(child.pid)
        assert child.pid not in {p.pid for p in table.table()}
    with pytest.raises(Gone):
        table.read(child.pid)


def test_an_exec_changes_the_executable() -> None:
    table = ProcTable()
    with running("sh", "-c", "kill -STOP $$; exec sleep 60") as child:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        before = next(p for p in table.table() if p.pid == child.pid)
        os.kill(child.pid, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while (after := next(p for p in table.table() if p.pid == child.pid)) == before:
            assert time.monotonic() < deadline, "the exec was not seen"
            time.sleep(0.01)
        assert (before.name, after.name) == ("sh", "sleep")
        assert before.exe != after.exe
        assert before.started == after.started


def test_unchanged_processes_are_the_same_objects(proc: FakeProc) -> None:
    table = ProcTable(str(proc.root))
    proc.put(7)
    proc.put(8)
    first = table.table()
    proc.put(8, cgroup=b"0::/moved.service\n")
    second = table.table()
    assert second[0] is first[0]
    assert (first[1].cgroup, second[1].cgroup) == ("/x.service", "/moved.service")


def test_a_number_used_again_is_another_process(proc: FakeProc) -> None:
    table = ProcTable(str(proc.root))
    proc.put(7, exe=b"/bin/old", uid=1)
    (old,) = table.table()
    proc.put(7, exe=b"/bin/new", uid=2, started=501)
    (new,) = table.table()
    assert (old.exe, new.exe) == ("/bin/old", "/bin/new")
    assert (old.uid, new.uid) == (1, 2)


def test_a_known_process_is_the_same_object_until_it_changes(proc: FakeProc) -> None:
    proc.put(7)
    table = ProcTable(str(proc.root))
    known = table.read(7)
    assert table.again(known) is known
    proc.put(7, cgroup=b"0::/y.service\n")
    moved = table.again(known)
    assert (moved.cgroup, moved.exe) == ("/y.service", known.exe)
    proc.put(7, name=b"bash", exe=b"/usr/bin/bash")
    assert table.again(known).exe == "/usr/bin/bash"
    proc.put(7, started=900, uid=3)
    other = table.again(known)
    assert (other.started, other.uid) == (900, 3)
    proc.remove(7)
    with pytest.raises(Gone):
        table.again(known)


def test_the_cgroup_alone(proc: FakeProc) -> None:
    table = ProcTable(str(proc.root))
    proc.put(7)
    assert table.cgroup(7) == "/x.service"
    with pytest.raises(Gone):
        table.cgroup(8)


def test_what_vanishes_between_two_reads_is_left_out(proc: FakeProc) -> None:
    proc.put(7)
    for file in ("stat", "status", "cgroup"):
        proc.put(8)
        (proc.root / "8" / file).unlink()
        assert [p.pid for p in ProcTable(str(proc.root)).table()] == [7]
        with pytest.raises(Gone):
            ProcTable(str(proc.root)).read(8)


def test_a_leader_that_has_ended_before_its_threads_lives_on(proc: FakeProc) -> None:
    proc.put(7, state=b"Z", threads=4)
    proc.put(8, state=b"Z", threads=1)
    proc.put(9, state=b"X", threads=0)
    assert [p.pid for p in ProcTable(str(proc.root)).table()] == [7]


def test_kernel_threads_are_left_out(proc: FakeProc) -> None:
    proc.put(2, flags=0x208040, exe=None)
    proc.put(7)
    assert [p.pid for p in ProcTable(str(proc.root)).table()] == [7]


@pytest.mark.parametrize(
    "name", [b"a) S 1 2 (b", b"two\nlines", b"\x1b[31mred", b"caf\xe9", b"", b"((((", b")"]
)
def test_hostile_names(proc: FakeProc, name: bytes) -> None:
    proc.put(7, name=name, ppid=3, started=77)
    (one,) = ProcTable(str(proc.root)).table()
    assert (one.ppid, one.started) == (3, 77)
    assert one.name.isprintable()


def test_hostile_cgroups_and_executables_stay_one_printable_line(proc: FakeProc) -> None:
    proc.put(
        7,
        cgroup=b"9:name=systemd:/a\n0::/x.service/\x1b[2J/caf\xe9\n",
        exe=b"/tmp/\xff\n0::/evil (deleted)",
    )
    (one,) = ProcTable(str(proc.root)).table()
    assert one.cgroup == "/x.service/\ufffd[2J/caf\ufffd"
    assert one.exe == "/tmp/\ufffd\ufffd0::/evil"


def test_a_user_without_a_name_is_his_number(proc: FakeProc) -> None:
    proc.put(7, uid=4_000_000_123)
    (one,) = ProcTable(str(proc.root)).table()
    assert (one.uid, one.user) == (4_000_000_123, "4000000123")


def test_an_executable_that_cannot_be_read_is_empty(proc: FakeProc) -> None:
    proc.put(7, exe=None)
    assert ProcTable(str(proc.root)).read(7).exe == ""


def test_without_proc_there_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="mounted proc"):
        ProcTable(str(tmp_path / "nowhere")).table()


def test_five_thousand_processes_and_then_again(proc: FakeProc) -> None:
    for pid in range(10, 5010):
        proc.put(pid, cgroup=b"0::/s%d.service\n" % (pid % 200))
    table = ProcTable(str(proc.root))
    first = table.table()
    assert len(first) == 5000
    proc.remove(10)
    proc.put(5010)
    second = table.table()
    assert [p.pid for p in second] == list(range(11, 5011))
    assert all(a is b for a, b in zip(first[1:], second[:-1], strict=True))


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"0::/\n", "/"),
        (b"0::/a.service\n", "/a.service"),
        (b"2:cpu:/v1\n1:name=systemd:/v1\n0::/v2\n", "/v2"),
        (b"2:cpu:/v1\n", ""),
        (b"", ""),
        (b"1:name=systemd:/0::/x\n", ""),
    ],
)
def test_the_v2_path(raw: bytes, path: str) -> None:
    assert parse_cgroup(raw) == path


@given(st.binary(max_size=300))
def test_junk_is_a_value_error_and_nothing_else(raw: bytes) -> None:
    for parse in (parse_stat, parse_uid):
        with contextlib.suppress(ValueError):
            parse(raw)
    assert parse_cgroup(raw).isprintable()
    assert plain(raw).isprintable()


@given(st.binary(max_size=15).filter(lambda n: b"\0" not in n), st.integers(0, 2**31))
def test_any_name_leaves_the_fields_where_they_are(name: bytes, started: int) -> None:
    rest = b"R 5 1 1 0 -1 64 0 0 0 0 0 0 0 0 0 0 3 0 %d 0 0" % started
    stat = parse_stat(b"7 (" + name + b") " + rest)
    assert (stat.name, stat.ppid, stat.threads, stat.started) == (name, 5, 3, started)


def test_the_host_says_what_psutil_says() -> None:
    node = HostNode()
    first = node.read()
    assert first.cpu_busy_ratio is None
    assert first.cpus == psutil.cpu_count()
    assert first.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < first.memory_available_bytes <= first.memory_total_bytes
    deadline = time.monotonic() + 10
    while (busy := node.read().cpu_busy_ratio) is None:  # until a clock tick has passed
        assert time.monotonic() < deadline
    assert 0 <= busy <= 1


def test_pressure_comes_from_proc_or_the_root_cgroup(tmp_path: Path) -> None:
    proc_root, cgroup_root = tmp_path / "proc", tmp_path / "cgroup"
    (proc_root / "pressure").mkdir(parents=True)
    cgroup_root.mkdir()
    (proc_root / "pressure/cpu").write_text("some avg10=25.00 avg60=0.00 total=1\n")
    (cgroup_root / "cpu.pressure").write_text("some avg10=99.00\n")
    (cgroup_root / "io.pressure").write_text("some avg10=50.00\n")
    facts = HostNode(str(proc_root), str(cgroup_root)).read()
    assert facts.cpu_pressure_ratio == 0.25
    assert facts.io_pressure_ratio == 0.5
    assert facts.memory_pressure_ratio is None


@given(st.text())
def test_junk_pressure_is_unknown(text: str) -> None:
    ratio = parse_pressure(f"some {text}")
    assert ratio is None or 0 <= ratio <= 1
