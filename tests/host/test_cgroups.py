"""Control files: plain ones in a folder, and real cgroups where this machine lets us make some."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.host.cgroups import CgroupTree
from gpuagent.ports import Cgroups

_fits: Cgroups = CgroupTree("/sys/fs/cgroup")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "train.service"
    folder.mkdir()
    (folder / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    return tmp_path


def test_reading_and_writing_a_file_leaves_it_as_the_kernel_would_show_it(root: Path) -> None:
    tree = CgroupTree(str(root))
    inode = tree.inode("/train.service")
    assert inode == (root / "train.service").stat().st_ino
    assert tree.read("/train.service", "cpu.max") == "max 100000"
    tree.write("/train.service", inode, "cpu.max", "5 10")
    assert (root / "train.service/cpu.max").read_text() == "5 10\n"
    tree.write("/train.service", inode, "cpu.max", "max 100000")
    assert (root / "train.service/cpu.max").read_text() == "max 100000\n"


def test_a_write_that_fails_leaves_what_was_there(root: Path) -> None:
    tree = CgroupTree(str(root))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # like a kill before the write
    try:
        with pytest.raises(Unavailable, match=r"cpu\.max"):
            tree.write("/train.service", tree.inode("/train.service"), "cpu.max", "5 10")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (root / "train.service/cpu.max").read_text() == "max 100000\n"


def test_a_control_file_has_an_owner(root: Path) -> None:
    tree = CgroupTree(str(root))
    assert tree.owner("/train.service", "cpu.max") == os.geteuid()
    if os.geteuid() == 0:
        os.chown(root / "train.service/cpu.max", 1000, -1)
        assert tree.owner("/train.service", "cpu.max") == 1000
    with pytest.raises(Unsupported, match=r"cpu\.weight"):
        tree.owner("/train.service", "cpu.weight")
    with pytest.raises(Gone):
        tree.owner("/none", "cpu.max")


def test_the_root_itself_has_an_inode(root: Path) -> None:
    assert CgroupTree(f"{root}/").inode("/") == root.stat().st_ino


def test_a_cgroup_that_is_not_there_is_gone(root: Path) -> None:
    tree = CgroupTree(str(root))
    for ask in (
        lambda: tree.inode("/none"),
        lambda: tree.read("/none", "cpu.max"),
        lambda: tree.write("/none", 1, "cpu.max", "max"),
        lambda: tree.inode("/train.service/cpu.max"),  # a file in the way
    ):
        with pytest.raises(Gone, match=str(root)):
            ask()


def every_call(tree: CgroupTree, inode: int) -> list[Callable[[], object]]:
    path, file = "/train.service", "cpu.max"
    return [
        tree.tree,
        lambda: tree.inode(path),
        lambda: tree.read(path, file),
        lambda: tree.read_all(path, inode, (file,)),
        lambda: tree.write(path, inode, file, "1 2"),
        lambda: tree.owner(path, file),
    ]


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("there", ["nothing", "a file"])
def test_without_a_tree_no_cgroup_is_gone(root: Path, *, there: str, at_first: bool) -> None:
    tree = CgroupTree(str(root))
    inode = 7
    if not at_first:
        inode = tree.inode("/train.service")
    root.rename(aside := root.with_name("aside"))
    if there == "a file":
        root.write_text("")
    for ask in every_call(tree, inode):
        with pytest.raises(Unavailable, match=f"paths.cgroup_root {root} is no cgroup tree"):
            ask()
    root.unlink(missing_ok=True)
    aside.rename(root)
    assert tree.read("/train.service", "cpu.max") == "max 100000"


def test_in_another_tree_than_at_first_no_cgroup_is_gone_and_none_is_taken_for_it(
    root: Path,
) -> None:
    tree = CgroupTree(str(root))
    inode, before = tree.inode("/train.service"), tree.tree()
    root.rename(aside := root.with_name("aside"))
    (root / "train.service").mkdir(parents=True)
    for files in ((), ("cpu.max",)):
        for file in files:
            (root / "train.service" / file).write_text("theirs\n")
        for ask in every_call(tree, inode):
            with pytest.raises(Unavailable, match="another tree than it did at first"):
                ask()
    assert (root / "train.service/cpu.max").read_text() == "theirs\n"
    (root / "cgroup.controllers").write_text("cpu\n")
    assert CgroupTree(str(root)).tree() != before
    shutil.rmtree(root)
    with pytest.raises(Unavailable, match="not there"):
        tree.inode("/train.service")
    aside.rename(root)
    assert tree.inode("/train.service") == inode
    assert tree.tree() == before == CgroupTree(f"{root}/").tree()


def test_a_root_that_appears_later_is_used(root: Path) -> None:
    tree = CgroupTree(str(root / "later"))
    with pytest.raises(Unavailable, match="set it to where cgroup2 is mounted"):
        tree.inode("/")
    (root / "later").mkdir()
    with pytest.raises(Unavailable, match="no cgroup v2 mount"):
        tree.inode("/")
    (root / "later/cgroup.controllers").write_text("")
    assert tree.inode("/") == (root / "later").stat().st_ino
    with pytest.raises(Gone):
        tree.inode("/none")


def test_what_is_no_cgroup_v2_is_no_tree_until_one_is_mounted_there(root: Path) -> None:
    (root / "cgroup.controllers").unlink()  # as a tmpfs with the trees of v1 below it
    tree = CgroupTree(str(root))
    for ask in every_call(tree, (root / "train.service").stat().st_ino):
        with pytest.raises(Unavailable, match=r"no cgroup v2 mount.*unified_cgroup_hierarchy"):
            ask()
    assert (root / "train.service/cpu.max").read_text() == "max 100000\n"
    (root / "cgroup.controllers").write_text("")
    assert tree.read("/train.service", "cpu.max") == "max 100000"


def test_a_successor_at_the_same_path_is_never_written_to(root: Path) -> None:
    tree = CgroupTree(str(root))
    inode = tree.inode("/train.service")
    (root / "train.service").rename(root / "old")  # keeps the inode from being given out again
    (root / "train.service").mkdir()
    (root / "train.service/cpu.max").write_text("max 100000\n")
    with pytest.raises(Gone, match="another cgroup has taken this path"):
        tree.write("/train.service", inode, "cpu.max", "1 2")
    assert (root / "train.service/cpu.max").read_text() == "max 100000\n"


def test_a_file_is_never_created(root: Path) -> None:
    tree = CgroupTree(str(root))
    inode = tree.inode("/train.service")
    with pytest.raises(Unsupported, match="subtree_control"):
        tree.write("/train.service", inode, "cpu.weight", "50")
    with pytest.raises(Unsupported, match=r"cpu\.weight"):
        tree.read("/train.service", "cpu.weight")
    assert os.listdir(root / "train.service") == ["cpu.max"]


def test_several_files_are_of_one_cgroup_and_what_is_missing_is_left_out(root: Path) -> None:
    tree = CgroupTree(str(root))
    inode = tree.inode("/train.service")
    (root / "train.service/cpu.stat").write_text("usage_usec 1\nnr_periods 2\n" * 1000)
    found = tree.read_all("/train.service", inode, ("cpu.max", "cpu.weight", "cpu.stat"))
    assert found == {
        "cpu.max": "max 100000",
        "cpu.stat": ("usage_usec 1\nnr_periods 2\n" * 1000).rstrip("\n"),
    }
    with pytest.raises(Gone, match="another cgroup has taken this path"):
        tree.read_all("/train.service", inode + 1, ("cpu.max",))
    with pytest.raises(Gone):
        tree.read_all("/none", inode, ("cpu.max",))


def test_links_are_not_followed(root: Path) -> None:
    tree = CgroupTree(str(root))
    secret = root / "secret"
    secret.write_text("untouched")
    folder = root / "train.service"
    (folder / "cpu.weight").symlink_to(secret)
    (root / "link.service").symlink_to(folder)
    with pytest.raises(Refused, match="symbolic link"):
        tree.write("/train.service", tree.inode("/train.service"), "cpu.weight", "50")
    with pytest.raises(AgentError):
        tree.inode("/link.service")
    assert secret.read_text() == "untouched"


def test_a_pipe_in_place_of_a_file_holds_nobody_up(root: Path) -> None:
    os.mkfifo(root / "train.service/cpu.weight")
    tree = CgroupTree(str(root))
    with pytest.raises((Refused, Unavailable)):
        tree.read("/train.service", "cpu.weight")
    with pytest.raises((Refused, Unavailable)):
        tree.write("/train.service", tree.inode("/train.service"), "cpu.weight", "50")


@pytest.mark.parametrize(
    "path", ["", "train.service", "/../etc", "/a/../b", "/./a", "/a\0b", "/caf\ufffd", "/\ud800"]
)
def test_what_is_no_path_below_the_root_is_refused(root: Path, path: str) -> None:
    with pytest.raises(Refused):
        CgroupTree(str(root)).inode(path)


@pytest.mark.parametrize("file", ["", "../cpu.max", "cpu", "a/b.c", "cpu.max\n", "CPU.max", "."])
def test_what_is_no_control_file_is_refused(root: Path, file: str) -> None:
    tree = CgroupTree(str(root))
    with pytest.raises(Refused, match="control file"):
        tree.read("/train.service", file)


def test_a_name_too_long_is_refused(root: Path) -> None:
    with pytest.raises(Refused):
        CgroupTree(str(root)).inode("/" + "x" * 300)


@given(st.text(max_size=30))
def test_no_path_makes_anything_but_an_error_of_ours(path: str) -> None:
    with contextlib.suppress(AgentError):
        CgroupTree("/nowhere").inode(path)


def test_a_mount_that_is_read_only_is_refused_with_the_remedy(root: Path) -> None:
    mounted = subprocess.run(
        ["mount", "--bind", root, root], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no bind mounts here: {mounted.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True, capture_output=True)
        tree = CgroupTree(str(root))
        with pytest.raises(Refused, match="mount it read-write"):
            tree.write("/train.service", tree.inode("/train.service"), "cpu.max", "1 2")
        assert tree.read("/train.service", "cpu.max") == "max 100000"
    finally:
        subprocess.run(["umount", root], check=True)


WRITE_AS_NOBODY = """
import os, sys
from gpuagent.errors import Refused
from gpuagent.host.cgroups import CgroupTree

