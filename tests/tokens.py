"""Tokens for tests."""

import secrets

from gpuagent.clock import Clock
from gpuagent.model.token import SECRET_BYTES, Token, digest, spelled
from gpuagent.tokens import TokenBook


async def issued(book: TokenBook, clock: Clock, *scopes: str, seconds: float = 1e6) -> str:
    """The text of a new token of the book."""
    token_id = secrets.token_hex(4)
    text = spelled(token_id, secrets.token_bytes(SECRET_BYTES))
    await book.issue(token(token_id, clock, *scopes, seconds=seconds), digest(text))
    return text


def token(token_id: str, clock: Clock, *scopes: str, seconds: float = 1e6) -> Token:
    now = clock.now()
    return Token(
        id=token_id,
        scopes=scopes or ("read",),
        by="user 0",
        issued_wall=now.wall,
        expires_wall=now.wall + seconds,
    )
