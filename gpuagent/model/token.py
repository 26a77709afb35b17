"""What a token is to everybody but its bearer: what it allows, for how long, and who asked for it."""

import base64
import hashlib
import re
from typing import Annotated

import msgspec
from msgspec import Meta

LONGEST_SECONDS = 10 * 365.25 * 86400.0
"""A token ends within ten years."""
SCOPES_MOST = 16
_FOR_TENANT = "latency:"
_SCOPE_MOST = 300
_WORDS = frozenset({"read", "metrics", "override", "admin"})

ScopeText = Annotated[
    str,
    Meta(
        pattern="^(read|metrics|override|admin|latency:.+)$",
        max_length=_SCOPE_MOST,
        description="read, metrics, latency:TENANT, override or admin",
    ),
]


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One that was issued. Its secret is nowhere in it, nor a hash of that."""

    id: str
    """Eight hexadecimal digits, which also stand in the secret's text."""
    scopes: tuple[str, ...]
    note: str = ""
    """What it is for, in the words of whoever asked for it."""
    by: str
    """Who asked for it."""
    issued_wall: float
    expires_wall: float
    """Seconds since the epoch."""


def scope_trouble(scope: str) -> str:
    """Why this is no scope; empty where it is one.

    read sees everything; metrics only the pages for Prometheus; latency:TENANT reports for that
    tenant; override holds back and lets go; admin may all that root may.
    """
    if scope in _WORDS:
        return ""
    tenant = scope.removeprefix(_FOR_TENANT)
    if tenant == scope or not tenant:
        return "a scope is read, metrics, latency:TENANT, override or admin"
    if not tenant.isprintable() or len(scope) > _SCOPE_MOST:
        return "the tenant's name in a scope has a control character, or is too long"
    return ""


def tenant_of(scope: str) -> str:
    """The tenant in "latency:TENANT"; empty for every other scope."""
    return scope.removeprefix(_FOR_TENANT) if scope.startswith(_FOR_TENANT) else ""


# -- the secret's text ----------------------------------------------------------------------------------

_TEXT = re.compile("gpa_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
SECRET_BYTES = 32


def spelled(token_id: str, secret: bytes) -> str:
    """What the bearer presents: gpa_ID_SECRET. `secret` has `SECRET_BYTES`, from the system's source."""
    return f"gpa_{token_id}_{base64.urlsafe_b64encode(secret).decode().rstrip('=')}"


def id_in(text: str) -> str:
    """The id in what somebody presents; empty where it is no token's text."""
    found = _TEXT.fullmatch(text)
    return found[1] if found else ""


def digest(text: str) -> str:
    """What is kept of a secret: the SHA-256 of its text, in hexadecimal.

    A slow hash makes guessing a password dear. There is nothing to guess in 256 random bits, and a
    slow hash would let anybody who sends junk keep the agent busy.
    """
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
