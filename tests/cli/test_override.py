"""`gpuagent override`: what it sends, what it prints, and how it ends."""

import json

import pytest

from gpuagent.cli.exits import Exit
from gpuagent.errors import Gone
from gpuagent.model.inventory import on_gpu, on_tenant
from gpuagent.model.plan import DropOverride, SetOverride
from tests.cli.stage import agent, run
from tests.expose import snapshots
from tests.expose.scene import Commands
from tests.expose.snapshots import GPU0
from tests.expose.test_overrides import lease, with_leases

FOR = ("--for", "2h", "--why", "a demo")


def test_quantities_are_as_in_the_configuration() -> None:
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        one = run(
            "--socket", path, "override", "set", "q", "--tenant", "train", "--share", "50%", *FOR
        )
        two = run("--socket", path, "override", "set", "c", "--gpu", "0", "--power", "0.3kW", *FOR)
        three = run(
            "--socket", path, "override", "set", "c", "--gpu", GPU0, "--power", "300W", *FOR
        )
        gone = run("--socket", path, "--json", "override", "drop", "q")
    assert [r.exit_code for r in (one, two, three, gone)] == [0, 0, 0, 0], one.output
    assert one.stdout == "done as you wished\n"
    assert json.loads(gone.stdout) == {"done": "done as you wished"}
    *asked, dropped = commands.seen
    sets = [c.override for c in asked if isinstance(c, SetOverride)]
    assert [(o.subject, o.value, o.ttl_seconds) for o in sets] == [
        (on_tenant("train"), 0.5, 7200.0),
        (on_gpu(GPU0), 300.0, 7200.0),
        (on_gpu(GPU0), 300.0, 7200.0),
    ]
    assert isinstance(dropped, DropOverride)
    assert dropped.id == "q"


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--tenant", "nobody", "--share", "50%"), Exit.UNKNOWN_TENANT, 'no tenant "nobody"'),
        (("--tenant", "serve", "--share", "50%"), Exit.REFUSED, "serve is L1"),
        (("--tenant", "train", "--share", "10%"), Exit.USAGE, "below the floor"),
        (("--tenant", "train", "--share", "ten"), Exit.USAGE, "is not a share"),
        (("--gpu", "9", "--power", "300W"), Exit.PROBLEM, "no card with the index 9"),
        (("--gpu", GPU0, "--power", "300"), Exit.USAGE, "is not a power"),
        (("--gpu", GPU0, "--share", "50%"), Exit.USAGE, "--gpu with --power"),
        ((), Exit.USAGE, "--tenant with --share"),
    ],
)
def test_how_a_refusal_ends(words: tuple[str, ...], code: Exit, reason: str) -> None:
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        done = run("--socket", path, "override", "set", "q", *words, *FOR)
    assert (done.exit_code, commands.seen) == (code, [])
    assert reason in done.stderr


def test_the_list_says_what_is_left_and_what_came_of_it() -> None:
    leases = (lease("quiet"), lease("cool", on=on_gpu(GPU0), value=300.0))
    with agent(with_leases(*leases)) as path:
        rows = run("--socket", path, "override", "list", columns=200).stdout
        items = json.loads(run("--socket", path, "override", "list", "--json").stdout)["items"]
        text = " ".join(run("--socket", path, "explain", "train").stdout.split())
    assert "quiet" in rows
    assert "50 %" in rows
    assert "300 W" in rows
    assert "10 min" in rows
    assert [x["name"] for x in items] == ["quiet", "cool"]
    assert "quiet: to 50 %, for 10 min more, by user 0: a demo" in text


def test_no_overrides_and_none_of_a_name() -> None:
    commands = Commands()
    commands.answer = Gone("there is no override 'x'")
    with agent(snapshots.busy(), commands) as path:
        assert run("--socket", path, "override", "list").stdout == "There are no overrides.\n"
        done = run("--socket", path, "override", "drop", "x")
    assert done.exit_code == Exit.PROBLEM
    assert "there is no override 'x'" in done.stderr
