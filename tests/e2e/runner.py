"""Runs the checks inside, one after another, and tells each as one line of JSON."""

import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, Protocol

from tests.e2e import checks, checks_mps
from tests.e2e.checks import Skip

LIMIT_UNITS = 60.0
"""No check takes longer, whatever it waits for."""
_PREFIX = "check_"


class Ground(Protocol):
    """What checks are made on, and how it is kept clean between them."""

    def prepare(self) -> None: ...
    def settle(self) -> None: ...
    def clear(self) -> None: ...


Check = Callable[[Any], None]


MODULES: tuple[ModuleType, ...] = (checks, checks_mps)
"""Where the checks are, in the order in which they are run."""


def found(words: Sequence[str]) -> dict[str, Check]:
    """All checks in their order, by name; with words only those that have one in it."""
    named = {
        name.removeprefix(_PREFIX): check
        for module in MODULES
        for name, check in vars(module).items()
        if name.startswith(_PREFIX)
    }
    return {
        name: check
        for name, check in named.items()
        if not words or any(re.search(word, name) for word in words)
    }


class _TooLong(Exception):
    pass


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise _TooLong


def run(
    checks: Mapping[str, Check], ground: Ground, *, limit: float, log: Callable[[], str]
) -> Iterator[dict[str, Any]]:
    """One result for each: check, result, seconds, why, and for a failure what the agent said."""
    before = signal.signal(signal.SIGALRM, _too_long)
    try:
        for name, check in checks.items():
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, limit)
            said = _attempt(check, ground, limit)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if said["result"] == "fail":
                said["log"] = log()
                ground.clear()
            yield {"check": name, "seconds": time.monotonic() - began, **said}
    finally:
        signal.signal(signal.SIGALRM, before)


def _attempt(check: Check, ground: Ground, limit: float) -> dict[str, Any]:
    step = "before it"
    try:
        ground.prepare()
        step = ""
        check(ground)
        step = "after it"
        ground.settle()
    except Skip as why:
        return {"result": "skip", "why": str(why)}
    except _TooLong:
        where = traceback.format_exc().split("\n")
        return {"result": "fail", "why": f"it took longer than {limit:.0f} s; {_at(where)}"}
    except Exception as error:
        where = traceback.format_exc().split("\n")
        what = f"{step}: " if step else ""
        text = str(error) or type(error).__name__
        return {"result": "fail", "why": f"{what}{text}; {_at(where)}"}
    return {"result": "pass", "why": ""}


def _at(lines: Sequence[str]) -> str:
    """The innermost lines of the checks and their host that led there."""
    places = (re.search(r'tests/e2e/(\w+)\.py", line (\d+)', line) for line in lines)
    found_ = [f"{place[1]}.py:{place[2]}" for place in places if place and place[1] != "runner"]
    return "at " + " > ".join(found_[-3:])


def main(words: Sequence[str]) -> None:
    """Everything in the virtual machine, told on standard output."""
    from tests.e2e.host import Host, quiet
    from tests.e2e.pace import MOST_SECONDS, Pace

    def tell(**what: object) -> None:
        print(json.dumps(what), flush=True)

    wanted = found(words)
    quiet()  # what an earlier run has left would slow this one down
    pace = Pace.measured()
    tell(unit=pace.unit)
    if pace.unit > MOST_SECONDS:
        return
    host = Host(pace)
    for said in run(wanted, host, limit=LIMIT_UNITS * pace.unit, log=lambda: host.agent.log):
        tell(**said)
    host.end()


if __name__ == "__main__":
    main(sys.argv[1:])
