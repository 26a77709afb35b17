"""The tokens that are valid, and their file: this is the only writer of `tokens.json`.

A secret is never kept, only its SHA-256. A file that cannot be trusted makes no token valid, and is
left as it is for somebody to look at.
"""

import asyncio
import hmac
import math
import os
import stat
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.clock import Clock
from gpuagent.errors import Gone, Refused
from gpuagent.model.state import Instant
from gpuagent.model.token import SCOPES_MOST, Token, digest, id_in, scope_trouble
from gpuagent.starts import replace_file

TOKENS_MOST = 256
_FILE_MOST_BYTES = 4 * 1024 * 1024
_VERSION = 1
_NOBODYS = "0" * 64
"""The digest of no text that anybody knows."""


class _Entry(msgspec.Struct, frozen=True):
    """One token in the file."""

    token: Token
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class _File(msgspec.Struct, frozen=True):
    version: int = _VERSION
    tokens: tuple[_Entry, ...] = ()


class _Record:
    """A token while the agent runs."""

    def __init__(self, entry: _Entry, now: Instant) -> None:
        self.entry = entry
        self._until_mono = math.inf
        self.valid(now)  # the clocks as they are now are the first witnesses of when it ends

    def valid(self, now: Instant) -> bool:
        """Whether it has not ended by the earliest end that the clocks have told in this run.

        A wall clock that is set back, by mistake or on purpose, makes nothing valid again.
        """
        left = self.entry.token.expires_wall - now.wall
        self._until_mono = min(self._until_mono, now.mono + left)
        return now.mono < self._until_mono


class TokenBook:
    """All tokens of one state directory. Reads its file when it is made."""

    def __init__(self, directory: str, clock: Clock) -> None:
        self._path = os.path.join(directory, "tokens.json")
        self._clock = clock
        self._writing = asyncio.Lock()
        self._records: dict[str, _Record] = {}
        self.trouble = ""
        """Why no token is valid, with what to do; empty while the file is as it should be."""
        self._take(_read(self._path))

    # -- reading -------------------------------------------------------------------------------------

    def known(self, text: str) -> Token | None:
        """The valid token with this secret; None for everything else, in the same time."""
        record = self._records.get(id_in(text))
        kept = _NOBODYS if record is None else record.entry.digest
        same = hmac.compare_digest(digest(text), kept)
        if record is None or not same or not record.valid(self._clock.now()):
            return None
        return record.entry.token

    def listed(self) -> tuple[Token, ...]:
        """Those that are valid, by id."""
        return tuple(self._records[i].entry.token for i in sorted(self._valid()))

    def _valid(self) -> dict[str, _Record]:
        now = self._clock.now()
        return {i: r for i, r in self._records.items() if r.valid(now)}

    # -- changing ------------------------------------------------------------------------------------

    async def issue(self, token: Token, kept: str) -> str:
        """Make a token valid, of whose text `kept` is the digest. Raises Refused."""
        async with self._writing:
            if self.trouble:
                raise Refused(self.trouble)
            records = self._valid()
            if len(records) >= TOKENS_MOST:
                raise Refused(
                    f"{TOKENS_MOST} tokens are valid already; revoke one that is not used"
                )
            if token.id in records:
                raise Refused("that id is taken by chance; ask again")
            records[token.id] = _Record(_Entry(token, kept), self._clock.now())
            try:
                await self._write(records)
            except OSError as error:
                raise Refused(
                    f"the token cannot be kept: {self._path}: {error.strerror}"
                ) from error
            self._records = records
        return f"token {token.id} is valid"

    async def revoke(self, token_id: str) -> str:
        """From now on it is invalid. Raises Gone; Refused where a restart would make it valid again."""
        async with self._writing:
            records = self._valid()
            if records.pop(token_id, None) is None:
                raise Gone(
                    f"there is no valid token {token_id!r}; `gpuagent token list` shows those there are"
                )
            # First in force, then in the file: it must not let anybody in while the disk is slow.
            self._records = records
            try:
                await self._write(records)
            except OSError as error:
                raise Refused(
                    f"revoked, but a restart would make it valid again: {self._path}: {error.strerror}"
                ) from error
        return f"token {token_id} is revoked"

    async def reread(self) -> None:
        """Look again whether a file that was in trouble has been put in order."""
        async with self._writing:
            if self.trouble:
                self._take(await asyncio.to_thread(_read, self._path))

    async def _write(self, records: dict[str, _Record]) -> None:
        """Raises OSError."""
        content = msgspec.json.encode(_File(tokens=tuple(r.entry for r in records.values())))
        await asyncio.to_thread(replace_file, self._path, content)

    def _take(self, found: tuple[_Entry, ...] | str) -> None:
        self.trouble = found if isinstance(found, str) else ""
        entries = () if isinstance(found, str) else found
        now = self._clock.now()
        self._records = {e.token.id: _Record(e, now) for e in entries}


def _read(path: str) -> tuple[_Entry, ...] | str:
    """What the file holds, or why it is not to be trusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    except OSError as error:
        return _untrusted(path, f"it cannot be opened: {error.strerror}")
    try:
        doubt = _doubt(os.fstat(descriptor))
        if doubt:
            return _untrusted(path, doubt)
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(_FILE_MOST_BYTES)
        found = msgspec.json.decode(raw, type=_File)
    except OSError as error:
        return _untrusted(path, f"it cannot be read: {error.strerror}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _untrusted(path, "it is damaged")
    finally:
        os.close(descriptor)
    return (
        found.tokens if _sound(found) else _untrusted(path, "it is damaged, or of a later version")
    )


def _doubt(status: os.stat_result) -> str:
    """Whoever can write the file gives himself what rights he likes."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (0, os.geteuid()):
        return "others can write it"
    return ""


def _sound(file: _File) -> bool:
    ids = [e.token.id for e in file.tokens]
    return (
        file.version == _VERSION
        and len(ids) == len(set(ids)) <= TOKENS_MOST
        and all(_is_sound(e.token) for e in file.tokens)
    )


def _is_sound(token: Token) -> bool:
    return (
        0 < len(token.scopes) <= SCOPES_MOST
        and not any(scope_trouble(s) for s in token.scopes)
        and math.isfinite(token.expires_wall)
    )


def _untrusted(path: str, why: str) -> str:
    return f"no token is valid: {path}: {why}; put it in order or remove it, then run `gpuagent reload`"
