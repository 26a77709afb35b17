"""Log lines: JSON or text, hostile values escaped, changes of health said once."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.log import HealthChanges, printable, setup
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
