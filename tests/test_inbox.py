"""Commands wait in order, in bounded number, and not for those who have gone."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import Refused, Unavailable
from gpuagent.inbox import Inbox
from gpuagent.model.plan import Pause


class Waiting:
    """Senders that wait for answers."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.inbox = Inbox(self.woken.append)
        self.senders: list[asyncio.Task[str]] = []

    async def send(self, *names: str) -> None:
        self.senders += [asyncio.ensure_future(self.inbox.submit(Pause(n))) for n in names]
        await asyncio.sleep(0)


async def test_commands_come_out_in_order_and_wake_the_loop() -> None:
    w = Waiting()
    await w.send("a", "b")
    assert w.woken == ["command from a", "command from b"]
    for command, answer in w.inbox.drain():
        answer.set_result(f"for {command.by}")
    assert await asyncio.gather(*w.senders) == ["for a", "for b"]
    assert list(w.inbox.drain()) == []


async def test_an_error_is_an_answer() -> None:
    w = Waiting()
    await w.send("a")
    for _, answer in w.inbox.drain():
        answer.set_exception(Refused("no"))
    with pytest.raises(Refused, match="no"):
        await w.senders[0]


async def test_who_has_gone_is_left_out() -> None:
    w = Waiting()
    await w.send("a", "b")
    w.senders[0].cancel()
    await asyncio.gather(*w.senders[:1], return_exceptions=True)
    letters = list(w.inbox.drain())
    assert [c.by for c, _ in letters] == ["b"]
    letters[0][1].set_result("")
    await w.senders[1]


async def test_a_full_inbox_says_so_and_has_room_again_once_drained() -> None:
    w = Waiting()
    await w.send(*(str(n) for n in range(64)))
    with pytest.raises(Unavailable, match="64 commands are waiting"):
        await w.inbox.submit(Pause("one too many"))
    for _, answer in w.inbox.drain():
        answer.set_result("")
    await asyncio.gather(*w.senders)
    await w.send("again")
    assert [c.by for c, _ in w.inbox.drain()] == ["again"]
    w.senders[-1].cancel()
    await asyncio.gather(*w.senders, return_exceptions=True)


@given(st.lists(st.sampled_from(["send", "leave", "drain"]), max_size=40))
def test_whoever_stays_is_answered_once(moves: list[str]) -> None:
    async def run() -> None:
        w = Waiting()
        for number, move in enumerate(moves):
            if move == "send":
                await w.send(str(number))
            elif move == "leave" and w.senders:
                w.senders[number % len(w.senders)].cancel()
                await asyncio.sleep(0)
            elif move == "drain":
                for command, answer in w.inbox.drain():
                    answer.set_result(command.by)
        for command, answer in w.inbox.drain():
            answer.set_result(command.by)
        answers = await asyncio.gather(*w.senders, return_exceptions=True)
        sent = [str(n) for n, move in enumerate(moves) if move == "send"]
        for who, answered in zip(sent, answers, strict=True):
            assert answered == who or isinstance(answered, asyncio.CancelledError)

    asyncio.run(run())
