"""What is shipped: the wheel, the pins, and that no registry is named in the tree."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import gpuagent

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP = {
    "pyproject.toml", "gpuagent", "systemd", "bpf", "config", "tests", "packaging", "CHANGELOG.md",
    "README.md", "LICENSE", "Makefile", ".ci", ".gitignore",
}  # fmt: skip


def pins(lock: str) -> dict[str, str]:
    """Name and version of every requirement; each must carry hashes."""
    found = {}
    text = (ROOT / "packaging" / "lock" / f"{lock}.txt").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        match = re.match(r"([a-z0-9-]+)==([^ ;]+)", line)
        assert match, line
        assert "--hash=sha256:" in line, line
        found[match[1]] = match[2]
    return found


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=~ ]", r)[0] for r in requirements}


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_every_dependency_is_pinned_and_hashed() -> None:
    run, dev = pins("run"), pins("dev")
    assert names(PROJECT["project"]["dependencies"]) <= run.keys()
    assert names(PROJECT["dependency-groups"]["dev"]) <= dev.keys()
    assert {k: dev.get(k) for k in run} == run, "tested with other versions than pinned to run"


def test_every_dependency_is_named_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    asked = names(PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"])
    assert {n for n in asked if n not in text} == set()


def test_the_wheel_builds_and_runs_without_the_checkout(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        inside = set(archive.namelist())
    assert not [n for n in inside if n.startswith("tests")]
    shipped = (tmp_path / "site/gpuagent/data/gpuagent.toml").read_text()
    assert shipped == (ROOT / "config/gpuagent.toml").read_text()
    asked = subprocess.run(
        [sys.executable, "-P", "-m", "gpuagent", "--version"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert gpuagent.__version__ in asked.stdout


def test_the_top_level_is_the_mandated_one() -> None:
    assert {p.relative_to(ROOT).parts[0] for p in tracked()} == TOP


def test_no_registry_is_named_in_the_tree() -> None:
    hosts = re.compile(r"pypi[.]org|python[h]osted|deb[.]debian|file:[/]{3}")
    found = [p for p in tracked() if p.is_file() and hosts.search(p.read_text("latin-1"))]
    assert found == []


def test_the_unit_runs_what_the_command_line_has() -> None:
    unit = (ROOT / "systemd/gpuagent.service").read_text()
    for line in re.findall(r"^Exec\w+=/usr/bin/gpuagent (.*)$", unit, re.MULTILINE):
        done = subprocess.run(
            [sys.executable, "-m", "gpuagent", *line.split(), "--help"],
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, line
