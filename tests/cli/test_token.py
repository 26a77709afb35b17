"""`gpuagent token`: against a real server and a real book of tokens."""

import json
import re
from pathlib import Path

import pytest

from gpuagent.cli.exits import Exit
from gpuagent.errors import Gone, Refused
from gpuagent.expose.access import Access
from gpuagent.model.plan import IssueToken, RevokeToken
from gpuagent.model.token import Token, digest
from tests.cli.stage import agent, run
from tests.expose import snapshots
from tests.expose.scene import Commands, Scene


def test_issuing_prints_the_secret_alone_and_hands_in_a_hash() -> None:
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        done = run(
            *("--socket", path, "token", "issue", "--scope", "read", "--scope", "latency:chat"),
            *("--expires", "30d", "--note", "Grafana"),
        )
    assert done.exit_code == Exit.OK, done.output
    text = done.stdout.strip()
    assert re.fullmatch("gpa_[0-9a-f]{8}_[A-Za-z0-9_-]{43}", text)
    assert "not shown again" in done.stderr
    assert text not in done.stderr
    [command] = commands.seen
    assert isinstance(command, IssueToken)
    assert command.digest == digest(text)
    assert text.split("_", 2)[2] not in str(command)
    assert command.token.scopes == ("read", "latency:chat")
    assert command.token.note == "Grafana"
    assert command.token.expires_wall == snapshots.WALL + 30 * 86400


def test_issuing_as_json() -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, "token", "issue", "--scope=admin", "--expires=1h", "--json")
    issued = json.loads(done.stdout)
    assert issued["token"].split("_")[1] == issued["id"]
    assert issued["scopes"] == ["admin"]
    assert issued["expires_at"] == snapshots.WALL + 3600


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--scope", "root", "--expires", "1h"), Exit.USAGE),
        (("--scope", "latency:", "--expires", "1h"), Exit.USAGE),
        (("--scope", "read", "--expires", "11000d"), Exit.USAGE),
        (("--scope", "read", "--expires", "0s"), Exit.USAGE),
        (("--scope", "read", "--expires", "soon"), Exit.USAGE),
        (("--scope", "read"), Exit.USAGE),
        (("--expires", "1h"), Exit.USAGE),
        (("--scope", "read", "--expires", "1h", "--note", "x" * 201), Exit.USAGE),
    ],
)
def test_what_makes_no_token(words: tuple[str, ...], code: Exit) -> None:
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        done = run("--socket", path, "token", "issue", *words)
    assert done.exit_code == code, done.output
    assert commands.seen == []


def test_what_is_no_scope_is_answered_with_the_scopes() -> None:
    done = run("token", "issue", "--scope", "root", "--expires", "1h", columns=200)
    assert done.exit_code == Exit.USAGE
    assert "'root': a scope is read, metrics, latency:TENANT, override or admin" in done.stderr


def test_a_token_for_a_tenant_that_nobody_knows_is_issued_with_a_warning() -> None:
    with agent(snapshots.busy()) as path:
        words = ("--socket", path, "token", "issue", "--expires", "1h", "--scope")
        unknown, known = run(*words, "latency:nobody"), run(*words, "latency:train")
    assert unknown.exit_code == known.exit_code == Exit.OK
    assert "warning: no tenant nobody runs here" in unknown.stderr
    assert "warning" not in known.stderr


def test_a_book_that_declines_and_one_that_knows_no_such_token() -> None:
    commands = Commands()
    commands.answer = Refused("256 tokens are valid already")
    with agent(snapshots.busy(), commands) as path:
        done = run("--socket", path, "token", "issue", "--scope=read", "--expires=1h")
        assert done.exit_code == Exit.REFUSED
        assert done.stdout == ""
        commands.answer = Gone("there is no valid token 'x'")
        done = run("--socket", path, "token", "revoke", "x")
    assert done.exit_code == Exit.PROBLEM
    assert "no valid token" in done.stderr


def test_revoking_hands_in_the_id() -> None:
    commands = Commands()
    with agent(snapshots.busy(), commands) as path:
        done = run("--socket", path, "token", "revoke", "0badcafe")
        hostile = run("--socket", path, "token", "revoke", "../pause")
    assert (done.exit_code, hostile.exit_code) == (Exit.OK, Exit.OK)
    assert [c.id for c in commands.seen if isinstance(c, RevokeToken)] == ["0badcafe", "../pause"]


def test_the_list_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Token(
        id="0badcafe",
        scopes=("read", "metrics"),
        note="a \x1b[2J note",
        by="user 0",
        issued_wall=snapshots.WALL,
        expires_wall=snapshots.WALL + 86400,
    )
    with agent(snapshots.busy()) as path:
        assert "No token is valid" in run("--socket", path, "token", "list").output
    monkeypatch.setattr(Scene, "access", lambda _: Access(tokens=(held,)))
    with agent(snapshots.busy()) as path:
        shown = run("--socket", path, "token", "list", columns=120).output
        listed = json.loads(run("--socket", path, "token", "list", "--json").output)
    assert "0badcafe" in shown
    assert "\x1b" not in shown
    assert set(listed["items"][0]) == {
        *("id", "scopes", "note", "issued_by", "issued_at", "expires_at"),
    }


def test_nobody_listens(tmp_path: Path) -> None:
    done = run("--socket", str(tmp_path / "none"), "token", "list")
    assert done.exit_code == Exit.UNREACHABLE
