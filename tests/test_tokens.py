"""The book of tokens: what makes one valid, what ends it, and what its file can look like."""

import asyncio
import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.state import Instant
from gpuagent.model.token import digest, id_in, scope_trouble, spelled, tenant_of
from gpuagent.tokens import TOKENS_MOST, TokenBook
from tests.tokens import issued, token

START = Instant(mono=1000.0, wall=1_800_000_000.0)


class Clock:
    """Shows what the test set."""

    def __init__(self) -> None:
        self.instant = START

    def now(self) -> Instant:
        return self.instant

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")

    def goes(self, seconds: float, *, wall_too: float = 0.0) -> None:
        """Time passes; `wall_too` is by how much somebody sets the wall clock meanwhile."""
        now = self.instant
        self.instant = Instant(now.mono + seconds, now.wall + seconds + wall_too)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(tmp_path: Path, clock: Clock) -> TokenBook:
    return TokenBook(str(tmp_path), clock)


def file_of(folder: Path) -> Path:
    return folder / "tokens.json"


async def test_a_token_is_valid_until_it_ends(book: TokenBook, clock: Clock) -> None:
    text = await issued(book, clock, "read", "latency:chat", seconds=60)
    known = book.known(text)
    assert known is not None
    assert known.scopes == ("read", "latency:chat")
    assert book.listed() == (known,)
    clock.goes(59.9)
    assert book.known(text) is not None
    clock.goes(0.1)
    assert book.known(text) is None
    assert book.listed() == ()


@pytest.mark.parametrize("set_back", [-1e9, -3600.0, -1.0])
async def test_a_clock_set_back_makes_nothing_valid_again(
    book: TokenBook, clock: Clock, set_back: float
) -> None:
    text = await issued(book, clock, seconds=60)
    clock.goes(61, wall_too=set_back)
    assert book.known(text) is None, "by the monotonic clock it has ended"
    other = await issued(book, clock, seconds=60)
    clock.goes(1, wall_too=100)
    assert book.known(other) is None, "by the wall clock it has ended"
    clock.goes(1, wall_too=-100)
    assert book.known(other) is None, "and stays so when that is set back"