root = sys.argv[1]
tree = CgroupTree(root)
inode = tree.inode("/train.service")
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(65534)
try:
    tree.write("/train.service", inode, "cpu.max", "1 2")
except Refused as refused:
    print(refused)
"""


def test_a_file_that_is_not_ours_is_refused_with_the_remedy(root: Path) -> None:
    (root / "train.service/cpu.max").chmod(0o400)
    child = subprocess.run(
        [sys.executable, "-c", WRITE_AS_NOBODY, root],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "run it as root or delegate the cgroup" in child.stdout
    assert (root / "train.service/cpu.max").read_text() == "max 100000\n"


def test_folders_that_vanish_and_come_back_while_we_write(root: Path) -> None:
    """Whatever the moment, a write lands in the cgroup that was meant or raises Gone."""
    tree = CgroupTree(str(root))
    kept = root / "kept"
    kept.mkdir()
    path = root / "train.service"
    inode = tree.inode("/train.service")
    stop = threading.Event()

    def swap() -> None:
        other = root / "other"
        other.mkdir()
        (other / "cpu.max").write_text("theirs\n")
        while not stop.is_set():
            path.rename(kept / "mine")
            other.rename(path)
            path.rename(other)
            (kept / "mine").rename(path)

    swapper = threading.Thread(target=swap)
    swapper.start()
    outcomes = {"written": 0, "gone": 0}
    deadline = time.monotonic() + 20
    try:
        while min(outcomes.values()) < 50 and time.monotonic() < deadline:
            try:
                tree.write("/train.service", inode, "cpu.max", "ours")
                outcomes["written"] += 1
            except Gone:
                outcomes["gone"] += 1
    finally:
        stop.set()
        swapper.join()
    assert min(outcomes.values()) >= 50, outcomes
    assert (root / "other/cpu.max").read_text() == "theirs\n"


# -- real cgroups ---------------------------------------------------------------------------------------


def v2_mount() -> str:
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        return next((line.split()[1] for line in mounts if line.split()[2] == "cgroup2"), "")


@pytest.fixture
def real() -> Iterator[tuple[CgroupTree, Path]]:
    """A real cgroup of our own, removed afterwards."""
    mount = v2_mount()
    if not mount:
        pytest.skip("no cgroup v2 is mounted")
    folder = Path(mount) / f"gpuagent-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as broken:
        pytest.skip(f"cgroups cannot be made here: {broken.strerror}")
    try:
        yield CgroupTree(mount), folder
    finally:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()


def test_a_real_cgroup_takes_a_real_process(real: tuple[CgroupTree, Path]) -> None:
    tree, folder = real
    path = f"/{folder.name}"
    child = subprocess.Popen(["sleep", "60"])
    try:
        tree.write(path, tree.inode(path), "cgroup.procs", str(child.pid))
        assert tree.read(path, "cgroup.procs") == str(child.pid)
    finally:
        child.kill()
        child.wait()


def test_a_real_cgroup_made_again_is_another(real: tuple[CgroupTree, Path]) -> None:
    tree, folder = real
    path = f"/{folder.name}"
    inode = tree.inode(path)
    folder.rmdir()
    with pytest.raises(Gone):
        tree.write(path, inode, "cgroup.max.depth", "3")
    folder.mkdir()
    with pytest.raises(Gone, match="another cgroup"):
        tree.write(path, inode, "cgroup.max.depth", "3")
    tree.write(path, tree.inode(path), "cgroup.max.depth", "3")
    assert tree.read(path, "cgroup.max.depth") == "3"


def test_a_real_cgroup_removed_under_an_open_folder_is_gone(
    real: tuple[CgroupTree, Path],
) -> None:
    """The moment between opening the folder and opening the file, held still."""
    tree, folder = real
    path = f"/{folder.name}"
    with tree._opened(path) as opened:
        folder.rmdir()
        with pytest.raises(Gone):
            tree._control(opened, path, "cgroup.max.depth", os.O_WRONLY)


def test_a_real_kernel_says_no(real: tuple[CgroupTree, Path]) -> None:
    tree, folder = real
    path = f"/{folder.name}"
    with pytest.raises(Refused, match="does not accept"):
        tree.write(path, tree.inode(path), "cgroup.max.depth", "many")
    with pytest.raises(Refused):
        tree.write(path, tree.inode(path), "cgroup.subtree_control", "x" * 8)
    with pytest.raises(Gone):
        tree.write(path, tree.inode(path), "cgroup.procs", "999999999")
    with pytest.raises(Unsupported):
        tree.read(path, "cpu.nosuch")
