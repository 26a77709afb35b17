"""The routes that issue, list and revoke tokens.

The secret is made here and goes nowhere but into the answer: what is handed to the inbox is a hash.
"""

import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.errors import AgentError, Gone, Unavailable
from gpuagent.expose.paging import AFTER, LIMIT, part
from gpuagent.expose.problems import Trouble
from gpuagent.expose.routes import Ask, Do, For, Get, Submit, Told
from gpuagent.expose.views import Done, Page, View
from gpuagent.model.plan import IssueToken, RevokeToken
from gpuagent.model.token import (
    LONGEST_SECONDS,
    SCOPES_MOST,
    SECRET_BYTES,
    ScopeText,
    Token,
    digest,
    scope_trouble,
    spelled,
)


class TokenBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a new token is to allow."""

    scopes: Annotated[tuple[ScopeText, ...], Meta(min_length=1, max_length=SCOPES_MOST)]
    expires_seconds: Annotated[float, Meta(ge=1, le=LONGEST_SECONDS)]
    """From now; ten years at most."""
    note: Annotated[str, Meta(max_length=200)] = ""
    """What it is for."""


class IssuedView(View, frozen=True):
    """A new token. This is the only time that its secret is told."""

    id: str
    token: str
    """What its bearer sends: gpa_ID_SECRET."""
    scopes: tuple[str, ...]
    expires_at: float
    """Wall clock, seconds since the epoch."""


class TokenView(View, frozen=True):
    """A token that is valid."""

    id: str
    scopes: tuple[str, ...]
    note: str
    issued_by: str
    issued_at: float
    expires_at: float


async def _issue(told: Told, ask: Ask, submit: Submit) -> View:
    body: TokenBody = ask.body
    troubles = [f"{s!r}: {t}" for s in body.scopes if (t := scope_trouble(s))]
    if troubles:
        raise Trouble(422, f"the body does not fit: {troubles[0]}")
    now = told.clock.now()
    token_id = secrets.token_hex(4)
    text = spelled(token_id, secrets.token_bytes(SECRET_BYTES))
    token = Token(
        id=token_id,
        scopes=tuple(dict.fromkeys(body.scopes)),
        note=body.note,
        by=ask.peer.label,
        issued_wall=now.wall,
        expires_wall=now.wall + body.expires_seconds,
    )
    try:
        await submit(IssueToken(by=ask.peer.label, token=token, digest=digest(text)))
    except Unavailable as error:
        # It may be carried out yet, and then nobody has the secret.
        await _undo(ask, token_id, submit, error)
        raise
    return IssuedView(id=token_id, token=text, scopes=token.scopes, expires_at=token.expires_wall)


async def _undo(ask: Ask, token_id: str, submit: Submit, error: Unavailable) -> None:
    """Revoke a token that may have become valid. Raises Unavailable where it may be so still."""
    try:
        await submit(RevokeToken(by=ask.peer.label, id=token_id))
    except Gone:
        return
    except AgentError:
        raise Unavailable(
            f"{error}; if `gpuagent token list` shows {token_id}, revoke it: nobody has its secret"
        ) from error


def _list(told: Told, ask: Ask) -> View:
    valid = told.access().tokens
    wanted, after = part(ask.query, [t.id for t in valid])
    items = tuple(
        TokenView(
            id=t.id,
            scopes=t.scopes,
            note=t.note,
            issued_by=t.by,
            issued_at=t.issued_wall,
            expires_at=t.expires_wall,
        )
        for t in valid[wanted]
    )
    return Page(items=items, next=after, total=len(valid))


async def _revoke(_told: Told, ask: Ask, submit: Submit) -> View:
    return Done(done=await submit(RevokeToken(by=ask.peer.label, id=ask.name)))


GETS: tuple[Get, ...] = (
    Get(
        path="/v1/tokens",
        audience=For.ADMINS,
        about="The tokens that are valid, by id, without their secrets.",
        answer=_list,
        view=Page[TokenView],
        query=(LIMIT, AFTER),
    ),
)
DOS: tuple[Do, ...] = (
    Do(
        path="/v1/tokens",
        audience=For.ADMINS,
        about="Issue a token; its secret is told this once.",
        answer=_issue,
        view=IssuedView,
        body=TokenBody,
        status=201,
    ),
    Do(
        path="/v1/tokens/{name}",
        audience=For.ADMINS,
        about="Revoke a token, by id.",
        answer=_revoke,
        method="DELETE",
        statuses=(404,),
    ),
)
