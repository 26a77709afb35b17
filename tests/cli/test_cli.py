"""The commands: what they print, how they end, and that no name gets at the terminal."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuagent.cli import client
from gpuagent.cli.exits import CODES, Exit
from gpuagent.cli.main import COMMANDS, cli
from gpuagent.errors import ConfigError, Refused, Unavailable, Unsupported
from gpuagent.expose.sockets import admin_path, bind_socket
from gpuagent.model.inventory import Inventory, Level, Limits, on_tenant
from gpuagent.model.plan import Pause, Posture, ReleaseGpus, Reload, ResumeGpus, Unpause
from gpuagent.model.state import Health, NodeState, Reading, Result
from gpuagent.model.vocab import TENANT_LATENCY_SECONDS
from tests.cli.stage import agent, run
from tests.expose import snapshots
from tests.expose.scene import Commands, short_folder

READS = (("status",), ("tenants",), ("explain", "train"), ("config", "show"))


def harmless(text: str) -> None:
    """Nothing but printable characters and line ends."""
    for line in text.split("\n"):
        assert line.isprintable(), repr(line)


# -- what is printed -------------------------------------------------------------------------------------


def test_status_shows_node_cards_and_health() -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, "status")
    assert done.exit_code == 0, done.output
    assert "mode enforce, acting" in done.stdout
    assert "510/700 W" in done.stdout
    assert "70.0/80.0 GiB" in done.stdout
    assert "71 C" in done.stdout
    assert "Health: ok" in done.stdout
    assert done.stderr == ""


def test_status_of_a_host_without_gpus_says_why() -> None:
    with agent(snapshots.empty()) as path:
        done = run("status", "--socket", path)
    assert done.exit_code == Exit.PROBLEM
    assert "Cards 0" in done.stdout
    assert "nvml: no driver is loaded (last read: never)" in done.stdout
    assert 'why: the configuration says mode = "observe"' in done.stdout


def test_unknown_is_a_dash_and_never_zero() -> None:
    with agent(snapshots.unread()) as path:
        done = run("--socket", path, "status")
        rows = run("--socket", path, "tenants")
    assert "Cards -, drawing -; tenants -" in done.stdout
    assert "There are no tenants." in rows.stdout
    with agent(snapshots.busy()) as path:
        rows = run("--socket", path, "tenants")
    serve = next(x for x in rows.stdout.splitlines() if x.startswith("serve"))
    assert serve.split() == ["serve", "L1", "-", "100", "%", "-", "0", "-"]
    with agent(snapshots.busy()) as path:
        rows = run("--socket", path, "tenants", columns=120)
    serve = next(x for x in rows.stdout.splitlines() if x.startswith("serve"))
    assert serve.split() == ["serve", "L1", "-", "100", "%", "-", "0", "-", "-", "1"]


def test_tenants_shows_class_and_latency_against_its_objective() -> None:
    shown = snapshots.busy()
    limits = Limits(latency_slo_seconds=0.1)
    tenant = msgspec.structs.replace(
        snapshots.tenant("serve", level=Level.L1), kind="inference", limits=limits
    )
    latency = Reading(
        TENANT_LATENCY_SECONDS, on_tenant("serve"), 0.093, snapshots.MONO, True, ("0.99",)
    )
    state = NodeState(
        shown.state.now,
        inventory=Inventory(tenants=(tenant,)),
        readings={(latency.signal, latency.subject, latency.dims): latency},
    )
    with agent(msgspec.structs.replace(shown, state=state, holds=())) as path:
        rows = run("--socket", path, "tenants").stdout.splitlines()
    assert rows[0].split()[:5] == ["Tenant", "Level", "Class", "Share", "Latency"]
    assert rows[1].split()[:7] == ["serve", "L1", "inference", "100", "%", "93/100", "ms"]


def test_explain_lists_the_limits_as_declared_used_and_enforced() -> None:
    with agent(snapshots.busy()) as path:
        text = " ".join(run("--socket", path, "explain", "train").stdout.split())
    assert "Limits: declared / used / enforced" in text
    assert f"memory_limit on {snapshots.GPU0}: 8.0 GiB / 60.0 GiB / - by nothing" in text
    assert "it uses more" in text


def test_tenants_lists_all_pages() -> None:
    with agent(snapshots.large(2, 450)) as path:
        done = run("--json", "--socket", path, "tenants")
    names = [t["name"] for t in json.loads(done.stdout)["items"]]
    assert len(names) == 450
    assert names == sorted(names)


def test_explain_reads_as_prose() -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, "explain", "train")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    for words in (
        "train is L3 (best effort: held back first); it was claimed by the rule train.",
        "It is held back to 49 % of its usual activity for memory: cut twice.",
        "memory on GPU-00000000-0000-0000-0000-000000000000, for 12 s: memory of card 0 is at 87 %",
        "wanted 2.1 cores, real 2.1 cores, before us unlimited: applied",
        "rule: backpressure/memory (memory_used_ratio 88 %)",
        "wanted 25, real 100: ineffective no sibling competes with it",
        "wanted -, real 700 W: not turned why: nothing calls for it",
        "/system.slice/train.service: its own",
        "tenant_gpu_utilization_ratio 60 % (estimated, 1 s ago)",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("effect", "sentence"),
    [
        ("applied", "It is held back to 49 % of its usual activity for memory: cut twice."),
        ("in flight", "It is being held back to 49 % of its usual activity for memory: cut twice."),
        ("pending", "for memory as soon as it starts anew: cut twice."),
        ("would", "It would be held back to 49 % of its usual activity for memory, which is only "),
        ("refused", "It is to be held back to 49 % of its usual activity for memory: cut twice."),
        ("refused", "That is refused: the reason."),
        ("ineffective", "That has no effect: the reason."),
        ("contested", "Somebody else keeps undoing that: the reason."),
        ("gone", "What was to be turned has gone: the reason."),
        (None, "What became of that is not known yet."),
    ],
)
def test_explain_says_what_is_so_and_not_what_was_decided(
    effect: Result | None, sentence: str
) -> None:
    with agent(snapshots.became(effect, "the reason")) as path:
        text = " ".join(run("--socket", path, "explain", "train").stdout.split())
    assert sentence in text
    assert ("It is held back" in text) == (effect in {"applied", "pending"})


def test_while_observing_nobody_is_held_back() -> None:
    with agent(snapshots.busy(posture=snapshots.OBSERVING)) as path:
        status = " ".join(run("--socket", path, "status").stdout.split())
        rows = run("--socket", path, "tenants").stdout
        text = " ".join(run("--socket", path, "explain", "train").stdout.split())
    assert "held back 0, would be held back 1;" in status
    assert "would 49 %" in rows
    assert "It is held back" not in text


def test_a_lever_that_does_nothing_is_not_a_share() -> None:
    with agent(snapshots.became("refused")) as path:
        status = " ".join(run("--socket", path, "status").stdout.split())
        rows = " ".join(run("--socket", path, "tenants", columns=120).stdout.split())
    assert "held back 0;" in status
    assert "train L3 - 100 % - 0" in rows
    assert "memory (cpu_max): refused" in rows


def test_cards_are_counted_apart_from_tenants() -> None:
    holds = (snapshots.limited_card("applied"),)
    with agent(msgspec.structs.replace(snapshots.busy(), holds=holds)) as path:
        status = " ".join(run("--socket", path, "status").stdout.split())
    assert "held back 0, cards limited 1;" in status


def test_status_says_every_reason_for_not_being_well() -> None:
    snapshot = snapshots.hostile(("a call hangs",))
    snapshot.state.health = {
        "gpus": Health("gpus", up=True),
        "kernel_log": Health("kernel_log", up=False, why="no right to read it"),
    }
    posture = Posture(mode="enforce", demoted="three crashes", paused=True)
    with agent(msgspec.structs.replace(snapshot, posture=posture)) as path:
        lines = run("--socket", path, "status").stdout.splitlines()
        as_json = run("--socket", path, "status", "--json")
    assert as_json.exit_code == Exit.PROBLEM
    assert json.loads(as_json.stdout)["health"]["ok"] is False
    assert "Health: not ok, degraded" in lines
    assert "  only observing: three crashes" in lines
    assert "  kernel_log (optional): no right to read it (last read: never)" in lines
    assert "  card 0 cannot be read: a call hangs" in lines


def test_a_host_that_lacks_only_what_it_can_do_without_is_well() -> None:
    snapshot = snapshots.busy()
    snapshot.state.health = {"process_events": Health("process_events", False, "not here")}
    with agent(snapshot) as path:
        done = run("--socket", path, "status")
    assert done.exit_code == Exit.OK
    assert "Health: ok, degraded" in done.stdout.splitlines()


def test_explain_an_l1_tenant() -> None:
    with agent(snapshots.busy(posture=snapshots.OBSERVING)) as path:
        text = run("--socket", path, "explain", "serve").stdout
    assert "It is not held back, and will not be." in text
    assert 'Nothing is changed now: the configuration says mode = "observe".' in text


@pytest.mark.parametrize(
    "words",
    [("--config", "FILE", "config", "check"), ("demo", "FILE"), ("evaluate", "--policy", "FILE")],
    ids=["configuration", "scenario", "policy"],
)
def test_a_file_that_is_nested_too_deeply_is_refused(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "deep.toml"
    file.write_text('mode = "observe"\nx = ' + "[" * 5000)
    done = run(*(str(file) if word == "FILE" else word for word in words))
    assert done.exit_code == Exit.USAGE
    assert f"{file}: not valid TOML: nested too deeply" in done.stdout + done.stderr


def test_config_show_is_flat() -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, "config", "show")
    assert done.stdout == 'mode = "observe"\npower.budget = not given\n'


@pytest.mark.parametrize("words", READS)
def test_every_reading_command_fits_eighty_columns(words: tuple[str, ...]) -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, *words)
    assert done.exit_code == 0, done.output
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("words", READS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_json_everywhere(words: tuple[str, ...], place: str) -> None:
    with agent(snapshots.busy()) as path:
        options = ("--json", "--socket", path)
        done = run(*options, *words) if place == "before" else run(*words, *options)
    assert done.exit_code == 0, done.output
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == ""


# -- commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("pause", Pause),
        ("unpause", Unpause),
        ("release", ReleaseGpus),
        ("resume", ResumeGpus),
        ("reload", Reload),
    ],
)
def test_commands_say_what_was_done(word: str, kind: type) -> None:
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        done = run("--socket", path, word)
        as_json = run("--socket", path, word, "--json")
    assert (done.exit_code, done.stdout) == (0, "done as you wished\n")
    assert json.loads(as_json.stdout) == {"done": "done as you wished"}
    assert [type(c) for c in commands.seen] == [kind, kind]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("a write is in flight"), Exit.REFUSED),
        (Unsupported("no driver here"), Exit.REFUSED),
        (Unavailable("the inbox is full"), Exit.UNREACHABLE),
        (ConfigError(["a.toml:3: x: unknown key", "a.toml:4: y: no size"]), Exit.USAGE),
    ],
)
def test_a_declined_command_has_its_code(error: Exception, code: Exit) -> None:
    commands = Commands()
    commands.answer = error
    with agent(snapshots.busy(), commands) as path:
        done = run("--socket", path, "pause")
    assert done.exit_code == code
    assert done.stdout == ""
    for line in str(error).splitlines():
        assert line in done.stderr


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [*READS, ("pause",), ("release",)])
def test_without_an_agent_the_remedy_is_named(words: tuple[str, ...]) -> None:
    with short_folder() as folder:
        done = run("--socket", f"{folder}/none", *words)
    assert done.exit_code == Exit.UNREACHABLE
    assert done.stdout == ""
    assert "does not run" in done.stderr
    assert "systemctl start gpuagent" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_tenant_has_its_code() -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, "explain", "no/such:ten@nt ..")
    assert done.exit_code == Exit.UNKNOWN_TENANT
    assert '"no/such:ten@nt .."' in done.stderr
    assert "gpuagent tenants" in done.stderr


def test_before_the_first_look_the_agent_counts_as_not_there_yet() -> None:
    with agent(None) as path:
        done = run("--socket", path, "status")
    assert done.exit_code == Exit.UNREACHABLE
    assert "first look" in done.stderr


@pytest.mark.parametrize(
    "answer", [b"", b"junk\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n{}x", b"HTTP/1.1 200 OK\r\n\r\n[]"]
)
def test_something_else_on_the_socket(answer: bytes) -> None:
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/s"
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            talk, _ = listener.accept()
            with talk:
                talk.recv(65536)
                talk.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        done = run("--socket", path, "status")
        thread.join()
    assert done.exit_code == Exit.UNREACHABLE
    assert "is not the agent" in done.stderr


def full(path: str) -> Iterator[socket.socket]:
    """Fill the queue of a listener that takes nobody; the connections."""
    while True:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        if one.connect_ex(path):
            one.close()
            return
        yield one


def test_a_full_queue_is_waited_for_and_then_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BUSY_SECONDS", 0.1)
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/s"
        listener.bind(path)
        listener.listen(1)
        opened = list(full(path))
        done = run("--socket", path, "status")
        for one in opened:
            one.close()
    assert opened
    assert done.exit_code == Exit.UNREACHABLE
    assert "busy" in done.stderr


def test_an_administrator_does_not_queue_with_the_others() -> None:
    with agent(snapshots.busy()) as path, socket.socket(socket.AF_UNIX) as listener:
        os.unlink(path)
        listener.bind(path)
        listener.listen(1)
        opened = list(full(path))
        assert run("--socket", path, "status").exit_code == 0
        for one in opened:
            one.close()


def test_a_socket_for_administrators_that_was_left_behind_is_passed_by() -> None:
    with agent(snapshots.busy()) as path:
        os.unlink(admin_path(path))
        bind_socket(admin_path(path)).close()
        assert run("--socket", path, "status").exit_code == 0


@pytest.mark.parametrize(
    "words", [("nonsense",), ("explain", "a", "b"), ("status", "extra"), ("--bad",)]
)
def test_a_wrong_command_line_is_usage(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.exit_code == Exit.USAGE
    assert done.stdout == ""


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)])
def test_every_command_has_help_with_the_exit_codes(words: tuple[str, ...]) -> None:
    done = run(*words, "--help")
    assert done.exit_code == 0
    assert "--json" in done.stdout
    for code in Exit:
        assert f"  {code.value}  " in CODES
    assert "there is no such tenant" in done.stdout


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_no_hostile_name_reaches_the_terminal(form: tuple[str, ...]) -> None:
    with agent(snapshots.hostile()) as path:
        listed = run("--socket", path, "--json", "tenants")
        names = [t["name"] for t in json.loads(listed.stdout)["items"]]
        assert len(names) == len(snapshots.HOSTILE)
        harmless(run("--socket", path, "status", *form).output)
        harmless(run("--socket", path, "tenants", *form).output)
        for name in names:
            done = run("--socket", path, "explain", *form, "--", name)
            assert done.exit_code == 0, (name, done.output)
            harmless(done.output)
        for name in (n + "\x1b[31m" for n in names):
            harmless(run("--socket", path, "explain", "--", name).output)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=()), min_size=1, max_size=20))
def test_any_name_can_be_listed_and_explained(name: str) -> None:
    with agent(snapshots.hostile((name,))) as path:
        listed = run("--socket", path, "--json", "tenants")
        shown = json.loads(listed.stdout)["items"][0]["name"]
        harmless(run("--socket", path, "tenants").output)
        done = run("--socket", path, "explain", "--", shown)
    harmless(done.output)
    assert done.exit_code == 0 or not shown.strip(".")


# -- where the socket is -----------------------------------------------------------------------------------


def test_the_socket_is_found_through_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "gpuagent.toml"
    with agent(snapshots.busy()) as path:
        file.write_text(f'[paths]\nsocket = "{path}"\n')
        assert run("--config", str(file), "status").exit_code == 0
        by_environment = CliRunner().invoke(cli, ["status"], env={"GPUAGENT_SOCKET": path})
        assert by_environment.exit_code == 0


@pytest.mark.parametrize("text", ["", "# socket = 7\n", "paths = 1\n", "broken [", "\xff"])
def test_a_configuration_that_says_nothing_of_a_socket(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gpuagent.toml"
    file.write_text(text, encoding="latin-1")
    done = run("--config", str(file), "status")
    assert done.exit_code == Exit.UNREACHABLE
    assert "/run/gpuagent/gpuagent.sock" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        '[paths]\nsocket = "{}"\nbroken [',
        "\xff\npaths . socket = '{}'\n",
        'x = 1\nx = 2\nsocket="{}"',
    ],
)
def test_a_broken_configuration_keeps_nobody_from_pausing(tmp_path: Path, text: str) -> None:
    file, commands = tmp_path / "gpuagent.toml", Commands()
    with agent(snapshots.busy(), commands) as path:
        file.write_text(text.format(path), encoding="latin-1")
        assert run("--config", str(file), "pause").exit_code == 0
    assert [type(c) for c in commands.seen] == [Pause]


@pytest.mark.parametrize(
    "text",
    ['[paths]\nsocket = "/run/half\n', "[paths]\nsocket = 7\n", 'paths = {socket="/a"', None],
)
def test_a_socket_that_cannot_be_made_out_is_asked_for(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "gpuagent.toml"
    if text is not None:
        file.write_text(text)
    done = run("--config", str(file), "pause")
    assert done.exit_code == Exit.USAGE
    assert str(file) in done.stderr
    assert "--socket" in done.stderr
    with agent(snapshots.busy()) as path:
        assert run("--config", str(file), "--socket", path, "status").exit_code == 0


def test_a_failure_under_json_is_json_on_standard_error(tmp_path: Path) -> None:
    nobody = str(tmp_path / "none\x7f")
    done = run("--socket", nobody, "status", "--json")
    assert (done.exit_code, done.stdout) == (Exit.UNREACHABLE, "")
    error = json.loads(done.stderr)["error"]
    assert error["exit_code"] == Exit.UNREACHABLE
    assert nobody in error["detail"]
    assert "--socket" in error["remedy"]
    assert "\x7f" not in done.stderr
    with agent(snapshots.busy()) as path:
        done = run("--json", "--socket", path, "explain", "nobody")
    assert json.loads(done.stderr)["error"]["exit_code"] == Exit.UNKNOWN_TENANT


# -- config check ------------------------------------------------------------------------------------------


def test_config_check_of_a_valid_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('mode = "observe"\n')
    done = run("config", "check", str(file), columns=400)
    assert (done.exit_code, done.stdout) == (0, f"{file} is valid\n")
    as_json = run("config", "check", "--json", str(file))
    assert json.loads(as_json.stdout)["valid"] is True


def test_config_check_names_every_problem_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('mod = "observe"\n[power]\nbudget = "many"\n')
    done = run("config", "check", "--config", str(file))
    assert done.exit_code == Exit.USAGE
    assert f"{file}:1: " in done.stderr
    assert f"{file}:3: " in done.stderr
    assert done.stdout == ""
    as_json = run("--json", "config", "check", str(file))
    assert as_json.exit_code == Exit.USAGE
    assert len(json.loads(as_json.stdout)["problems"]) == 2


# -- as a process ------------------------------------------------------------------------------------------


def spawn(*words: str, **more: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "gpuagent", *words],
        capture_output=True,
        env={**os.environ, **more},
        timeout=60,
        check=False,
    )


def test_the_process_ends_with_the_documented_codes() -> None:
    with agent(snapshots.hostile()) as path:
        good = spawn(
            "--socket", path, "tenants", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
        )
        unknown = spawn("--socket", path, "explain", "nobody")
    assert (good.returncode, good.stderr) == (0, b"")
    assert good.stdout.isascii()
    assert b"\x1b" not in good.stdout
    assert unknown.returncode == Exit.UNKNOWN_TENANT
    assert unknown.stdout == b""


def test_the_version_is_told() -> None:
    done = run("--version")
    assert done.exit_code == 0
    assert done.stdout.startswith("gpuagent, version ")


def test_reading_commands_do_not_load_the_daemon() -> None:
    look = (
        "import sys, gpuagent.cli.main as m, click\n"
        "m.cli.get_command(click.Context(m.cli), 'status')\n"
        "print(sorted({'aiohttp', 'pyroute2', 'pynvml', 'rich', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.replace("'", '"'))
    assert "aiohttp" not in loaded
    assert "pynvml" not in loaded
