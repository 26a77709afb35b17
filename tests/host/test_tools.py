"""What `check` says of the tools of others, on hosts made of files."""

from pathlib import Path

import msgspec
import pytest

from gpuagent.config import Config, Mps, Paths, Suspend
from gpuagent.host import tools
from gpuagent.host.offers import Offer
from gpuagent.model.inventory import MpsClient, MpsDaemon


def executable(folder: Path, name: str) -> str:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def test_programs_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    config = Config()
    for probe, name in (
        (tools.mps, "nvidia-cuda-mps-control"),
        (tools.nvidia_smi, "nvidia-smi"),
        (lambda c: tools.checkpoint(c, ""), "cuda-checkpoint"),
    ):
        missing = probe(config)
        assert missing.state == "missing"
        assert missing.what.startswith(f"{name} is not in PATH; needed only for ")
        assert missing.remedy
        path = executable(tmp_path / "bin", name)
        found = probe(config)
        assert (found.state, path in found.what, found.remedy) == ("ok", True, "")
    elsewhere = Config(
        mps=Mps(control="/no/such"),
        paths=Paths(nvidia_smi="/no/such"),
        suspend=Suspend(command="/no/such"),
    )
    for offer in (
        tools.mps(elsewhere),
        tools.nvidia_smi(elsewhere),
        tools.checkpoint(elsewhere, ""),
    ):
        assert offer.state == "missing"
        assert "/no/such is not an executable" in offer.what


@pytest.mark.parametrize(
    ("driver", "state"),
    [("570.86.10", "ok"), ("550.54", "partial"), ("", "ok"), ("unknown", "ok"), ("1e9", "ok")],
)
def test_a_driver_that_is_too_old_for_suspending(tmp_path: Path, driver: str, state: str) -> None:
    program = executable(tmp_path, "cuda-checkpoint")
    offer = tools.checkpoint(Config(suspend=Suspend(command=program)), driver)
    assert offer.state == state
    assert bool(offer.remedy) is (state == "partial")


def test_freezing_needs_a_file_that_the_root_does_not_have(tmp_path: Path) -> None:
    assert tools.freezer(str(tmp_path / "none")).state == "missing"
    (tmp_path / "cgroup.freeze").write_text("0")
    assert tools.freezer(str(tmp_path)).state == "missing"
    (tmp_path / "system.slice").mkdir()
    (tmp_path / "system.slice/cgroup.freeze").write_text("0")
    assert tools.freezer(str(tmp_path)).state == "ok"


def test_units() -> None:
    nothing = tools.units("", booted=False)
    assert (nothing.state, bool(nothing.remedy)) == ("missing", True)
    assert nothing.what.startswith("systemd does not run this host: limits are written")
    assert tools.units("", booted=True).state == "ok"
    trouble = tools.units("no connection to D-Bus", booted=True)
    assert (trouble.state, bool(trouble.remedy)) == ("partial", True)
    assert "no connection to D-Bus" in trouble.what


def test_daemons() -> None:
    up = MpsDaemon("g", up=True, pipe_directory="/p", clients=(MpsClient(1, 2),))

    def offer(found: MpsDaemon, *mixed: str, own: bool = False, enforce: bool = True) -> Offer:
        return tools.daemon(found, own=own, enforce=enforce, mixed=mixed)

    assert offer(up).state == "ok"
    half = msgspec.structs.replace(up, why="client lists could not be read")
    assert offer(half).state == "partial"
    shared = offer(up, "serve (L1) shares server 2 with train (L3)")
    assert shared.state == "partial"
    assert "serve (L1) shares server 2 with train (L3)" in shared.what
    assert "of its own" in shared.remedy
    down = MpsDaemon("g", up=False, pipe_directory="/p")
    assert offer(down) == Offer(
        "MPS group g",
        "missing",
        "no MPS control daemon runs in /p",
        "start it (`CUDA_MPS_PIPE_DIRECTORY=/p nvidia-cuda-mps-control -d`), or have the agent do so: "
        "own = true",
    )
    ours = offer(down, own=True)
    assert (ours.state, ours.what) == ("partial", "no MPS control daemon runs in /p")
    assert ours.remedy == "start the agent: it then starts the daemon itself"
    watched = offer(down, own=True, enforce=False)
    assert watched.remedy == 'set mode = "enforce": the agent then starts the daemon itself'
