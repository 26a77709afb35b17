"""Events over a real socket: resumed, bounded, filtered, and in nobody's way."""

import asyncio
import contextlib
import json
import os
import select
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import structlog
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.expose import stream
from gpuagent.expose.auth import Peer
from gpuagent.expose.door import CONNECTIONS_PER_USER, CONNECTIONS_TCP
from gpuagent.expose.gate import Gate
from gpuagent.expose.problems import Trouble
from gpuagent.expose.stream import (
    BEHIND_MOST,
    MEDIA_TYPE,
    PATH,
    STREAMS,
    STREAMS_PER_PEER,
    Frames,
    Streams,
    frame,
)
from gpuagent.host.notify import Notify
from gpuagent.model.inventory import Subject, on_gpu, on_tenant
from gpuagent.model.state import Event
from gpuagent.publish import EVENTS_KEPT, Publisher
from tests.expose import snapshots
from tests.expose.scene import Reply, Scene, ask, serving

ADMIN = Peer(label="user 0", admin=True)
OWNER = Peer(label="user 1000", tenants=frozenset({"train"}))


class Stage(Scene):
    """A scene whose snapshots come from a real publisher, with events as the test makes them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.publisher = Publisher(Notify())
        self._bare = msgspec.structs.replace(snapshots.busy(), events=(), holds=())
        self.tell(0)

    def tell(
        self,
        count: int,
        *,
        about: Subject | None = None,
        text: str = "event",
        kind: str = "",
    ) -> None:
        """One pass of the loop with so many events; those about somebody are for their own user too."""
        kind = kind or ("test" if about is None else "share-cut")
        events = tuple(
            Event(kind, snapshots.MONO, f"{text} {n}", about) for n in range(1, count + 1)
        )
        with structlog.testing.capture_logs():
            self.publisher.publish(msgspec.structs.replace(self._bare, events=events))
        self.show(self.publisher.latest())

    @property
    def run(self) -> str:
        assert self.snapshot is not None
        return self.snapshot.run


class Ended(Exception):
    """The server has ended the stream in order."""


class Listener:
    """A reader of a stream, as a browser would be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.headers: dict[str, str] = {}
        self.status = 0
        self._text = b""
        self._chunks = b""

    async def begin(self) -> None:
        head = await self.reader.readuntil(b"\r\n\r\n")
        reply = Reply(head)
        self.status, self.headers = reply.status, reply.headers

    async def event(self) -> dict[str, str]:
        """The next event; comments are left out. Raises Ended at the end of the stream."""
        while True:
            block = await self.block()
            fields = dict(x.split(": ", 1) for x in block.split("\n") if x and x[0] != ":")
            if "data" in fields:
                return fields

    async def events(self, count: int) -> list[dict[str, str]]:
        return [await self.event() for _ in range(count)]

    async def block(self) -> str:
        """What stands before the next empty line."""
        async with asyncio.timeout(20):
            while b"\n\n" not in self._text:
                await self._more()
        block, _, self._text = self._text.partition(b"\n\n")
        return block.decode("ascii")

    async def _more(self) -> None:
        size = int(await self.reader.readline(), 16)
        if size == 0:
            raise Ended
        self._text += await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"

    async def rest(self) -> list[dict[str, str]]:
        """All that comes until the server ends it in order."""
        found = []
        with contextlib.suppress(Ended):
            while True:
                found.append(await self.event())
        return found


