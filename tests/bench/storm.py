"""Starts short processes at a steady rate, as build jobs and shell scripts on a host do.

python -m tests.bench.storm PER_SECOND

starts /bin/true until its standard input ends, and then prints how many it has started a second.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator


class Storm:
    """How it went; known once it is over."""

    def __init__(self) -> None:
        self.per_second = 0.0


@contextlib.contextmanager
def storm(per_second: float) -> Iterator[Storm]:
    """Processes start while this lasts."""
    seen = Storm()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.storm", str(per_second)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield seen
        finally:
            said, _ = process.communicate(timeout=30)
    seen.per_second = float(said)


def main(per_second: float) -> None:
    began = due = time.monotonic()
    started = 0
    while not select.select([0], [], [], max(due - time.monotonic(), 0))[0]:
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        started += 1
        due += 1 / per_second
    print(started / (time.monotonic() - began))


if __name__ == "__main__":
    main(float(sys.argv[1]))