async def test_a_clock_that_was_wrong_for_a_moment_costs_no_token_for_good(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    text = await issued(book, clock, seconds=3600)
    clock.goes(1, wall_too=400 * 86400)
    assert book.known(text) is None
    clock.goes(1, wall_too=-400 * 86400)
    await issued(book, clock, seconds=60)
    assert TokenBook(str(tmp_path), clock).known(text) is not None, "after a restart"
    await book.revoke(id_in(text))
    assert TokenBook(str(tmp_path), clock).known(text) is None


async def test_what_is_over_by_every_clock_leaves_the_file(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    text = await issued(book, clock, seconds=60)
    clock.goes(61)
    await issued(book, clock, seconds=60)
    assert id_in(text) not in file_of(tmp_path).read_text()


async def test_doubtful_tokens_leave_room_for_valid_ones(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    for _ in range(TOKENS_MOST):
        await issued(book, clock, seconds=3600)
    clock.goes(1, wall_too=400 * 86400)
    assert book.listed() == ()
    text = await issued(book, clock, seconds=3600)
    again = TokenBook(str(tmp_path), clock)
    assert not again.trouble
    assert again.known(text) is not None


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(-500, 500)), max_size=12))
def test_whatever_the_clocks_do_what_has_ended_stays_so(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    book = TokenBook("/nonexistent", clock)
    text = spelled("00000000", b"\0" * 32)
    book._take(_entries(token("00000000", clock, seconds=100), digest(text)))
    was = True
    for passed, wall_too in steps:
        clock.goes(passed, wall_too=wall_too)
        valid = book.known(text) is not None
        assert was or not valid
        assert not valid or clock.instant.mono - START.mono < 100
        was = valid


def _entries(one: Any, kept: str) -> Any:
    from gpuagent.tokens import _Entry

    return (_Entry(one, kept),)


async def test_tokens_outlive_the_run_and_secrets_are_nowhere(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    text = await issued(book, clock, "admin", seconds=60)
    again = TokenBook(str(tmp_path), clock)
    assert again.known(text) == book.known(text) is not None
    held = file_of(tmp_path).read_text()
    secret = text.split("_", 2)[2]
    assert secret not in held
    assert digest(text) in held
    assert secret not in str(again.listed())
    assert digest(text) not in str(again.listed())
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o600


async def test_of_a_valid_token_any_other_secret_is_none(book: TokenBook, clock: Clock) -> None:
    text = await issued(book, clock)
    assert re.fullmatch("gpa_[0-9a-f]{8}_[A-Za-z0-9_-]{43}", text)
    for other in (
        "",
        "gpa_",
        text[:-1],
        text + "A",
        text[:13],
        text.upper(),
        f" {text}",
        text + "\n",
    ):
        assert book.known(other) is None, other
    twin = spelled(id_in(text), b"\1" * 32)
    assert book.known(twin) is None


async def test_revoked_is_revoked_at_once_and_for_good(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    text = await issued(book, clock)
    assert "revoked" in await book.revoke(id_in(text))
    assert book.known(text) is None
    assert TokenBook(str(tmp_path), clock).known(text) is None
    with pytest.raises(Gone, match="token list"):
        await book.revoke(id_in(text))


async def test_a_full_disk_issues_nothing_and_revokes_all_the_same(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    text = await issued(book, clock)
    (tmp_path / "tokens.json.new").mkdir()  # nothing can be written there any more
    with pytest.raises(Unavailable, match="cannot be kept"):
        await issued(book, clock)
    assert len(book.listed()) == 1
    with pytest.raises(Unavailable, match="a restart may make it valid again"):
        await book.revoke(id_in(text))
    assert book.known(text) is None


async def test_a_second_revocation_writes_again_until_the_file_agrees(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    text = await issued(book, clock)
    blocked = tmp_path / "tokens.json.new"
    blocked.mkdir()
    for _ in range(2):
        with pytest.raises(Unavailable, match="revoked, but"):
            await book.revoke(id_in(text))
        assert "cannot be written" in book.unsaved
    with pytest.raises(Gone):
        await book.revoke("00000000")
    blocked.rmdir()
    assert "is revoked" in await book.revoke(id_in(text))
    assert book.unsaved == ""
    assert TokenBook(str(tmp_path), clock).known(text) is None
    with pytest.raises(Gone):
        await book.revoke(id_in(text))


async def test_one_that_was_revoked_on_a_full_disk_is_gone_after_a_clean_stop(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    text = await issued(book, clock)
    blocked = tmp_path / "tokens.json.new"
    blocked.mkdir()
    with pytest.raises(Unavailable):
        await book.revoke(id_in(text))
    blocked.rmdir()
    await book.close()
    assert TokenBook(str(tmp_path), clock).known(text) is None


async def test_they_are_bounded_and_those_that_have_ended_make_room(
    book: TokenBook, clock: Clock, tmp_path: Path
) -> None:
    made = [token(f"{n:08x}", clock, seconds=60) for n in range(TOKENS_MOST)]
    book._take(tuple(e for t in made for e in _entries(t, "0" * 64)))
    with pytest.raises(Refused, match="revoke one"):
        await issued(book, clock)
    clock.goes(60)
    text = await issued(book, clock)
    assert [t.id for t in book.listed()] == [id_in(text)]
    assert len(json.loads(file_of(tmp_path).read_text())["tokens"]) == 1


async def test_an_id_that_is_taken_is_refused(book: TokenBook, clock: Clock) -> None:
    text = await issued(book, clock)
    with pytest.raises(Refused, match="ask again"):
        await book.issue(token(id_in(text), clock), "0" * 64)
    assert book.known(text) is not None


async def test_several_at_once_are_all_kept(book: TokenBook, clock: Clock, tmp_path: Path) -> None:
    texts = await asyncio.gather(*(issued(book, clock) for _ in range(8)))
    again = TokenBook(str(tmp_path), clock)
    assert all(again.known(text) for text in texts)


# -- a file that cannot be trusted ---------------------------------------------------------------------------


async def good(folder: Path, clock: Clock) -> tuple[str, bytes]:
    text = await issued(TokenBook(str(folder), clock), clock, seconds=60)
    return text, file_of(folder).read_bytes()


def _changed(held: bytes, **fields: Any) -> bytes:
    document = json.loads(held)
    document["tokens"][0]["token"].update(fields)
    return json.dumps(document).encode()


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda held: held[: len(held) // 2],
    "empty": lambda _: b"",
    "no-object": lambda _: b"[]",
    "no-text": lambda _: b'{"version":1,"tokens":[\xff\xfe]}',
    "deep": lambda _: b"[" * 100_000,
    "later": lambda held: held.replace(b'"version":1', b'"version":2'),
    "scope": lambda held: _changed(held, scopes=["everything"]),
    "no-scope": lambda held: _changed(held, scopes=[]),
    "infinite": lambda held: held.replace(b'"expires_wall":1800000060.0', b'"expires_wall":1e999'),
    "twice": lambda held: json.dumps(
        {"version": 1, "tokens": json.loads(held)["tokens"] * 2}
    ).encode(),
    "too-many": lambda held: json.dumps(
        {"version": 1, "tokens": json.loads(held)["tokens"] * (TOKENS_MOST + 1)}
    ).encode(),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_damaged_file_makes_no_token_valid_and_stays_as_it_is(
    how: str, clock: Clock, tmp_path: Path
) -> None:
    text, held = await good(tmp_path, clock)
    damaged = BROKEN[how](held)
    assert damaged != held
    file_of(tmp_path).write_bytes(damaged)
    book = TokenBook(str(tmp_path), clock)
    assert "no token is valid" in book.trouble
    assert str(file_of(tmp_path)) in book.trouble
    assert book.known(text) is None
    assert book.listed() == ()
    with pytest.raises(Refused, match="gpuagent reload"):
        await issued(book, clock)
    assert file_of(tmp_path).read_bytes() == damaged
    file_of(tmp_path).write_bytes(held)
    await book.reread()
    assert book.trouble == ""
    assert book.known(text) is not None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
async def test_a_file_that_others_can_write_gives_no_rights(
    mode: int, clock: Clock, tmp_path: Path
) -> None:
    text, _ = await good(tmp_path, clock)
    file_of(tmp_path).chmod(mode)
    book = TokenBook(str(tmp_path), clock)
    assert "others can write it" in book.trouble
    assert book.known(text) is None


async def test_what_is_no_file_gives_no_rights_and_holds_up_nobody(
    clock: Clock, tmp_path: Path
) -> None:
    os.mkfifo(file_of(tmp_path))
    assert "no regular file" in TokenBook(str(tmp_path), clock).trouble
    file_of(tmp_path).unlink()
    file_of(tmp_path).symlink_to("/etc/passwd")
    assert "cannot be opened" in TokenBook(str(tmp_path), clock).trouble
    file_of(tmp_path).unlink()
    file_of(tmp_path).mkdir()
    assert "no regular file" in TokenBook(str(tmp_path), clock).trouble


_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@_ONE_FOLDER
@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["version", "tokens", "token", "digest", "id"]), inner
                )
            ),
            max_leaves=10,
        ).map(lambda v: json.dumps(v).encode()),
    )
)
def test_any_file_is_read_or_refused(tmp_path: Path, held: bytes) -> None:
    file_of(tmp_path).write_bytes(held)
    file_of(tmp_path).chmod(0o600)
    book = TokenBook(str(tmp_path), Clock())
    assert book.listed() == () or not book.trouble
    assert all(math.isfinite(t.expires_wall) for t in book.listed())


# -- scopes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope", ["read", "metrics", "override", "admin", "latency:a b", "latency:é"]
)
def test_scopes(scope: str) -> None:
    assert scope_trouble(scope) == ""


