"""Where the last run kept its books, left beside its socket."""

from pathlib import Path

import pytest

from gpuagent import trail
from gpuagent.config import Paths


def test_what_is_left_is_found_until_it_is_wiped(tmp_path: Path) -> None:
    paths = Paths(state_dir="/state", socket=str(tmp_path / "gpuagent.sock"))
    assert trail.left(paths) is None
    trail.leave(paths)
    assert trail.left(Paths(state_dir="/other", socket=paths.socket)) == paths
    assert [p.name for p in tmp_path.iterdir()] == ["gpuagent.paths"]
    trail.wipe(paths)
    assert trail.left(paths) is None


@pytest.mark.parametrize("names", [("a.sock", "b.sock"), ("a", "b"), ("a.paths", "b.sock")])
def test_two_agents_in_one_folder_have_each_their_own(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    one, two = (Paths(state_dir=f"/{n}", socket=str(tmp_path / n)) for n in names)
    trail.leave(one)
    assert trail.left(two) is None
    trail.leave(two)
    assert (trail.left(one), trail.left(two)) == (one, two)
    assert not any((tmp_path / n).exists() for n in names), "no socket is written over"


def test_only_a_plain_file_is_believed(tmp_path: Path) -> None:
    paths = Paths(socket=str(tmp_path / "g.sock"))
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "g.paths").symlink_to(tmp_path / "elsewhere")
    assert trail.left(paths) is None
