"""The stage itself: nobody else's processes on it, and nothing left of one whose owner was killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stage import Stage, cgroup2_mount, until
from tests.stage.cgroups import sweep


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    if cgroup2_mount() is None:
        pytest.skip("needs a writable cgroup v2 mount: run as root where one is mounted")
    with Stage(tmp_path, []) as stage:
        yield stage


def ended(pid: int) -> bool:
    """Whether it runs no more: a zombie has ended, even where nobody reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_two_stages_at_once_have_each_their_own_units(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    with Stage(folder, []) as other:
        assert stage.unit("train") != other.unit("train")
        assert stage.rule("train", "L3") != other.rule("train", "L3")
        assert stage.unit("train") in stage.rule("train", "L3")


def test_nothing_is_left_when_it_closes(tmp_path: Path) -> None:
    mount = cgroup2_mount()
    if mount is None:
        pytest.skip("needs a writable cgroup v2 mount: run as root where one is mounted")
    with Stage(tmp_path, []) as stage:
        train = stage.tenant("train")
        pids = [train.pid, train.one_more()]
        inside = (train.cgroup.real / "cgroup.procs").read_text().split()
        assert sorted(map(int, inside)) == sorted(pids)
    assert not (mount / stage.slice).exists()
    assert all(ended(pid) for pid in pids)


KILLED = """
import sys, pathlib
from tests.stage import Stage
stage = Stage(pathlib.Path(sys.argv[1]), [])
print(stage.slice, stage.tenant("train").pid, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_one_has_left_is_swept_away_by_the_next(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        name, pid = owner.stdout.readline().split()
        sweep(stage.mount)
        assert (stage.mount / name).exists(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    until("the tenant ends with its owner", lambda: ended(int(pid)))
    procs = stage.mount / name / f"{name.removesuffix('.slice')}-train.service" / "cgroup.procs"
    until("it has left its cgroup", lambda: not procs.read_text())
    sweep(stage.mount)
    assert not (stage.mount / name).exists()


def test_only_stages_of_dead_owners_are_swept(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        pass
    dead = tmp_path / f"stage{gone.pid}x0.slice"
    kept = [
        tmp_path / f"stage{os.getpid()}x7.slice",
        tmp_path / f"stage{gone.pid}.slice",
        tmp_path / f"backstage{gone.pid}x0.slice",
    ]
    for folder in (dead / "a.service", *kept):
        folder.mkdir(parents=True)
    sweep(tmp_path)
    assert not dead.exists()
    assert all(folder.exists() for folder in kept)
