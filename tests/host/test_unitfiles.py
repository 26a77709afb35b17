"""Properties and drop-ins: what a text is to systemd, what it leaves of it, what is ours."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Refused, Unsupported
from gpuagent.host.unitfiles import (
    INFINITY,
    PROPERTIES,
    SETTINGS,
    kept,
    put_dropin,
    read_dropin,
    told,
    values,
)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("cpu.max", "max 100000", (INFINITY, INFINITY)),
        ("cpu.max", "max 20000", (INFINITY, 20000)),
        ("cpu.max", "6600 20000", (330000, 20000)),
        ("cpu.max", "50000 100000", (500000, INFINITY)),
        ("cpu.max", "12345 100000", (123450, INFINITY)),
        ("cpu.weight", "70", (70,)),
        ("cpu.weight", "0", (0,)),
        ("io.weight", "default 60", (60,)),
        ("memory.high", "max", (INFINITY,)),
        ("memory.max", "1073741824", (1073741824,)),
    ],
)
def test_a_text_is_these_properties(file: str, text: str, expected: tuple[int, ...]) -> None:
    assert tuple(values(file, text).values()) == expected


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("cpu.max", "max"),
        ("cpu.max", "1000 0"),
        ("cpu.max", "100 max"),
        ("cpu.max", "max max"),
        ("cpu.weight", "max"),
        ("cpu.weight", "-5"),
        ("cpu.weight", "99999999999999999999"),
        ("io.weight", "60"),
        ("io.weight", "8:0 60"),
        ("memory.high", ""),
        ("memory.high", "1G"),
    ],
)
def test_a_text_that_is_none_is_refused(file: str, text: str) -> None:
    with pytest.raises(Refused):
        values(file, text)


def test_a_file_without_a_property_is_unsupported() -> None:
    with pytest.raises(Unsupported):
        values("cpu.idle", "1")


@given(
    st.sampled_from(sorted(PROPERTIES)), st.text() | st.from_regex(r"\A(max|\d+|default)( \d+)?\Z")
)
def test_any_text_is_understood_or_refused(file: str, text: str) -> None:
    try:
        found = values(file, text)
    except Refused:
        return
    assert found.keys() == set(PROPERTIES[file])
    assert all(0 <= v <= INFINITY for v in found.values())


# Written by systemd 252 on Debian 12 for SetUnitProperties, each as it was found.
HEADER = (
    '# This is a drop-in unit file extension, created via "systemctl set-property"\n'
    "# or an equivalent operation. Do not edit.\n[Service]\n"
)


@pytest.mark.parametrize(
    ("name", "line", "value"),
    [
        ("CPUQuotaPerSecUSec", "CPUQuota=33%", 330000),
        ("CPUQuotaPerSecUSec", "CPUQuota=", INFINITY),
        ("CPUQuotaPerSecUSec", "CPUQuota=250%", 2500000),
        ("CPUQuotaPeriodUSec", "CPUQuotaPeriodSec=20ms", 20000),
        ("CPUQuotaPeriodUSec", "CPUQuotaPeriodSec=15ms 500us", 15500),
        ("CPUQuotaPeriodUSec", "CPUQuotaPeriodSec=1s", 1000000),
        ("CPUQuotaPeriodUSec", "CPUQuotaPeriodSec=", INFINITY),
        ("CPUWeight", "CPUWeight=70", 70),
        ("CPUWeight", "CPUWeight=idle", 0),
        ("CPUWeight", "CPUWeight=", INFINITY),
        ("IOWeight", "IOWeight=60", 60),
        ("MemoryHigh", "MemoryHigh=104857600", 104857600),
        ("MemoryMax", "MemoryMax=infinity", INFINITY),
    ],
)
def test_a_drop_in_of_systemds_tells_its_value(name: str, line: str, value: int) -> None:
    assert told(name, f"{HEADER}{line}\n") == value


@pytest.mark.parametrize(
    "content",
    [
        "",
        HEADER,
        f"{HEADER}CPUQuota=33%\nCPUWeight=5\n",
        f"{HEADER}CPUWeight=5\n",
        f"{HEADER}CPUQuota=33.5%\n",
        f"{HEADER}CPUQuota=33\n",
        f"{HEADER}CPUQuota\n",
        "\x00",
    ],
)
def test_any_other_file_is_not_of_systemds_making(content: str) -> None:
    assert told("CPUQuotaPerSecUSec", content) is None


@given(st.sampled_from(sorted(SETTINGS)), st.text())
def test_whatever_a_file_says_is_a_value_or_none(name: str, content: str) -> None:
    found = told(name, content)
    assert found is None or found >= 0


def test_a_quota_keeps_whole_percents_only() -> None:
    assert kept("CPUQuotaPerSecUSec", 333333) == 330000
    assert kept("CPUQuotaPerSecUSec", INFINITY) == INFINITY
    assert kept("CPUWeight", 333333) == 333333


def test_a_drop_in_comes_and_goes_with_its_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "a.service.d")
    assert read_dropin(folder, "CPUWeight") is None
    put_dropin(folder, "CPUWeight", None)
    put_dropin(folder, "CPUWeight", "lost with its folder")
    (tmp_path / "a.service.d").mkdir()
    put_dropin(folder, "CPUWeight", "theirs\n")
    put_dropin(folder, "CPUQuota", "theirs, too\n")
    assert read_dropin(folder, "CPUWeight") == "theirs\n"
    assert sorted(f.name for f in (tmp_path / "a.service.d").iterdir()) == [
        "50-CPUQuota.conf",
        "50-CPUWeight.conf",
    ]
    put_dropin(folder, "CPUWeight", None)
    assert (tmp_path / "a.service.d").exists()
    put_dropin(folder, "CPUQuota", None)
    assert not (tmp_path / "a.service.d").exists()


@pytest.mark.parametrize("kind", ["large", "binary", "link", "fifo", "folder"])
def test_what_is_no_drop_in_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "a.service.d"
    folder.mkdir()
    place = folder / "50-CPUWeight.conf"
    match kind:
        case "large":
            place.write_text("#" * 5000)
        case "binary":
            place.write_bytes(b"\xff\xfe")
        case "link":
            place.symlink_to("/etc/passwd")
        case "fifo":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
    if kind == "fifo":
        assert read_dropin(str(folder), "CPUWeight") == ""
        return
    with pytest.raises(Refused):
        read_dropin(str(folder), "CPUWeight")
