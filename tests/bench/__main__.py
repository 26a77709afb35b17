"""`make bench`: measures every group, prints one table, writes build/bench.json.

Exit code 1 if a figure is beyond its limit or could not be measured.
"""

import argparse
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable

from tests.bench import commands, cost, evaluate, reaction, siege, telling, week, zeus
from tests.bench.pace import Pace
from tests.bench.rows import Group, Row, not_measured, show, write

OUT = os.path.join("build", "bench.json")

GROUPS: dict[str, Callable[[Pace], Iterable[Row]]] = {
    "cost": cost.measure,
    "telling": telling.measure,
    "siege": siege.measure,
    "reaction": reaction.measure,
    "commands": commands.measure,
    "zeus": zeus.measure,
    "evaluate": evaluate.measure,
    "week": week.measure,
}
"""What is measured, in this order. To add figures, add a row to a group or a group here."""

ONLY_WHEN_ASKED = frozenset({"week"})
"""Groups that take an hour: `--only` names them."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short: see that everything works")
    parser.add_argument("--only", action="append", choices=GROUPS, help="this group (repeatable)")
    parser.add_argument("--out", default=OUT, help="where the rows go as JSON (%(default)s)")
    return parser.parse_args()


def _measure(name: str, pace: Pace) -> Group:
    """A group that breaks loses its remaining rows and fails, and the others go on."""
    rows: list[Row] = []
    print(f"measuring: {name}", file=sys.stderr, flush=True)
    try:
        rows += GROUPS[name](pace)
    except Exception as error:  # the outermost frame: the table is printed all the same
        traceback.print_exc()
        rows.append(not_measured(name, str(error).partition("\n")[0]))
    return Group(name, tuple(rows))


def main() -> int:
    options = _options()
    # Whatever was started is ended: the contexts unwind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    wanted = options.only or [name for name in GROUPS if name not in ONLY_WHEN_ASKED]
    groups = [_measure(name, Pace(options.quick)) for name in wanted]
    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}"
    load = f"load {os.getloadavg()[0]:.1f} at the end"
    caption = f"{machine}, {load}, {time.monotonic() - began:.0f} s{', quick' * options.quick}"
    show(groups, caption)
    write(groups, options.out)
    return 0 if all(row.passes for group in groups for row in group.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
