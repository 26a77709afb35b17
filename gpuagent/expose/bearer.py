"""Who asks over TCP: the token in the Authorization header, and what becomes of those without one.

A request without a valid token is told so, and not what is wrong with the one it brought. Its
connection ends with the answer, and once a few have failed the answer waits: guessing costs the
guesser a connection and a second each, and the agent the hash of a short text.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Protocol

import structlog
from aiohttp import web

from gpuagent.clock import Clock
from gpuagent.expose.allowance import Allowance
from gpuagent.expose.auth import Peer, of_token
from gpuagent.expose.door import Door
from gpuagent.expose.problems import Trouble
from gpuagent.model.token import Token

_TEXT_MOST = 256
"""Longer is no token of ours; of what stands in a Basic header, user and token together."""
_FAILURES_AT_ONCE = 16
_FAILURES_PER_SECOND = 1.0
_PAUSE_SECONDS = 1.0
_SAY_SECONDS = 60.0

_log = structlog.get_logger()


class Tokens(Protocol):
    """Where tokens are known."""

    def known(self, text: str) -> Token | None:
        """The valid token with this secret. Takes the same time for all that are none."""


class NoTokens:
    """For an agent that keeps none."""

    def known(self, text: str) -> Token | None:
        return None


class Unauthenticated(Trouble):
    """Who asks has not shown a valid token (401)."""

    def __init__(self, challenges: Sequence[str], pause_seconds: float) -> None:
        super().__init__(
            401,
            "this needs a valid token",
            "send `Authorization: Bearer TOKEN`; `gpuagent token issue` makes one",
        )
        self.challenges = tuple(challenges)
        """For WWW-Authenticate."""
        self.pause_seconds = pause_seconds
        """How long the answer waits."""


class Bearers:
    """Tells who asks over TCP, on one listener."""

    def __init__(self, tokens: Tokens, *, clock: Clock, door: Door, basic: bool = False) -> None:
        """`basic`: a token may also come as the password of Basic authentication."""
        self._tokens = tokens
        self._clock = clock
        self._door = door
        self._basic = basic
        self._challenges = ['Bearer realm="gpuagent"']
        if basic:
            self._challenges.append('Basic realm="gpuagent", charset="UTF-8"')
        self._failures = Allowance(burst=_FAILURES_AT_ONCE, per_second=_FAILURES_PER_SECOND)
        self._unsaid = 0
        self._said: float | None = None

    def peer_of(self, request: web.Request) -> Peer:
        """What the bearer of the token in `request` may. Raises Unauthenticated."""
        text = presented(request.headers.getall("Authorization", []), basic=self._basic)
        token = None if text is None else self._tokens.known(text)
        if token is None:
            raise self._refusal(guessed=text is not None)
        if request.transport is not None:
            self._door.recognise(request.transport)
        return of_token(token)

    def _refusal(self, *, guessed: bool) -> Unauthenticated:
        now = self._clock.now().mono
        pause = 0.0 if self._failures.take(now) else _PAUSE_SECONDS
        self._unsaid += guessed
        if self._unsaid and (self._said is None or now - self._said >= _SAY_SECONDS):
            _log.warning("a token was refused", times=self._unsaid)
            self._said, self._unsaid = now, 0
        return Unauthenticated(self._challenges, pause)


def presented(headers: Sequence[str], *, basic: bool) -> str | None:
    """The token in the values of Authorization headers; None where there is not exactly one."""
    if len(headers) != 1:
        return None
    scheme, _, rest = headers[0].partition(" ")
    rest = rest.strip(" ")
    if not rest or len(rest) > _TEXT_MOST * 2:
        return None
    text: str | None = None
    if scheme.lower() == "bearer":
        text = rest
    elif basic and scheme.lower() == "basic":
        text = _password(rest)
    return text if text and len(text) <= _TEXT_MOST else None


def _password(encoded: str) -> str | None:
    """The password in "user:password" as Basic authentication sends it (RFC 7617)."""
    try:
        pair = base64.b64decode(encoded.encode("utf-8", "replace"), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return pair.partition(":")[2] or None
