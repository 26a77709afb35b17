"""`gpuagent run` against the real daemon: admitted with its environment, refused with the reason."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.expose.scene import short_folder
from tests.fakes.nvml import GIB, H100_80GB
from tests.stage import Daemon, Stage, cgroup2_mount, until

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
WAIT = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    if cgroup2_mount() is None:
        pytest.skip("needs a writable cgroup v2 mount: run as root where one is mounted")
    with Stage(tmp_path, [H100_80GB, H100_80GB]) as stage:
        yield stage


@contextlib.contextmanager
def started(stage: Stage, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """A run that waits until it is told to end; it ends with the context."""
    command = [sys.executable, "-m", "gpuagent", "--config", str(stage.config), "run", *words]
    with subprocess.Popen(
        [*command, "--", sys.executable, "-c", WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n", process.communicate()[1]
            yield process
        finally:
            process.kill()


def run(stage: Stage, *words: str) -> "subprocess.CompletedProcess[str]":
    return stage.command("run", *words)


def runs(daemon: Daemon) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = daemon.client.get("/v1/runs")["items"]
    return items


def kinds(daemon: Daemon) -> list[str]:
    return [e["kind"] for e in daemon.client.get("/v1/events")["items"]]


JOB = ("--sla", "L3", "--gpu-memory", "8GiB", "--share", "40%", "--name", "job")


def test_it_has_its_environment_from_the_start_and_its_exit_code_is_its_own(stage: Stage) -> None:
    with stage.running() as daemon:
        done = run(stage, *JOB, "--gpu", "1", "--", sys.executable, "-c", SHOW)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        card = daemon.client.get("/v1/gpus")["items"][1]
        assert found["CUDA_VISIBLE_DEVICES"] == card["uuid"]
        assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
        assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8G,1=8G"
        assert found["GPUAGENT_TENANT"] == "job"
        for script, code in (("exit 42", 42), ("kill -TERM $$", -signal.SIGTERM)):
            assert run(stage, *JOB[:4], "--", "sh", "-c", script).returncode == code
        until("all have ended", lambda: not runs(daemon))
        assert kinds(daemon).count("run-admitted") == 3
        until("that is told", lambda: kinds(daemon).count("run-ended") == 3)


def test_it_is_a_tenant_with_what_it_was_promised_while_it_lives(stage: Stage) -> None:
    with stage.running() as daemon:
        with started(stage, *JOB) as process:
            tenant = until("it is a tenant", lambda: named(daemon, "job"))
            assert tenant is not None
            assert tenant["row"]["level"] == "L3"
            assert tenant["limits"]["memory_reserved_bytes"] == 8 * GIB
            assert tenant["limits"]["compute_share_ratio"] == 0.4
            assert [p["pid"] for p in tenant["processes"]] == [process.pid]
            told = daemon.client.explain("job")
            assert told["run"]["memory_bytes"] == 8 * GIB
            said = stage.command("explain", "job").stdout
            assert "job was started with `gpuagent run`" in said
            assert "job was started" in stage.command("explain").stdout
        until("it has ended", lambda: not runs(daemon))
        until("it is no tenant any more", lambda: named(daemon, "job") is None)


def named(daemon: Daemon, name: str) -> dict[str, Any] | None:
    names = [t["name"] for t in daemon.client.get("/v1/tenants")["items"]]
    return daemon.client.get(f"/v1/tenants/{name}") if name in names else None


def test_what_is_reserved_is_not_given_twice_also_after_a_crash(stage: Stage) -> None:
    big = ("--sla", "L2", "--gpu-memory", "60GiB", "--gpu", "0")
    daemon = stage.daemon().ready()
    with started(stage, *big, "--name", "first"):
        told = refusal(stage, *big)
        [one] = refused(daemon)
        assert told == f"{one['why']}; {one['remedy']}"
        daemon.kill()
        again = stage.daemon().ready()
        until("it is known again", lambda: [r["name"] for r in runs(again)] == ["first"])
        assert "60 GiB are reserved for others" in refusal(stage, *big)
        assert refused(again)[0]["numbers"]["memory_owed_bytes"] == 60 * GIB
        # The other card is free.
        assert run(stage, *big[:4], "--", "true").returncode == 0
        said = stage.command("explain").stdout
        assert "60 GiB are reserved" in " ".join(said.split())
    until("its memory is free again", lambda: run(stage, *big, "--", "true").returncode == 0)
    assert again.stop() == 0


def refusal(stage: Stage, *words: str) -> str:
    done = run(stage, *words, "--", "true")
    assert done.returncode == 6, done
    return done.stderr.removeprefix("gpuagent: ").strip()


def refused(daemon: Daemon) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = daemon.client.get("/v1/refusals")["items"]
    return items


def test_many_at_once_never_get_more_than_there_is(stage: Stage) -> None:
    with stage.running() as daemon:
        words = ("run", "--sla", "L3", "--gpu-memory", "30GiB", "--", "sleep", "60")
        command = [sys.executable, "-m", "gpuagent", "--config", str(stage.config), *words]
        crowd = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(6)]
        try:
            until("four have what there is", lambda: len(runs(daemon)) == 4)
            until("the others are refused", lambda: sum(p.poll() == 6 for p in crowd) == 2)
            cards = [r["gpus"][0] for r in runs(daemon)]
            assert sorted(map(cards.count, set(cards))) == [2, 2]
        finally:
            for process in crowd:
                process.kill()
                process.wait()


def test_without_an_agent_nothing_is_started_that_was_to_be_admitted(
    stage: Stage, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    done = run(stage, *JOB, "--", "touch", str(mark))
    assert done.returncode == 3
    assert "the agent does not run" in done.stderr
    assert not mark.exists()


STRANGER = 54321
AS_STRANGER = f"""
import os, sys
import encodings.ascii, gpuagent.cli.run, http.client, json
from gpuagent.cli.main import cli
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
cli(sys.argv[1:])
"""
"""The interpreter of a test need not be one that others can start."""


def test_others_may_only_what_is_configured() -> None:
    if cgroup2_mount() is None or os.getuid() != 0:
        pytest.skip("needs root and a writable cgroup v2 mount")
    with short_folder() as folder, Stage(Path(folder), [H100_80GB]) as stage:
        stage.configure(f'[[run.allow]]\nuser = "{STRANGER}"\nsla = ["L3"]\n')

        def as_other(level: str) -> "subprocess.CompletedProcess[str]":
            words = ("--socket", str(stage.folder / "agent.sock"), "run", "--sla", level)
            return subprocess.run(
                [sys.executable, "-c", AS_STRANGER, *words, "--", "true"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                cwd="/",
            )

        with stage.running() as daemon:
            done = as_other("L3")
            assert done.returncode == 0, done.stderr
            denied = as_other("L1")
            assert denied.returncode == 4
            assert "may not start tenants of L1" in denied.stderr
            assert refused(daemon)[0]["kind"] == "forbidden"
            assert refused(daemon)[0]["by"] == f"user {STRANGER}"
