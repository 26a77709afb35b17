"""`gpuagent run`: the command is what runs, with the environment or, if need be, without it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuagent.cli.client import Client
from gpuagent.cli.exits import Exit, Failure
from gpuagent.cli.run import PATIENCE_SECONDS, _started, _variables
from gpuagent.errors import AgentError, Forbidden, Refused, Unavailable
from gpuagent.model.inventory import Level
from gpuagent.model.plan import StartRun
from tests.cli.stage import agent
from tests.expose import snapshots
from tests.expose.scene import Commands, short_folder

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def run(
    path: str, *words: str, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "gpuagent", "run", "--socket", path, *words],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def show(path: str, *words: str, env: dict[str, str] | None = None) -> dict[str, str]:
    done = run(path, *words, "--", sys.executable, "-c", SHOW, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture
def path() -> Iterator[str]:
    with agent(snapshots.busy()) as served:
        yield served


@pytest.fixture
def nowhere() -> Iterator[str]:
    with short_folder() as folder:
        yield f"{folder}/none"


def test_the_command_has_the_environment_and_nothing_else_is_printed(path: str) -> None:
    done = run(path, "--tenant", "train", "--", sys.executable, "-c", SHOW)
    found = json.loads(done.stdout)
    assert found["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8G,1=8G"
    assert found["GPUAGENT_TENANT"] == "train"
    assert done.stderr == ""


def test_what_was_set_before_stays_or_is_replaced(path: str) -> None:
    before = {"MINE": "kept", "CUDA_MPS_CLIENT_PRIORITY": "7"}
    found = show(path, "--tenant", "train", env=before)
    assert found["MINE"] == "kept"
    assert found["CUDA_MPS_CLIENT_PRIORITY"] == "1"


def test_its_exit_code_is_the_commands(path: str) -> None:
    for code in (0, 1, 5, 42):
        done = run(path, "--tenant", "train", "--", "sh", "-c", f"exit {code}")
        assert done.returncode == code
    killed = run(path, "--tenant", "train", "--", "sh", "-c", "kill -TERM $$")
    assert killed.returncode == -signal.SIGTERM


def test_its_options_are_its_own(path: str) -> None:
    done = run(path, "--tenant", "train", "echo", "--tenant", "other", "--help", "-x")
    assert done.stdout == "--tenant other --help -x\n"


def test_it_ignores_no_signal_that_the_caller_did_not_ignore(path: str) -> None:
    done = run(path, "--tenant", "train", "--", "grep", "SigIgn", "/proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        assert not ignored & (1 << (number - 1))


@pytest.mark.parametrize("name", ["train", "nobody", "a/b c", "\u202e", ""])
def test_without_an_agent_it_runs_all_the_same_with_a_warning(nowhere: str, name: str) -> None:
    done = run(nowhere, "--tenant", name, "--", "echo", "here")
    assert (done.returncode, done.stdout) == (0, "here\n")
    assert done.stderr.startswith("gpuagent: warning: the agent does not run")
    assert done.stderr.count("\n") == 1


def test_of_a_tenant_that_there_is_not_it_does_not_run(path: str) -> None:
    done = run(path, "--tenant", "nobody", "--", "echo", "here")
    assert (done.returncode, done.stdout) == (Exit.UNKNOWN_TENANT, "")
    assert 'there is no tenant "nobody"' in done.stderr


def test_an_agent_that_cannot_say_yet_keeps_nobody_from_running() -> None:
    with agent(None) as path:
        done = run(path, "--tenant", "train", "--", "echo", "here")
    assert (done.returncode, done.stdout) == (0, "here\n")
    assert "warning" in done.stderr


def test_strictly_it_does_not(nowhere: str, path: str, tmp_path: Path) -> None:
    mark = str(tmp_path / "ran")
    done = run(nowhere, "--strict", "--tenant", "train", "--", "touch", mark)
    assert done.returncode == Exit.UNREACHABLE
    done = run(path, "--strict", "--tenant", "nobody", "--", "touch", mark)
    assert done.returncode == Exit.UNKNOWN_TENANT
    assert not os.path.exists(mark)
    done = run(path, "--strict", "--tenant", "train", "--", "touch", mark)
    assert done.returncode == 0
    assert os.path.exists(mark)


def test_an_agent_that_hangs_is_not_waited_for_long(nowhere: str) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(nowhere)
        hung.listen()
        with pytest.raises(Failure, match="has not answered") as failure:
            Client(nowhere, patience=0.05).tenant("train", "/environment")
    assert failure.value.code is Exit.UNREACHABLE
    assert PATIENCE_SECONDS <= 5


def test_a_command_that_is_not_there_ends_as_in_a_shell(path: str, tmp_path: Path) -> None:
    done = run(path, "--tenant", "train", "--", "no-such-command-here")
    assert (done.returncode, done.stdout) == (127, "")
    assert "cannot run no-such-command-here: No such file" in done.stderr
    plain = tmp_path / "plain"
    plain.write_text("text")
    assert run(path, "--tenant", "train", "--", str(plain)).returncode == 126


def test_a_new_tenant_asks_for_itself_and_has_what_it_was_admitted_with() -> None:
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        words = ("--sla", "L3", "--gpu-memory", "8GiB", "--share", "40%", "--name", "job")
        more = ("--cpu-weight", "50", "--host-memory", "1GiB", "--gpus", "2")
        found = show(path, *words, *more, env={"CUDA_VISIBLE_DEVICES": "7"})
    assert found["CUDA_VISIBLE_DEVICES"] == snapshots.GPU0
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert found["GPUAGENT_TENANT"] == "job"
    (command,) = commands.seen
    assert isinstance(command, StartRun)
    ask = command.ask
    assert (ask.level, ask.memory_bytes, ask.share_ratio) == (Level.L3, 8 << 30, 0.4)
    assert (ask.cpu_weight, ask.host_memory_bytes, ask.count) == (50, 1 << 30, 2)
    assert ask.admin is (os.getuid() == 0)
    assert ask.uid == os.getuid()


def test_a_new_tenant_becomes_its_command_in_place() -> None:
    """The process that was admitted is the one that runs: no other is between it and its signals."""
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        done = run(path, "--sla", "L3", "--", "sh", "-c", "echo $$; kill -TERM $$")
    assert done.returncode == -signal.SIGTERM
    (command,) = commands.seen
    assert isinstance(command, StartRun)
    assert command.ask.pid == int(done.stdout)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("GPU 0: too full; wait"), Exit.REFUSED),
        (Forbidden("you may not start tenants of L1"), Exit.FORBIDDEN),
        (Unavailable("no picture yet"), Exit.UNREACHABLE),
    ],
)
def test_a_new_tenant_that_is_refused_is_not_started(
    error: AgentError, code: Exit, tmp_path: Path
) -> None:
    mark, commands = tmp_path / "mark", Commands()
    commands.answer = error
    with agent(snapshots.busy(), commands) as path:
        done = run(path, "--sla", "L3", "--", "touch", str(mark))
    assert done.returncode == code
    assert str(error) in done.stderr
    assert not mark.exists()


def test_a_new_tenant_without_an_agent_is_not_started(nowhere: str, tmp_path: Path) -> None:
    done = run(nowhere, "--sla", "L3", "--", "touch", str(tmp_path / "mark"))
    assert done.returncode == Exit.UNREACHABLE
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--sla", "L3", "--tenant", "train"),
        ("--tenant", "train", "--gpu-memory", "8GiB"),
        ("--sla", "L4"),
        ("--sla", "L3", "--gpu-memory", "8 apples"),
        ("--sla", "L3", "--share", "0.4"),
        ("--sla", "L3", "--name", "a b"),
        ("--sla", "L3", "--gpus", "0"),
        ("--sla", "L3", "--gpu", "../0"),
    ],
)
def test_what_makes_no_sense_is_a_mistake_of_usage(path: str, words: tuple[str, ...]) -> None:
    done = run(path, *words, "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (Exit.USAGE, ""), done.stderr


@pytest.mark.parametrize("document", [{}, {"run": None}, {"run": {"notes": [1]}, "numa_nodes": []}])
def test_an_answer_that_is_no_run_is_none(document: dict[str, object]) -> None:
    with pytest.raises(Failure, match="is no run"):
        _started(document)


@pytest.mark.parametrize("words", [("--", "echo"), ("--tenant", "train"), ("--tenant", "t", "--")])
def test_what_is_missing_is_said(nowhere: str, words: tuple[str, ...]) -> None:
    done = run(nowhere, *words)
    assert done.returncode == Exit.USAGE
    assert "Missing" in done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        None,
        7,
        [None],
        [{}],
        [{"name": "A"}],
        [{"name": "A", "value": 1}],
        [{"name": "", "value": "x"}],
        [{"name": "A=B", "value": "x"}],
        [{"name": "A", "value": "x\0y"}],
        [{"name": "A\0", "value": "x"}],
    ],
)
def test_an_answer_that_is_no_environment_is_none(variables: object) -> None:
    with pytest.raises(Exception, match="is no environment"):
        _variables({"variables": variables})


def test_what_a_later_agent_adds_is_passed_over() -> None:
    later = [{"name": "A", "value": "x", "since": "2.0"}]
    assert _variables({"variables": later, "more": 1}) == {"A": "x"}
