"""Issuing a token: one whose secret did not reach anybody is not left valid."""

from typing import Any

import pytest

from gpuagent.errors import Gone, Unavailable
from gpuagent.expose.auth import Peer
from gpuagent.expose.routes import Ask
from gpuagent.expose.tokens import DOS, TokenBody
from gpuagent.model.plan import Command, IssueToken, RevokeToken
from tests.expose.scene import Scene

ASK = Ask(peer=Peer(label="user 0", admin=True), body=TokenBody(("read",), 60.0))
LATE = Unavailable("the loop has not answered within 30 s")


class Slow:
    """An agent that answers to no token in time."""

    def __init__(self, then: Exception | None = None) -> None:
        self.seen: list[Command] = []
        self._then = then

    async def __call__(self, command: Command) -> str:
        self.seen.append(command)
        if isinstance(command, IssueToken):
            raise LATE
        if self._then is not None:
            raise self._then
        return "revoked"


async def issue(slow: Slow) -> Any:
    return await DOS[0].answer(Scene(None), ASK, slow)


@pytest.mark.parametrize("then", [None, Gone("there is no valid token")])
async def test_a_token_that_may_be_valid_while_its_secret_is_lost_is_revoked(
    then: Exception | None,
) -> None:
    slow = Slow(then)
    with pytest.raises(Unavailable) as refused:
        await issue(slow)
    assert refused.value is LATE
    first, second = slow.seen
    assert isinstance(first, IssueToken)
    assert second == RevokeToken(by="user 0", id=first.token.id)


async def test_where_that_fails_too_its_id_is_told() -> None:
    slow = Slow(Unavailable("the inbox is full"))
    with pytest.raises(Unavailable) as refused:
        await issue(slow)
    first = slow.seen[0]
    assert isinstance(first, IssueToken)
    assert first.token.id in str(refused.value)
    assert first.digest not in str(refused.value)
