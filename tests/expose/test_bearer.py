"""Who asks over TCP: what is taken for a token, and what guessing costs whom."""

import asyncio
import base64
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.expose.allowance import Allowance
from gpuagent.expose.bearer import Bearers, NoTokens, Unauthenticated, presented
from gpuagent.expose.door import CONNECTIONS_TCP, Anyone
from gpuagent.tokens import TokenBook
from tests.expose import snapshots
from tests.expose.scene import Reply, Scene, StillClock, ask_loopback, serving
from tests.tokens import issued


def _basic(pair: str) -> str:
    return "Basic " + base64.b64encode(pair.encode()).decode()


@pytest.mark.parametrize(
    ("headers", "basic", "text"),
    [
        (["Bearer abc"], False, "abc"),
        (["bEARER   abc "], False, "abc"),
        ([_basic("user:abc")], True, "abc"),
        ([_basic(":a:b")], True, "a:b"),
        ([_basic("user:abc")], False, None),
        ([], True, None),
        (["Bearer"], True, None),
        (["Bearer "], True, None),
        (["abc"], True, None),
        (["Bearer abc", "Bearer abc"], True, None),
        (["Bearer " + "a" * 257], True, None),
        ([_basic("user:")], True, None),
        ([_basic("no colon")], True, None),
        (["Basic !!!"], True, None),
        (["Basic /w=="], True, None),
        (["Basic \udcff"], True, None),
        (["Digest abc"], True, None),
    ],
)
def test_what_is_presented(headers: list[str], basic: bool, text: str | None) -> None:
    assert presented(headers, basic=basic) == text


@given(
    st.lists(
        st.one_of(
            st.text(max_size=40),
            st.text(max_size=40).map(lambda t: f"Bearer {t}"),
            st.text(max_size=40).map(lambda t: f"Basic {t}"),
            st.binary(max_size=40).map(lambda b: "Basic " + base64.b64encode(b).decode()),
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_any_header_is_a_text_or_none(headers: list[str], basic: bool) -> None:
    text = presented(headers, basic=basic)
    assert text is None or 0 < len(text) <= 256
    assert NoTokens().known(text or "") is None


async def test_the_first_failures_are_answered_at_once_and_more_of_them_wait() -> None:
    clock = StillClock()
    bearers = Bearers(NoTokens(), clock=clock, door=Anyone())
    request = make_mocked_request("GET", "/v1/plan", headers={"Authorization": "Bearer x"})
    pauses = []
    for _ in range(40):
        with pytest.raises(Unauthenticated) as caught:
            bearers.peer_of(request)
        pauses.append(caught.value.pause_seconds)
    assert pauses == [0.0] * 16 + [1.0] * 24


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60))
def test_an_allowance_is_never_exceeded(steps: list[float]) -> None:
    allowance = Allowance(burst=5, per_second=2.0)
    now, taken = 0.0, 0
    for step in steps:
        now += step
        taken += allowance.take(now)
        assert taken <= 5 + 2 * now + 1e-6


def test_a_clock_that_stands_gives_the_burst_and_no_more() -> None:
    allowance = Allowance(burst=3, per_second=1.0)
    assert [allowance.take(7.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not allowance.take(6.0), "and one that is set back gives nothing"
    assert allowance.take(8.0)


class Waiting(StillClock):
    """A clock that keeps everybody who sleeps, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = 0
        self.wake = asyncio.Event()
        self._came = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.asleep += 1
        self._came.set()
        await self.wake.wait()

    async def until_asleep(self, count: int) -> None:
        while self.asleep < count:
            self._came.clear()
            await self._came.wait()


async def test_guesses_that_wait_keep_nobody_out(tmp_path: Path) -> None:
    """However many there are: each holds a connection, and they make room for whoever comes."""
    scene = Scene(snapshots.busy())
    scene.clock = clock = Waiting()
    book = TokenBook(str(tmp_path), clock)
    text = await issued(book, clock, "read")
    guess = b"GET /v1/plan HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n"
    async with serving(scene, tokens=book) as (server, _):
        assert server.metrics_port is not None
        guessers = []
        for _ in range(3 * CONNECTIONS_TCP):
            _, writer = await asyncio.open_connection("127.0.0.1", server.metrics_port)
            writer.write(guess)
            guessers.append(writer)
        async with asyncio.timeout(20):
            await clock.until_asleep(CONNECTIONS_TCP)
        right = f"Host: localhost\r\nAuthorization: Bearer {text}\r\n"
        reply = await ask_loopback(server.metrics_port, "/v1/plan", headers=right)
        assert reply.status == 200
        assert (await ask_loopback(server.metrics_port, "/healthz")).status == 200
        clock.wake.set()
        for writer in guessers:
            writer.close()


async def test_a_guess_ends_its_connection() -> None:
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", server.metrics_port)
        one = b"GET /v1/plan HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n"
        writer.write(one * 50)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1 401") == 1
    assert Reply(answer).json["detail"] == "this needs a valid token"


async def test_a_refused_token_is_in_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    secret = "gpa_00000000_" + "S" * 43
    async with serving(Scene(snapshots.busy())) as (server, _):
        assert server.metrics_port is not None
        for _ in range(5):
            headers = f"Host: localhost\r\nAuthorization: Bearer {secret}\r\n"
            await ask_loopback(server.metrics_port, "/v1/plan", headers=headers)
    said = capfd.readouterr()
    assert "SSSS" not in said.out + said.err
    assert (said.out + said.err).count("a token was refused") == 1, "once, not each time"
