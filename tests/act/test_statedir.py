"""One agent holds a state directory, and a dead one lets go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuagent.act.statedir import hold, prepare
from gpuagent.errors import Refused

HOLDER = """
import sys, time
from gpuagent.act.statedir import hold
with hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    again = pytest.raises(Refused, match=rf"pid {os.getpid()}\)")
    with hold(str(tmp_path)), again, hold(str(tmp_path)):
        pass
    with hold(str(tmp_path)):
        pass


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(Refused, match=rf"pid {child.pid}\)"), hold(str(tmp_path)):
            pass
        child.kill()
        child.wait()
        with hold(str(tmp_path)):
            pass


def test_junk_in_the_lock_file_is_not_repeated(tmp_path: Path) -> None:
    with hold(str(tmp_path)):
        (tmp_path / "lock").write_bytes(b"\x1b[2J\xff")
        with pytest.raises(Refused, match="pid unknown"), hold(str(tmp_path)):
            pass


def test_a_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="state_dir"), hold(str(tmp_path / "file")):
        pass
    (tmp_path / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(Refused, match="lock"), hold(str(tmp_path)):
        pass


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "said"),
    [
        (1000, 0, 0o700, r"belongs to uid 1000.*chown it to uid 0 or set paths.state_dir"),
        (0, 1000, 0o770, r"written by group 1000 \(mode 0770\); chmod it to 0700"),
        (0, 0, 0o707, r"written by everybody \(mode 0707\); chmod it to 0700"),
        (0, 0, 0o770, None),
        (0, 1000, 0o750, None),
    ],
)
def test_a_place_that_others_may_write_is_refused(
    tmp_path: Path, uid: int, gid: int, mode: int, said: str | None
) -> None:
    os.chown(tmp_path, uid, gid)
    tmp_path.chmod(mode)
    if said is None:
        prepare(str(tmp_path))
        return
    with pytest.raises(Refused, match=said):
        prepare(str(tmp_path))
