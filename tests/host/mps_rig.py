"""Control daemons of MPS for tests: short folders, and nothing left behind."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.mps import Program


class Programs:
    """Those that a test has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: list[Program] = []

    def take(self, program: Program) -> Program:
        self._made.append(program)
        return program

    def end(self) -> None:
        for program in self._made:
            program.kill()


@pytest.fixture
def programs() -> Iterator[Programs]:
    # A socket's path may have a hundred bytes, which pytest's folders exceed.
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        made = Programs(Path(folder))
        yield made
        made.end()