@pytest.mark.parametrize(
    "scope",
    [
        "",
        "Read",
        "read ",
        "read\n",
        "root",
        "latency",
        "latency:",
        "latency:a\nb",
        "latency:\x1b[2J",
        "latency:" + "a" * 300,
    ],
)
def test_what_is_no_scope(scope: str) -> None:
    assert scope_trouble(scope)


@given(st.text(max_size=30))
def test_any_text_is_a_scope_or_is_told_why_not(text: str) -> None:
    if not scope_trouble(text):
        assert text in {"read", "metrics", "override", "admin"} or tenant_of(text)
        assert text.isprintable()


@given(st.binary(min_size=32, max_size=32))
def test_a_text_names_its_id(secret: bytes) -> None:
    text = spelled("0badcafe", secret)
    assert id_in(text) == "0badcafe"
    assert len(text) == 56
    assert re.fullmatch("[0-9a-f]{64}", digest(text))


@given(st.text(max_size=80))
def test_any_text_has_a_digest_and_mostly_no_id(text: str) -> None:
    assert len(digest(text)) == 64
    assert id_in(text) == "" or text.startswith("gpa_")


def test_a_token_shows_no_hash() -> None:
    fields = set(token("00000000", Clock()).__struct_fields__)
    assert fields == {"id", "scopes", "note", "by", "issued_wall", "expires_wall"}