@contextlib.asynccontextmanager
async def listening(path: str, query: str = "", headers: str = "") -> AsyncIterator[Listener]:
    """A stream that has begun, or has been refused."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(f"GET {PATH}{query} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        listener = Listener(reader, writer)
        async with asyncio.timeout(20):
            await listener.begin()
        if listener.status == 200:
            assert await listener.block() == "retry: 3000\n:"
        yield listener
    finally:
        writer.transport.abort()


def texts(events: list[dict[str, str]]) -> list[str]:
    return [json.loads(e["data"])["text"] for e in events]


# -- what comes ------------------------------------------------------------------------------------------


async def test_events_come_as_they_happen_with_the_data_of_the_list() -> None:
    stage = Stage()
    stage.tell(3, text="before")
    async with serving(stage) as (_, path), listening(path) as listener:
        assert listener.headers["content-type"] == MEDIA_TYPE
        assert listener.headers["cache-control"] == "no-store"
        stage.tell(1, about=on_gpu(snapshots.GPU0))
        event = await listener.event()
        page = (await ask(path, "/v1/events?limit=1")).json
    assert event["event"] == "share-cut"
    assert event["id"] == f"{stage.run}-4"
    assert json.loads(event["data"]) == page["items"][0]
    assert page["items"][0]["gpu"] == snapshots.GPU0


async def test_a_reader_goes_on_where_it_was() -> None:
    stage = Stage()
    async with serving(stage) as (_, path):
        async with listening(path) as listener:
            stage.tell(2)
            seen = await listener.events(2)
        stage.tell(3, text="meanwhile")
        async with listening(path, headers=f"Last-Event-ID: {seen[-1]['id']}\r\n") as listener:
            assert texts(await listener.events(3)) == [f"meanwhile {n}" for n in (1, 2, 3)]
            stage.tell(1, text="new")
            assert texts([await listener.event()]) == ["new 1"]
        async with listening(path, f"?after={seen[0]['id']}") as listener:
            assert texts([await listener.event()]) == ["event 2"]
        # A browser keeps the address it was given, query and all.
        both = f"?after={seen[0]['id']}", f"Last-Event-ID: {stage.run}-5\r\n"
        async with listening(path, *both) as listener:
            assert texts([await listener.event()]) == ["new 1"]


async def test_what_is_no_longer_kept_is_counted() -> None:
    stage = Stage()
    stage.tell(EVENTS_KEPT + 25)
    async with serving(stage) as (_, path):
        async with listening(path, f"?after={stage.run}-10") as listener:
            missed, first = await listener.events(2)
            assert missed["event"] == "missed"
            assert json.loads(missed["data"]) == {"events": 15}
            assert first["id"] == f"{stage.run}-26"
            assert len(await listener.events(EVENTS_KEPT - 1)) == EVENTS_KEPT - 1
        async with listening(path, f"?after={stage.run}-25") as listener:
            assert (await listener.event())["id"] == f"{stage.run}-26"


async def test_who_comes_back_after_a_restart_has_missed_an_unknown_number() -> None:
    stage = Stage()
    stage.tell(2)
    async with serving(stage) as (_, path), listening(path, "?after=0ther-7") as listener:
        missed, *others = await listener.events(3)
    assert missed["event"] == "missed"
    assert json.loads(missed["data"]) == {"events": None}
    assert texts(others) == ["event 1", "event 2"]


async def test_who_is_ahead_of_us_waits_for_what_comes() -> None:
    stage = Stage()
    stage.tell(2)
    async with serving(stage) as (_, path), listening(path, f"?after={stage.run}-99") as listener:
        stage.tell(1, text="new")
        assert texts([await listener.event()]) == ["new 1"]


async def test_more_in_one_pass_than_is_kept_does_not_cost_a_reader_its_stream() -> None:
    stage = Stage()
    async with serving(stage) as (_, path), listening(path) as listener:
        stage.tell(EVENTS_KEPT * 2)
        missed = await listener.event()
        assert json.loads(missed["data"]) == {"events": EVENTS_KEPT}
        assert texts(await listener.events(EVENTS_KEPT))[-1] == f"event {2 * EVENTS_KEPT}"


async def test_a_sign_of_life_comes_while_nothing_happens() -> None:
    async with serving(Stage(), idle_seconds=0.2) as (_, path), listening(path) as listener:
        assert [await listener.block() for _ in range(3)] == [":"] * 3


@pytest.mark.parametrize("after", ["", "x", "1-", "-1", "a-b", "a-1-2", "%00-1", "a-" + "9" * 40])
async def test_what_is_no_mark_is_refused(after: str) -> None:
    async with serving(Stage()) as (_, path):
        reply = await ask(path, f"{PATH}?after={after}")
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/problem+json"


@settings(max_examples=20, deadline=None)
@given(after=st.text(max_size=40))
def test_any_mark_is_either_refused_or_begins_a_stream(after: str) -> None:
    async def scenario() -> None:
        quoted = "".join(f"%{b:02x}" for b in after.encode("utf-8", "replace"))
        query = f"?after={quoted}"
        async with serving(Stage(), listen="") as (_, path), listening(path, query) as listener:
            assert listener.status in {200, 400}

    asyncio.run(scenario())


async def test_head_has_no_body_and_ends() -> None:
    async with serving(Stage()) as (_, path):
        reply = await ask(path, PATH, method="HEAD")
    assert reply.status == 200
    assert reply.headers["content-type"] == MEDIA_TYPE
    assert reply.body == b""


async def test_before_the_first_look_there_is_no_stream() -> None:
    async with serving(Scene(None)) as (_, path):
        reply = await ask(path, PATH)
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"


# -- frames ----------------------------------------------------------------------------------------------

WILD = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    [*snapshots.HOSTILE, "\n\ndata: forged\n\n", "\r\rid: 1", "\x85\u2028\u2029\x0b\x1c\x7f"]
)


@given(kind=WILD, text=WILD, name=WILD)
def test_any_text_makes_one_frame_of_plain_lines(kind: str, text: str, name: str) -> None:
    made = frame(kind, {"text": text, name: 1.5}, "run-1").decode("ascii")
    assert made.endswith("\n\n")
    lines = made.splitlines()
    assert [x.partition(": ")[0] for x in lines] == ["id", "event", "data", ""]
    assert all(line.isprintable() for line in lines)
    data = json.loads(lines[2].removeprefix("data: "))
    if text == text.encode("utf-8", "replace").decode() and name != "text":
        assert data["text"] == text


@given(texts=st.lists(WILD, min_size=1, max_size=5))
def test_events_with_any_text_can_be_told_apart(texts: list[str]) -> None:
    snapshot = msgspec.structs.replace(
        snapshots.busy(),
        events=tuple(Event("test", 1.0, t, on_tenant(t), number=n) for n, t in enumerate(texts, 1)),
    )
    frames = Frames()
    blocks = b"".join(frames.of(snapshot, e) for e in snapshot.events).decode("ascii")
    ids = [x for x in blocks.splitlines() if x.startswith("id: ")]
    assert ids == [f"id: {snapshots.RUN}-{n}" for n in range(1, len(texts) + 1)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=6))
def test_a_frame_is_made_once_and_those_made_are_bounded(counts: list[int]) -> None:
    stage, frames = Stage(), Frames()
    for count in counts:
        stage.tell(count)
        assert stage.snapshot is not None
        first = [frames.of(stage.snapshot, e) for e in stage.snapshot.events]
        again = [frames.of(stage.snapshot, e) for e in stage.snapshot.events]
        assert all(a is b for a, b in zip(first, again, strict=True))
        assert len(frames._made) <= 2 * EVENTS_KEPT + 1


# -- who may -----------------------------------------------------------------------------------------------


class Desk:
    """Streams in an application of their own, with whoever the test says at the other end."""

    def __init__(self, stage: Stage, peer: Peer, *, seconds: float = 15.0) -> None:
        self.stage = stage
        self.peer: Peer | Exception = peer
        self.streams = Streams(
            stage, gate=Gate("ask"), peer_of=self._who, send_seconds=seconds, most=STREAMS
        )

    def _who(self, _request: web.Request) -> Peer:
        if isinstance(self.peer, Exception):
            raise self.peer
        return self.peer

    @contextlib.asynccontextmanager
    async def open(self, folder: Any) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get(PATH, self.streams.respond)
        app.on_shutdown.append(self.streams.close)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        path = os.path.join(str(folder), "s")
        await web.UnixSite(runner, path).start()
        try:
            yield path
        finally:
            await runner.cleanup()


async def test_a_tenant_hears_of_itself_only(tmp_path: Any) -> None:
    stage = Stage()
    async with Desk(stage, OWNER).open(tmp_path) as path, listening(path) as listener:
        for about in (None, on_gpu(snapshots.GPU0), on_tenant("serve"), on_tenant("trainer")):
            stage.tell(1, about=about, text="of others")
        for kind in ("override-set", "held-back"):  # which say who ordered it, and for whom it is
            stage.tell(1, about=on_tenant("train"), text="p99 of serve", kind=kind)
        stage.tell(1, about=on_tenant("train"), text="mine")
        event = await listener.event()
        assert texts([event]) == ["mine 1"]
        assert event["id"] == f"{stage.run}-7"


async def test_nobody_else_hears_anything(tmp_path: Any) -> None:
    desk = Desk(Stage(), Peer(label="user 7"))
    request: Any = None
    with pytest.raises(Trouble) as refused:
        desk.streams.peer(request)
    assert refused.value.status == 403


@pytest.mark.parametrize("ended", [Peer(label="user 1000"), None])
async def test_a_stream_ends_with_the_right_to_it(tmp_path: Any, ended: Peer | None) -> None:
    desk = Desk(Stage(), OWNER, seconds=0.2)
    async with desk.open(tmp_path) as path, listening(path) as listener:
        desk.peer = ended if ended is not None else Trouble(401, "the token has expired")
        (end,) = await listener.rest()
    assert end["event"] == "end"
    why = json.loads(end["data"])["why"]
    assert why in {"user 1000 may not do this", "the token has expired"}


async def test_what_a_reader_may_see_follows_its_right(tmp_path: Any) -> None:
    desk = Desk(Stage(), OWNER, seconds=0.2)
    async with desk.open(tmp_path) as path, listening(path) as listener:
        desk.peer = Peer(label="user 1000", tenants=frozenset({"serve"}))
        await listener.block()  # a sign of life, by which time it has been looked at again
        await listener.block()
        desk.stage.tell(1, about=on_tenant("train"))
        desk.stage.tell(1, about=on_tenant("serve"), text="seen")
        assert texts([await listener.event()]) == ["seen 1"]


# -- how many ----------------------------------------------------------------------------------------------


async def test_so_many_streams_and_not_one_more() -> None:
    stage = Stage()
    async with serving(stage) as (_, path), contextlib.AsyncExitStack() as open_ones:
        here = [await open_ones.enter_async_context(listening(path)) for _ in range(STREAMS)]
        reply = await ask(path, PATH)
        assert reply.status == 503
        assert "too many streams" in reply.json["detail"]
        assert reply.headers["retry-after"] == "5"
        stage.tell(1)
        for listener in here:
            assert texts([await listener.event()]) == ["event 1"]
        assert (await ask(path, "/v1/node")).status == 200
        for listener in here[:3]:
            listener.writer.transport.abort()
        await until(lambda: stage.tell(0), path)


async def until(turn: Callable[[], None], path: str) -> None:
    """Until there is room for one more stream."""
    async with asyncio.timeout(20):
        while True:
            turn()
            async with listening(path) as listener:
                if listener.status == 200:
                    return
            await asyncio.sleep(0.01)


async def test_one_user_has_a_few_and_administrators_have_room_kept(tmp_path: Any) -> None:
    desk = Desk(Stage(), OWNER)
    async with desk.open(tmp_path), contextlib.AsyncExitStack() as open_ones:
        place = desk.streams._place
        for user in range(STREAMS * 3 // 4 // STREAMS_PER_PEER):
            peer = Peer(label=f"user {user}")
            for _ in range(STREAMS_PER_PEER):
                open_ones.enter_context(place(peer))
            with pytest.raises(Exception, match=f"user {user} has {STREAMS_PER_PEER}|too many"):
                open_ones.enter_context(place(peer))
        with pytest.raises(Exception, match="too many"):
            open_ones.enter_context(place(Peer(label="another", reads=True)))
        for _ in range(STREAMS // 4):
            open_ones.enter_context(place(ADMIN))
        with pytest.raises(Exception, match="too many"):
            open_ones.enter_context(place(ADMIN))
    assert not desk.streams._open, "and nothing is remembered of who has gone"


async def test_a_tenant_has_no_more_streams_for_having_many_users(tmp_path: Any) -> None:
    desk = Desk(Stage(), OWNER)
    async with desk.open(tmp_path), contextlib.AsyncExitStack() as open_ones:
        place = desk.streams._place

        def enter(user: int, *tenants: str) -> None:
            peer = Peer(label=f"user {user}", tenants=frozenset(tenants))
            open_ones.enter_context(place(peer))

        for user in range(STREAMS_PER_PEER):
            enter(user, "train")
        for tenants in (("train",), ("serve", "train")):
            with pytest.raises(Trouble, match=f"tenant train has {STREAMS_PER_PEER} streams"):
                enter(99, *tenants)
        enter(0, "serve")
        open_ones.enter_context(place(Peer(label="token 1", reads=True)))
    assert not desk.streams._open


def test_streams_leave_most_connections_of_a_user_and_a_listener_to_others() -> None:
    assert STREAMS_PER_PEER <= CONNECTIONS_PER_USER // 4
    assert STREAMS_PER_PEER < STREAMS
    assert CONNECTIONS_TCP // 4 >= STREAMS_PER_PEER


async def test_whoever_wants_in_turns_no_stream_out() -> None:
    stage = Stage()
    async with serving(stage) as (_, path), listening(path) as listener:
        crowd = [await asyncio.open_unix_connection(path) for _ in range(200)]
        assert (await ask(path, "/v1/node")).status == 200
        stage.tell(1)
        assert texts([await listener.event()]) == ["event 1"]
        for _, writer in crowd:
            writer.transport.abort()


# -- slow readers ------------------------------------------------------------------------------------------

LONG = "x" * 4000


async def turns() -> None:
    """As many turns of the loop as a stream needs to write what there is, or to find the socket full."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_slow_reader_is_told_and_dropped_while_others_go_on() -> None:
    stage = Stage()
    async with serving(stage) as (_, path), contextlib.AsyncExitStack() as stack:
        slow, quick = [await stack.enter_async_context(listening(path)) for _ in range(2)]
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent = 0
        # More than the sockets hold, so that the server has to wait for the slow one.
        for _ in range(8):
            stage.tell(60, text=LONG)
            sent += 60
            await quick.events(60)
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        events = await slow.rest()
        assert events[-1]["event"] == "dropped"
        lost = json.loads(events[-1]["data"])["events"]
        told = events[:-1]
        assert {e["event"] for e in told} == {"test"}
        assert len(told) + lost == sent
        assert lost > BEHIND_MOST
        again = await stack.enter_async_context(
            listening(path, headers=f"Last-Event-ID: {told[-1]['id']}\r\n")
        )
        assert len(await again.events(lost)) == lost, "to who comes back nothing is lost"
        stage.tell(1, text="still")
        assert texts([await quick.event()]) == ["still 1"]


