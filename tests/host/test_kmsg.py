"""host.kmsg: XIDs in the kernel log, whoever else writes there."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Unsupported
from gpuagent.host.kmsg import Kmsg, parse

LINE = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)


@pytest.mark.parametrize(
    "prefix",
    ["", "3,1234,98765432,-;", "4,1,0,c,caller=T12;", "[ 1234.567890] ", "<4>[    0.000001] "],
)
def test_an_xid_is_found_in_every_form_of_a_line(prefix: str) -> None:
    found = parse(prefix + LINE)
    assert found is not None
    assert (found.pci, found.xid) == ((0, 0x3B, 0), 79)
    assert found.text == LINE


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVRM: Xid (PCI:0000:65:00): 13, pid=1, name=x, Graphics Exception", (0x65, 13)),
        ("NVRM: Xid (PCI:00010000:65:00.0): 119, Timeout", (0x65, 119)),
        ("NVRM: Xid (PCI:0000:65:00): 79", (0x65, 79)),
        # A facility that is not the kernel's: anyone with write access may have written it.
        ("12,5,6,-;" + LINE, None),
        # Strings that others chose, in the middle of a line of the kernel's.
        ("6,5,6,-;usb 1-1: Product: " + LINE, None),
        (" " + LINE, None),
        ("3,5,6,-;nvrm: xid (PCI:0000:65:00): 79", None),
        ("NVRM: Xid (PCI:0000:65:00): ", None),
        ("NVRM: Xid (PCI:0000:65:00): 99999999999999999999", None),
        ("NVRM: Xid (PCI:zzzz:65:00): 79", None),
        ("", None),
    ],
)
def test_only_the_drivers_own_lines_count(line: str, expected: tuple[int, int] | None) -> None:
    found = parse(line)
    assert (None if found is None else (found.pci[1], found.xid)) == expected


@given(st.text(max_size=400))
def test_any_text_is_survived_and_what_is_kept_is_printable(text: str) -> None:
    assert parse(text) is None or text.find("NVRM: Xid (PCI:") < 40
    found = parse(f"NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name={text}")
    assert found is not None
    assert found.text.isprintable()
    assert len(found.text) <= 200


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_any_bytes_in_the_log_are_survived(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "kmsg"
    path.write_bytes(b"")
    log = Kmsg(str(path))
    try:
        log.take()
        with path.open("ab") as file:
            for chunk in chunks:
                file.write(chunk)
                file.flush()
                log.take()
            file.write(b"\n" + LINE.encode() + b"\n")
        found = log.take()
    finally:
        log.close()
    assert found
    assert found[-1].xid == 79


def test_only_what_is_logged_from_now_on_is_told_and_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text(LINE + "\n")
    log = Kmsg(str(path))
    assert log.take() == []
    with path.open("a") as file:
        file.write(LINE + "\n" + LINE[:30])
        file.flush()
        assert [x.xid for x in log.take()] == [79]
        assert log.take() == []
        file.write(LINE[30:] + "\n")
    assert [x.xid for x in log.take()] == [79]
    log.close()


def test_a_log_that_is_rotated_or_cut_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("old\n" * 100)
    log = Kmsg(str(path))
    assert log.take() == []
    path.rename(tmp_path / "kern.log.1")
    path.write_text(LINE + "\n")
    assert [x.xid for x in log.take()] == [79]
    path.write_text("")
    assert log.take() == []
    path.write_text(LINE.replace("79", "31") + "\n")
    assert [x.xid for x in log.take()] == [31]
    log.close()


def test_a_flood_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("")
    log = Kmsg(str(path))
    log.take()
    with path.open("ab") as file:
        file.write(b"x" * 20_000_000 + b"\n" + LINE.encode() + b"\n")
    takes = 0
    while not log.take():
        takes += 1
        assert takes < 50
    assert takes > 1
    log.close()


def test_a_flood_of_xids_is_taken_in_pieces_and_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("")
    log = Kmsg(str(path))
    log.take()
    with path.open("a") as file:
        file.writelines(f"NVRM: Xid (PCI:0000:3b:00): {n}, pid=1\n" for n in range(3000))
    pieces = []
    while found := log.take():
        pieces.append([x.xid for x in found])
    assert [xid for piece in pieces for xid in piece] == list(range(3000))
    assert max(map(len, pieces)) < 1000
    log.close()


def test_why_it_cannot_be_read_is_said_and_a_log_that_appears_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    log = Kmsg(str(path))
    with pytest.raises(Unsupported, match=r"kmsg: No such file or directory.*paths\.kernel_log"):
        log.take()
    path.write_text(LINE + "\n")
    assert [x.xid for x in log.take()] == [79]
    log.close()
    folder = Kmsg(str(tmp_path))
    with pytest.raises(Unsupported, match="Invalid argument"):
        folder.take()
    assert not [fd for fd in os.listdir("/proc/self/fd") if _target(fd) == str(tmp_path)]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="needs a readable /dev/kmsg")
def test_the_real_log_is_read_without_waiting() -> None:
    log = Kmsg("/dev/kmsg")
    assert log.take() == []
    log.close()
