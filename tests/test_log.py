"""Log lines: JSON or text, hostile values escaped, changes of health said once."""

import fcntl
import io
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.log import HealthChanges, flush, printable, setup
from gpuagent.model.state import Health

EVIL = "\x1b[2J\x1b]0;owned\x07\nforged=line \u202e\udc80\x9b"


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    """What `setup` configures is global: leave it as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text(st.characters(exclude_categories=())))
def test_printable_is_printable_and_leaves_the_rest(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()
    shown.encode()


def test_printable_keeps_what_it_is_told_to() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    assert printable("\u202e\U000e0001\udc80") == "\\u202e\\U000e0001\\udc80"


def test_a_pipe_gets_json() -> None:
    out = io.StringIO()
    setup(stream=out)
    structlog.get_logger().info("seen", name=EVIL, pid=7, share=0.5)
    line = json.loads(out.getvalue())
    assert (line["event"], line["pid"], line["share"]) == ("seen", 7, 0.5)
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")
    assert line["name"] == EVIL
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().isascii()


@pytest.mark.parametrize("form", ["auto", "text"])
def test_a_terminal_gets_text_without_foreign_escapes(form: str) -> None:
    out = Terminal()
    setup(form="text" if form == "text" else "auto", stream=out)
    structlog.get_logger().warning(EVIL, name=EVIL, nested={"k": EVIL})
    text = out.getvalue()
    assert text.count("\n") == 1
    for hostile in ("\x1b[2J", "\x1b]0", "\x07", "\u202e", "\udc80", "\x9b"):
        assert hostile not in text
    assert text.count("\\x1b[2J") == 3


def fail() -> None:
    raise ValueError(EVIL)


def test_a_traceback_keeps_its_lines_and_loses_its_escapes() -> None:
    out = io.StringIO()
    setup(form="text", stream=out)
    try:
        fail()
    except ValueError:
        structlog.get_logger().exception("broken")
    text = out.getvalue()
    assert "Traceback" in text
    assert "ValueError" in text
    assert "\x1b[2J" not in text


def test_the_level_is_kept() -> None:
    out = io.StringIO()
    setup(level="warning", stream=out)
    structlog.get_logger().info("no")
    structlog.get_logger().error("yes")
    assert [json.loads(x)["event"] for x in out.getvalue().splitlines()] == ["yes"]


def test_a_logger_made_before_setup_obeys_it() -> None:
    early = structlog.get_logger()
    out = io.StringIO()
    setup(stream=out)
    early.info("late")
    assert "late" in out.getvalue()


def test_libraries_speak_through_the_same_lines() -> None:
    out = io.StringIO()
    setup(stream=out)
    logging.getLogger("asyncio").error("never retrieved %s", EVIL)
    logging.getLogger("asyncio").info("chatter")
    line = json.loads(out.getvalue())
    assert line["logger"] == "asyncio"
    assert line["event"].startswith("never retrieved")


def test_a_reader_that_has_gone_is_no_error() -> None:
    out = io.StringIO()
    setup(stream=out)
    out.close()
    structlog.get_logger().info("to nobody")


# -- readers that are stuck ------------------------------------------------------------------------------

F_SETPIPE_SZ = 1031


@pytest.fixture
def narrow() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that holds one page."""
    here, there = os.pipe()
    fcntl.fcntl(there, F_SETPIPE_SZ, 4096)
    yield here, there
    os.close(here)
    os.close(there)


def drained(fd: int) -> list[dict[str, object]]:
    """What comes out of the pipe, up to the line that says what is missing."""
    text = b""
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    while b"dropped" not in text or not text.endswith(b"\n"):
        assert ready.poll(20_000), "nothing more comes"
        text += os.read(fd, 1 << 20)
    return [json.loads(x) for x in text.splitlines()]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(
    narrow: tuple[int, int], blocking: bool
) -> None:
    here, there = narrow
    os.set_blocking(there, blocking)
    with open(there, "w", closefd=False) as stream:
        setup(stream=stream, level="error")
        log = structlog.get_logger()
        for number in range(5000):
            log.error("said", number=number)
        assert not flush(0.01)
        said = drained(here)
        assert flush(20)
    numbers = [x["number"] for x in said if x["event"] == "said"]
    assert numbers == list(range(len(numbers)))
    [dropped] = [x for x in said if x["event"] != "said"]
    assert dropped["lines"] == 5000 - len(numbers)
    assert said[-1] is dropped, "where the gap is"


def test_lines_to_a_file_are_there_when_flushed_and_in_order(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        setup(stream=stream, form="text")
        for number in range(500):
            structlog.get_logger().info(f"number {number} \u00e9")
        assert flush(20)
        text = (tmp_path / "log").read_text()
    assert [int(x.split("number ")[1].split()[0]) for x in text.splitlines()] == [*range(500)]
    assert "\\xe9" in text


ENDS = {
    "returns": "",
    "raises": "raise SystemExit(3)",
    "fails": "1 / 0",
    "does not tidy up": "import os; gpuagent.log.flush(); os._exit(0)",
}


@pytest.mark.parametrize("how", ENDS)
def test_what_was_logged_before_the_end_is_there_after_it(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAKS + ENDS[how]], capture_output=True, timeout=60, check=False
    )
    # The interpreter's own traceback may stand before a line of ours, without an end of its own.
    said = [json.loads(x[x.index(b"{") :]) for x in done.stderr.splitlines() if b'{"number' in x]
    assert [x["number"] for x in said] == list(range(200))


SPEAKS = """
import gpuagent.log, structlog
gpuagent.log.setup(form="json")
for number in range(200):
    structlog.get_logger().info("said", number=number)
"""


@pytest.mark.parametrize("how", ["returns", "does not tidy up"])
def test_a_stuck_reader_does_not_keep_a_process_from_ending(
    narrow: tuple[int, int], how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAKS + ENDS[how]], stderr=narrow[1], timeout=30, check=False
    )
    assert done.returncode == 0


# -- health ----------------------------------------------------------------------------------------------


def test_health_is_said_once_in_each_direction() -> None:
    out = io.StringIO()
    setup(stream=out)
    changes = HealthChanges()
    course = [None, True, True, False, False, True, True, False]
    said = [
        changes.say(Health("nvml", up=up, why=f"reason {at}"), float(at))
        for at, up in enumerate(course)
    ]
    assert said == [False, False, False, True, False, True, False, True]
    lines = [json.loads(x) for x in out.getvalue().splitlines()]
    assert [x["event"] for x in lines] == ["cannot read", "reads again", "cannot read"]
    assert lines[0]["why"] == "reason 3"
    assert lines[1]["down_seconds"] == 2


def test_sensors_turn_on_their_own() -> None:
    setup(stream=io.StringIO())
    changes = HealthChanges()
    assert changes.say(Health("a", up=False, why="x"), 0)
    assert changes.say(Health("b", up=False, why="x"), 0)
    assert not changes.say(Health("a", up=False, why="y"), 1)