async def test_a_flood_that_one_reader_cannot_follow_is_told_and_dropped() -> None:
    stage = Stage()
    async with serving(stage) as (_, path), listening(path) as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent = 0
        while sent < 5 * BEHIND_MOST:
            stage.tell(64, text=LONG)
            sent += 64
            await turns()
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        events = await slow.rest()
    kinds = [e["event"] for e in events]
    assert kinds[-1] == "dropped"
    assert kinds.count("dropped") == 1
    assert json.loads(events[-1]["data"])["events"] > BEHIND_MOST


async def test_a_reader_that_takes_all_at_once_is_not_too_slow_for_a_flood() -> None:
    stage = Stage()
    async with serving(stage) as (_, path), listening(path) as quick:
        for turns in range(8):
            stage.tell(1)
            for _ in range(turns):
                await asyncio.sleep(0)
            stage.tell(BEHIND_MOST + 1)  # in whatever turn of its writing
            told = await quick.events(BEHIND_MOST + 2)
            assert {e["event"] for e in told} == {"test"}, turns


async def test_a_reader_that_never_takes_anything_is_cut_off() -> None:
    stage = Stage()
    async with serving(stage, idle_seconds=0.2) as (_, path), listening(path) as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(8):
            stage.tell(64, text=LONG)
            await turns()
        hung_up = select.poll()
        hung_up.register(slow.writer.get_extra_info("socket").fileno(), 0)
        assert await asyncio.to_thread(hung_up.poll, 10_000)
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await slow.rest()  # in the middle of a chunk, or between two
        assert (await ask(path, "/v1/node")).status == 200


