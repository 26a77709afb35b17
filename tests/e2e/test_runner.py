"""How checks are found, run and told; the checks themselves need a virtual machine (`make e2e`)."""

import time
from typing import Any

import pytest

from tests.e2e import runner
from tests.e2e.__main__ import tell
from tests.e2e.checks import Skip


class Record:
    """Stands for the host: says what was done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def prepare(self) -> None:
        self.done.append("prepare")

    def settle(self) -> None:
        self.done.append("settle")

    def clear(self) -> None:
        self.done.append("clear")


def good(record: Record) -> None:
    record.done.append("good")


def bad(record: Record) -> None:
    assert record.done == [], "not as\nit must be"


def absent(record: Record) -> None:
    raise Skip("no such thing here")


def endless(record: Record) -> None:
    time.sleep(60)


def told(**some: runner.Check) -> tuple[list[dict[str, Any]], list[str]]:
    record = Record()
    said = list(runner.run(some, record, limit=0.2, log=lambda: "what\nit said"))
    return said, record.done


def test_a_check_is_prepared_for_and_settled_after() -> None:
    said, done = told(good=good)
    assert [(s["check"], s["result"], s["why"]) for s in said] == [("good", "pass", "")]
    assert done == ["prepare", "good", "settle"]


def test_a_failure_is_told_with_the_log_and_cleared_up_and_the_next_goes_on() -> None:
    said, done = told(bad=bad, good=good)
    assert [s["result"] for s in said] == ["fail", "pass"]
    assert "it must be" in said[0]["why"]
    assert "test_runner.py" in said[0]["why"]
    assert said[0]["log"] == "what\nit said"
    assert done == ["prepare", "clear", "prepare", "good", "settle"]


def test_what_cannot_be_asked_is_a_skip() -> None:
    said, _ = told(absent=absent)
    assert [(s["result"], s["why"]) for s in said] == [("skip", "no such thing here")]


def test_what_never_ends_is_ended() -> None:
    said, done = told(endless=endless, good=good)
    assert [s["result"] for s in said] == ["fail", "pass"]
    assert "took longer" in said[0]["why"]
    assert done[:2] == ["prepare", "clear"]


def test_checks_are_found_by_name_and_word() -> None:
    everything = runner.found([])
    assert "pause_puts_back" in everything
    assert list(runner.found(["^pause", "rival"])) == [
        n for n in everything if n.startswith("pause") or "rival" in n
    ]
    assert all(check.__doc__ for check in everything.values())


def test_a_result_is_one_line_and_the_log_is_indented(capsys: pytest.CaptureFixture[str]) -> None:
    tell({"check": "a", "result": "fail", "seconds": 1.5, "why": "one\ntwo", "log": "three"})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("fail  a ")
    assert first.endswith("1.5 s  one / two")
    assert second == "      | three"
