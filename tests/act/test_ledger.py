"""The ledger survives what disks and crashes do to it."""

import asyncio
import itertools
import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.act.journal import Journal
from gpuagent.act.ledger import Ledger, boot_id
from gpuagent.act.record import Book, Entry, Intend, Kept, decode_line, encode_line, target_of
from gpuagent.errors import Corrupt, Refused
from gpuagent.model.inventory import Subject
from gpuagent.model.vocab import CPU_MAX, POWER_LIMIT
from gpuagent.ports import Real
from tests.act.host import Disk, Inline, card, seat

MAX = Real(float("inf"), "max 100000")
CUT = Real(0.2, "20000 100000")


def opened(folder: Path, **more: Any) -> Ledger:
    return Ledger(str(folder), **{"boot": "b1", "executor": Inline(), **more})


async def hold(ledger: Ledger, *subjects: Subject, write: Real = CUT) -> None:
    await asyncio.gather(
        *(
            ledger.intend(
                knob=CPU_MAX, subject=s, identity="i", original=MAX, write=write, rule="r"
            )
            for s in subjects
        )
    )


def lines(folder: Path) -> list[bytes]:
    return (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)


async def test_an_intent_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    await hold(ledger, seat("a"))
    read = opened(tmp_path)
    (entry,) = read.entries.values()
    assert entry.subject == seat("a")
    assert entry.original == MAX
    assert entry.pending
    assert entry.explains(CUT, 0)
    assert entry.explains(MAX, 0)
    assert not entry.explains(Real(0.5, "50000 100000"), 0)
    await ledger.close()
    await read.close()


async def test_confirmed_reads_are_ours_and_done_ends_it(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    await hold(ledger, seat("a"))
    target = target_of(CPU_MAX, seat("a"))
    ledger.confirm(target, Real(0.21, "21000 100000"))
    await ledger.flush()
    entry = opened(tmp_path).entries[target]
    assert not entry.pending
    assert entry.explains(Real(0.21, "21000 100000"), 0)
    assert not entry.explains(MAX, 0)
    ledger.done(target, "put back", "test")
    await ledger.flush()
    assert not ledger.entries
    assert not opened(tmp_path).entries
    await ledger.close()


async def test_a_real_thread_and_a_real_disk(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "new" / "state"))
    await hold(ledger, *(seat(f"t{n}") for n in range(50)))
    await hold(ledger, seat("late"))
    assert len(ledger.entries) == 51
    await ledger.close()
    assert len(Ledger(str(tmp_path / "new" / "state")).entries) == 51
    assert stat.S_IMODE(os.stat(tmp_path / "new" / "state").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(ledger.path).st_mode) == 0o600
    with pytest.raises(Refused, match="closed"):
        await hold(ledger, seat("too late"))


async def test_intents_of_one_moment_share_one_commit(tmp_path: Path) -> None:
    class Counting(Journal):
        commits = 0

        def append(self, lines: bytes) -> None:
            self.commits += 1
            super().append(lines)

    journal = Counting(str(tmp_path / "ledger.jsonl"))
    ledger = opened(tmp_path, journal=journal)
    await hold(ledger, *(seat(f"t{n}") for n in range(200)))
    assert journal.commits == 1
    await ledger.close()