async def test_a_snapshot_costs_the_loop_one_step_however_many_read(tmp_path: Any) -> None:
    """While it is published nothing is encoded, nothing written, nobody waited for."""
    desk = Desk(Stage(), ADMIN)
    async with desk.open(tmp_path) as path, contextlib.AsyncExitStack() as open_ones:
        here = [await open_ones.enter_async_context(listening(path)) for _ in range(STREAMS)]
        made = desk.streams.frames._made
        desk.stage.tell(EVENTS_KEPT)  # no await: the streams have had no turn yet
        assert made == {}
        for listener in here:
            await listener.events(EVENTS_KEPT)
        assert len(made) == EVENTS_KEPT, "and later each event is encoded once for all of them"


def test_one_turn_of_a_stream_is_bounded() -> None:
    assert stream._AT_ONCE <= 64


# -- the end -------------------------------------------------------------------------------------------------


async def test_streams_end_in_order_when_the_agent_does() -> None:
    stage = Stage()
    async with serving(stage) as (server, path), contextlib.AsyncExitStack() as open_ones:
        here = [await open_ones.enter_async_context(listening(path)) for _ in range(10)]
        stage.tell(1)
        await server.stop()
        for listener in here:
            event, end = await listener.rest()
            assert texts([event]) == ["event 1"]
            assert json.loads(end["data"]) == {"why": "the agent stops"}


async def test_a_stuck_stream_does_not_hold_up_the_end() -> None:
    stage = Stage()
    async with serving(stage) as (server, path), listening(path) as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(4):
            stage.tell(64, text=LONG)
            await turns()
        await asyncio.wait_for(server.stop(), 10)
