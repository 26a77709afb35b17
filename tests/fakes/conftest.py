"""The fake driver, and a process that looks at it through pynvml."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import H100_80GB, H100_MIG, L40S, RTX_4080_SUPER, FakeNvml, build
from tests.fakes.nvml.client import START, Client


@pytest.fixture(scope="session")
def child() -> Iterator[Client]:
    """One process for most tests: initialising anew makes it see another driver."""
    library = build.library("590")
    with Client(os.environ | {"LD_LIBRARY_PATH": str(library.parent)}) as client:
        yield client


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    """A server with a clock of the tests' own: an H100, one with MIG, an L40S and an RTX 4080."""
    profiles = [H100_80GB, H100_MIG, L40S, RTX_4080_SUPER]
    return FakeNvml.create(tmp_path, profiles, clock_us=START)


@pytest.fixture
def nvml(fake: FakeNvml, child: Client) -> Client:
    """The child, looking at ``fake``."""
    return child.use(fake.env)