async def test_a_renamed_tenant_is_the_same_target(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    await hold(ledger, Subject(seat("a").on, tenant="old", cgroup="/a", inode=7))
    await hold(ledger, Subject(seat("a").on, tenant="new", cgroup="/a", inode=7))
    await hold(ledger, Subject(seat("a").on, tenant="new", cgroup="/a", inode=8))
    assert len(ledger.entries) == 2
    await ledger.close()


async def test_a_torn_last_line_never_loses_the_others(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for name in "abc":
        await hold(ledger, seat(name))
    await ledger.close()
    whole = lines(tmp_path)
    for cut in range(len(whole[-1])):
        (tmp_path / "ledger.jsonl").write_bytes(b"".join(whole[:-1]) + whole[-1][:cut])
        ledger = opened(tmp_path)
        survivors = {e.subject.tenant for e in ledger.entries.values()}
        # The line without its newline is whole: the newline alone may be lost.
        assert survivors == ({"a", "b", "c"} if cut == len(whole[-1]) - 1 else {"a", "b"})
        assert bool(ledger.problems) == (0 < cut < len(whole[-1]) - 1)
        await hold(ledger, seat("d"))
        await ledger.close()
        again = opened(tmp_path)
        assert {e.subject.tenant for e in again.entries.values()} == survivors | {"d"}
        assert not again.problems
        await again.close()


async def test_a_damaged_line_in_the_middle_is_reported_and_set_aside(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for name in "abc":
        await hold(ledger, seat(name))
    await ledger.close()
    whole = lines(tmp_path)
    for at in range(0, len(whole[1]) - 1, 7):
        flipped = bytearray(whole[1])
        flipped[at] ^= 0x01
        content = whole[0] + bytes(flipped) + whole[2]
        (tmp_path / "ledger.jsonl").write_bytes(content)
        ledger = opened(tmp_path)
        assert {"a", "c"} <= {e.subject.tenant for e in ledger.entries.values()}
        if len(ledger.entries) == 2:
            assert any(":2: skipped" in p or "newer" in p for p in ledger.problems)
        await ledger.close()
    assert (tmp_path / "ledger.jsonl.damaged").exists()


async def test_lines_of_a_newer_version_are_kept_verbatim(tmp_path: Path) -> None:
    newer = b'{"v":2,"sha":"abc","e":{"type":"unheard of"}}\n'
    (tmp_path / "ledger.jsonl").write_bytes(newer)
    ledger = opened(tmp_path)
    assert "newer version" in ledger.problems[0]
    await hold(ledger, seat("a"))
    await ledger.close()
    assert newer in lines(tmp_path)
    assert len(opened(tmp_path).entries) == 1


_WHO = b"""
"hold":1,"knob":"cgroup_cpu_max","subject":{"on":"cgroup","tenant":"a","cgroup":"/a","inode":7},
"identity":"i","boot":"b1","was":["max 100000",null],"wall":1.0
""".replace(b"\n", b"")
OLDER = [
    b'{"type":"intend",%b,"write":["20000 100000",0.2]}' % _WHO,
    b'{"type":"held",%b,"wrote":[["20000 100000",0.2]],"pending":true}' % _WHO,
]


@pytest.mark.parametrize("body", OLDER)
async def test_lines_from_before_there_were_rules_are_read(tmp_path: Path, body: bytes) -> None:
    line = b'{"v":1,"crc":"%08x","e":%b}\n' % (zlib.crc32(body), body)
    (tmp_path / "ledger.jsonl").write_bytes(line)
    ledger = opened(tmp_path)
    assert not ledger.problems
    (entry,) = ledger.entries.values()
    assert (entry.subject, entry.original, entry.wrote[-1].real) == (seat("a"), MAX, CUT)
    assert entry.rule == ""
    await ledger.close()


async def test_the_rule_of_a_hold_is_the_last_one_that_wanted_it_so(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    target = target_of(CPU_MAX, seat("a"))
    ledger.serve(target, "nobody holds it")
    await hold(ledger, seat("a"))
    ledger.confirm(target, CUT)
    ledger.serve(target, "another")
    await ledger.flush()
    lines_before = lines(tmp_path)
    ledger.serve(target, "another")
    await ledger.flush()
    assert lines(tmp_path) == lines_before
    (entry,) = opened(tmp_path).entries.values()
    assert (entry.rule, entry.pending, entry.original) == ("another", False, MAX)
    await hold(ledger, seat("a"))
    assert opened(tmp_path).entries[target].rule == "r"
    await ledger.close()


async def test_what_is_given_up_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    ledger, target = opened(tmp_path), target_of(CPU_MAX, seat("a"))
    with pytest.raises(Refused, match="not in the ledger"):
        await ledger.keep(target, {"GPU-1": 7})
    await hold(ledger, seat("a"))
    await ledger.keep(target, {"GPU-2": 8, "GPU-1": 7})
    held = opened(tmp_path).entries[target]
    assert held.freed == (("GPU-1", 7), ("GPU-2", 8))
    assert held.pending
    ledger.confirm(target, CUT)
    await hold(ledger, seat("a"), write=Real(0.1, "10000 100000"))
    assert opened(tmp_path).entries[target].freed == held.freed, "another write changes nothing"
    await ledger.keep(target, None)
    await ledger.flush()
    assert opened(tmp_path).entries[target].freed is None
    await ledger.close()


async def test_what_is_given_up_does_not_outlive_its_hold(tmp_path: Path) -> None:
    ledger, target = opened(tmp_path), target_of(CPU_MAX, seat("a"))
    await hold(ledger, seat("a"))
    kept = asyncio.create_task(ledger.keep(target, {"GPU-1": 7}))
    await asyncio.sleep(0)
    ledger.done(target, "put back", "test")
    await kept
    await ledger.flush()
    assert not ledger.entries
    assert not opened(tmp_path).entries
    await ledger.close()


async def test_a_full_disk_refuses_what_is_to_be_given_up(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path / "ledger.jsonl"))
    ledger, target = opened(tmp_path, journal=disk), target_of(CPU_MAX, seat("a"))
    await hold(ledger, seat("a"))
    disk.full = True
    with pytest.raises(Refused, match="nothing is changed that cannot be recorded"):
        await ledger.keep(target, {"GPU-1": 7})
    assert ledger.entries[target].freed is None
    await ledger.close()


async def test_entries_of_another_boot_are_void(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    await hold(ledger, seat("a"))
    await ledger.close()
    later = opened(tmp_path, boot="b2")
    assert not later.entries
    assert [e.subject.tenant for e in later.void] == ["a"]
    await hold(later, seat("b"))
    await later.close()
    assert [e.subject.tenant for e in opened(tmp_path, boot="b2").entries.values()] == ["b"]
    assert not opened(tmp_path, boot="b2").void


async def test_a_kernel_that_names_no_boot_voids_nothing(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    await hold(ledger, seat("a"))
    await ledger.close()
    assert opened(tmp_path, boot="").entries


async def test_a_full_disk_refuses_intents_and_loses_nothing(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path / "ledger.jsonl"))
    ledger = opened(tmp_path, journal=disk)
    await hold(ledger, seat("a"), seat("b"))
    disk.full = True
    with pytest.raises(Refused, match="No space left"):
        await hold(ledger, seat("c"))
    assert "No space left" in ledger.trouble
    ledger.done(target_of(CPU_MAX, seat("a")), "put back", "")
    await ledger.flush()
    assert {e.subject.tenant for e in ledger.entries.values()} == {"b"}
    assert {"a", "b"} <= {e.subject.tenant for e in opened(tmp_path).entries.values()}
    disk.full = False
    await hold(ledger, seat("d"))
    assert not ledger.trouble
    # The lost end of "a" has been made up for: the file was written anew.
    assert {e.subject.tenant for e in opened(tmp_path).entries.values()} == {"b", "d"}
    await ledger.close()


async def test_a_deleted_file_is_made_again_with_all_it_held(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    await hold(ledger, seat("a"))
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(Refused, match=r"deleted|No such file"):
        await hold(ledger, seat("b"))
    await hold(ledger, seat("b"))
    assert len(opened(tmp_path).entries) == 2
    await ledger.close()


async def test_its_size_is_bounded(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for n in range(2000):
        await hold(ledger, seat("a"), write=Real(n / 1e4, f"{n} 100000"))
        assert (tmp_path / "ledger.jsonl").stat().st_size < 128 * 1024
    await ledger.close()
    (entry,) = opened(tmp_path).entries.values()
    assert entry.wrote[-1].raw == "1999 100000"
    assert len(entry.wrote) <= 32
    assert entry.original == MAX


STEPS: list[str] = ["_create_temporary", "_rename", "_sync_directory", "write", "fsync"]


@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_at_any_step_of_compaction_loses_nothing(tmp_path: Path, step: str) -> None:
    class Dying(Journal):
        armed = False

        def _fail(self, name: str) -> None:
            if self.armed and step == name:
                raise OSError(5, "crash")

        def _create_temporary(self) -> int:
            self._fail("_create_temporary")
            fd = super()._create_temporary()
            if self.armed and step == "write":
                os.write(fd, b'{"v":1,"crc":"00')
                os.close(fd)
                raise OSError(5, "crash")
            return fd

        def _rename(self) -> None:
            self._fail("fsync")
            self._fail("_rename")
            super()._rename()

        def _sync_directory(self) -> None:
            self._fail("_sync_directory")
            super()._sync_directory()

    journal = Dying(str(tmp_path / "ledger.jsonl"))
    ledger = opened(tmp_path, journal=journal)
    names = {f"t{n}" for n in range(150)}
    await hold(ledger, *(seat(n) for n in sorted(names)))
    assert (tmp_path / "ledger.jsonl").stat().st_size > 30_000
    journal.armed = True
    for n in itertools.count():
        try:
            await hold(ledger, seat("t0"), write=Real(n / 1e4, f"{n} 100000"))
        except Refused:
            break
    journal.close()
    read = opened(tmp_path)
    assert {e.subject.tenant for e in read.entries.values()} == names
    assert all(e.original == MAX for e in read.entries.values())
    assert not read.problems
    assert not (tmp_path / "ledger.jsonl.new").exists()
    await read.close()


def as_folder(path: Path) -> None:
    path.mkdir()


def as_link(path: Path) -> None:
    path.symlink_to("/dev/full")


def as_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


@pytest.mark.parametrize("spoil", [as_folder, as_link, as_huge])
def test_what_is_no_ledger_is_said_clearly(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "ledger.jsonl")
    with pytest.raises(Corrupt, match=r"cannot read the ledger .*ledger.jsonl.*move it away"):
        opened(tmp_path)


def test_a_state_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="state_dir"):
        opened(tmp_path / "file" / "state")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Refused, match="0777"):
        opened(tmp_path / "open")


def to_a_stranger(path: Path) -> None:
    os.chown(path, 1000, -1)


def to_a_group(path: Path) -> None:
    path.chmod(0o660)


def to_everybody(path: Path) -> None:
    path.chmod(0o602)


@pytest.mark.parametrize("open_to", [to_a_stranger, to_a_group, to_everybody])
def test_a_ledger_that_others_could_have_written_is_refused(
    tmp_path: Path, open_to: Callable[[Path], None]
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.touch(0o600)
    if open_to is to_a_stranger and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    open_to(path)
    with pytest.raises(Refused, match=r"ledger.jsonl.*could have written.*chown.*move it away"):
        opened(tmp_path)
    os.chown(path, os.geteuid(), -1)
    path.chmod(0o600)
    assert not opened(tmp_path).entries


def test_a_ledger_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ledger.jsonl", 0o600)
    with pytest.raises(Refused, match="not a plain file; move it away"):
        opened(tmp_path)


@given(st.lists(st.binary(max_size=200) | st.sampled_from([b"\n", b"{}", b'{"v":1}', b"[" * 5000])))
def test_junk_is_never_taken_for_records(tmp_path_factory: Any, junk: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("junk")
    good = encode_line(Intend(1, "k", card(1), "i", "b1", Kept("1", 1.0), Kept("2", 2.0), 0.0))
    (folder / "ledger.jsonl").write_bytes(b"\n".join(junk) + b"\n" + good)
    assert len(opened(folder).entries) == 1


@given(st.text(), st.floats(allow_nan=False), st.text(max_size=50))
def test_every_record_survives_its_line(path: str, value: float, raw: str) -> None:
    subject = Subject(seat("a").on, tenant="t", cgroup=path, inode=3)
    entry = Entry(
        1, "knob", subject, "id", "boot", Kept.of(Real(value, raw)), (Kept("x", 1.0),), True, 0.0
    )
    try:
        line = encode_line(entry)
    except UnicodeEncodeError:
        assert any("\ud800" <= c <= "\udfff" for c in path + raw)
        return
    assert line.count(b"\n") == 1
    if value != float("-inf"):
        assert decode_line(line) == entry
    json.loads(line)


async def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    with pytest.raises(Refused, match="UTF-8"):
        await hold(ledger, seat("a\udc80"))
    await ledger.close()


def test_a_lost_end_does_not_mix_two_holds() -> None:
    book = Book()
    old = Intend(1, "k", card(1), "i", "b", Kept("1", 1.0), Kept("2", 2.0), 0.0)
    book.apply(old)
    book.apply(Intend(2, "k", card(1), "i", "b", Kept("3", 3.0), Kept("4", 4.0), 0.0))
    (entry,) = book.entries.values()
    assert entry.original == Real(3.0, "3")
    assert not entry.explains(Real(2.0, "2"), 0)
    book.apply(old)
    assert tuple(book.entries.values()) == (entry,)


def test_a_pending_write_may_have_been_rounded() -> None:
    book = Book()
    book.apply(
        Intend(1, POWER_LIMIT.name, card(1), "i", "b", Kept("7", 7.0), Kept("300.4", 300.4), 0.0)
    )
    (entry,) = book.entries.values()
    assert entry.explains(Real(300.0, "300"), 5)
    assert not entry.explains(Real(306.0, "306"), 5)


def test_the_boot_has_a_name() -> None:
    assert boot_id() == boot_id() != ""
