"""`gpuagent check` and `restore`, which need no agent."""

import json
from pathlib import Path

from gpuagent.cli.check import needs
from gpuagent.cli.exits import Exit
from gpuagent.config import Config
from tests.cli.stage import run


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "gpuagent.toml"
    file.write_text(text)
    return str(file)


def test_enforcing_needs_more_than_observing() -> None:
    assert needs(Config()) < needs(Config(mode="enforce"))


def test_check_names_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        'mode = "enforce"\n[paths]\n'
        f'nvml_library = "{tmp_path}/no-such-library.so"\n'
        f'cgroup_root = "{tmp_path}"\n',
    )
    done = run("check", "--config", config)
    assert done.exit_code == Exit.PROBLEM, done.output
    assert "missing  NVML (needed)" in done.stdout
    assert "missing  cgroup v2 (needed)" in done.stdout
    assert "Needed and not there: NVML, cgroup v2." in done.stdout
    assert "Debian" in done.stdout
    assert "RHEL" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 80


def test_check_as_json(tmp_path: Path) -> None:
    config = write(tmp_path, f'[paths]\nnvml_library = "{tmp_path}/none.so"\n')
    done = run("check", "--json", "--config", config)
    document = json.loads(done.stdout)
    assert document["ok"] is False
    assert done.exit_code == Exit.PROBLEM
    offers = {o["name"]: o for o in document["offers"]}
    assert offers["NVML"]["needed"] is True
    assert offers["cgroup v2"]["needed"] is False
    assert {o["state"] for o in document["offers"]} <= {"ok", "partial", "missing"}


def test_check_of_an_invalid_configuration(tmp_path: Path) -> None:
    done = run("check", "--config", write(tmp_path, "mod = 1\n"))
    assert done.exit_code == Exit.USAGE
    assert ":1: " in done.stderr


def test_config_check_warns_of_what_does_nothing(tmp_path: Path) -> None:
    text = '[[tenants]]\nname = "a"\nsla = "L1"\nmatch.user = "a"\nlevers = ["cpu_max"]\n'
    file = write(tmp_path, text)
    done = run("config", "check", file)
    assert done.exit_code == Exit.OK
    told = f"{file}:5: tenants[0].levers: L1 is never held back, so this does nothing"
    assert f"warning: {told}" in done.stderr
    assert json.loads(run("config", "check", "--json", file).stdout)["warnings"] == [told]


def test_restore_with_nothing_to_put_back(tmp_path: Path) -> None:
    config = write(
        tmp_path, f'[paths]\nstate_dir = "{tmp_path}/state"\ncgroup_root = "{tmp_path}"\n'
    )
    done = run("restore", "--config", config)
    assert done.exit_code == 0, done.output
    assert "Nothing" in done.stdout
    as_json = run("restore", "--rescue", "--json", "--config", config)
    assert json.loads(as_json.stdout) == {"items": []}


def test_restore_without_a_configuration_says_that_first(tmp_path: Path) -> None:
    done = run("restore", "--config", str(tmp_path / "none.toml"))
    assert done.exit_code == Exit.REFUSED, done.output
    first, *rest = done.stderr.splitlines()
    assert "none.toml: no such file" in first
    assert "--config" in rest[-1]


def test_restore_in_a_state_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    config = write(tmp_path, f'[paths]\nstate_dir = "{tmp_path}/state"\n')
    done = run("restore", "--config", config)
    assert done.exit_code == Exit.REFUSED, done.output
    assert str(tmp_path / "state") in done.stderr


def test_daemon_with_an_invalid_configuration(tmp_path: Path) -> None:
    done = run("daemon", "--config", write(tmp_path, "mod = 1\ntick = 'soon'\n"))
    assert done.exit_code == Exit.USAGE
    assert ":1: " in done.stderr
    assert ":2: " in done.stderr
