"""Unmodified nvitop and gpustat on the fake driver."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import (
    L40S,
    MIB,
    PROFILES,
    RTX_4090,
    FakeNvml,
)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that psutil finds."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("tool", ["nvitop -1", "gpustat --show-all"])
@pytest.mark.parametrize("name", PROFILES)
def test_tools_show_cards_and_processes(tmp_path: Path, sleeper: int, name: str, tool: str) -> None:
    fake = FakeNvml.create(tmp_path, [PROFILES[name]])
    card = fake.gpus[0]
    card.load()
    card.add_process(sleeper, memory_bytes=1234 * MIB, mig=0 if card.mig_uuids else None)
    done = subprocess.run(
        [sys.executable, "-m", *tool.split()],
        env=os.environ | fake.env | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert card.profile.name.split()[-1] in done.stdout
    assert str(sleeper) in done.stdout
    assert "1234M" in done.stdout
    assert f"{card.profile.loaded['memory_used_bytes'] // MIB}" in done.stdout
    assert fake.holders == []


def test_tools_bear_an_old_driver(tmp_path: Path) -> None:
    fake = FakeNvml.create(tmp_path, [L40S, RTX_4090], variant="550")
    done = subprocess.run(
        [sys.executable, "-m", "gpustat"],
        env=os.environ | fake.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "550.163.01" in done.stdout
