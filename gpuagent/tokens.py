"""The tokens that are valid, and their file: this is the only writer of `tokens.json`.

A secret is never kept, only its SHA-256. A file that cannot be trusted makes no token valid, and is
left as it is for somebody to look at.
"""

import asyncio
import hmac
import math
import os
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuagent.clock import Clock
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.keptfile import Disk, KeptFile, doubt
from gpuagent.model.state import Instant
from gpuagent.model.token import SCOPES_MOST, Token, digest, id_in, scope_trouble

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
        self._first_end = math.inf
        self._last_end = -math.inf
        """Monotonic seconds of the earliest and of the latest end that the clocks have told."""
        self._ask(now)  # the clocks as they are now are the first witnesses of when it ends

    def valid(self, now: Instant) -> bool:
        """Whether it has not ended by the earliest end that the clocks have told in this run.

        A wall clock that is set back, by mistake or on purpose, makes nothing valid again.
        """
        self._ask(now)
        return now.mono < self._first_end

    def kept(self, now: Instant) -> bool:
        """Whether it has its place in the file: until it has ended by the latest end.

        A wall clock that was wrong for a moment must not cost anybody a token for good.
        """
        self._ask(now)
        return now.mono < self._last_end

    def _ask(self, now: Instant) -> None:
        end = now.mono + self.entry.token.expires_wall - now.wall
        self._first_end = min(self._first_end, end)
        self._last_end = max(self._last_end, end)


class TokenBook:
    """All tokens of one state directory. Reads its file when it is made."""

    def __init__(self, directory: str, clock: Clock, disk: Disk | None = None) -> None:
        self._path = os.path.join(directory, "tokens.json")
        self._file = KeptFile(self._path, lambda: _made(self._kept()), clock=clock, disk=disk)
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._lingering: dict[str, None] = {}
        """Ids of those that were revoked and may be in the file still, as far as anybody was told."""
        self.trouble = ""
        """Why no token is valid, with what to do; empty while the file is as it should be."""
        self._take(_read(self._path))

    @property
    def unsaved(self) -> str:
        """Why a restart would find others valid; empty while the disk takes what it is given."""
        return self._file.trouble

    async def run(self) -> None:
        """Until cancelled: the file is made to hold what is valid, however often that takes."""
        await self._file.run()

    async def close(self) -> None:
        """Write what the file does not hold yet, at the end; for no longer than a write may take."""
        await self._file.close()

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

    def _kept(self) -> dict[str, _Record]:
        now = self._clock.now()
        return {i: r for i, r in self._records.items() if r.kept(now)}

    # -- changing ------------------------------------------------------------------------------------

    async def issue(self, token: Token, kept: str) -> str:
        """Make a token valid, of whose text `kept` is the digest.

        Raises Refused; Unavailable where it cannot be kept. Then it is not valid.
        """
        async with self._file.changing:
            if self.trouble:
                raise Refused(self.trouble)
            records, valid = self._kept(), self._valid()
            if len(valid) >= TOKENS_MOST:
                raise Refused(
                    f"{TOKENS_MOST} tokens are valid already; revoke one that is not used"
                )
            if token.id in records:
                raise Refused("that id is taken by chance; ask again")
            for doubtful in [i for i in records if i not in valid][: _over(records)]:
                del records[doubtful]
            records[token.id] = _Record(_Entry(token, kept), self._clock.now())
            try:
                await self._file.write(_made(records))
            except Unavailable as error:
                raise Unavailable(f"the token cannot be kept: {error}") from error
            self._records = records
        return f"token {token.id} is valid"

    async def revoke(self, token_id: str) -> str:
        """From now on it is invalid.

        Raises Gone; Unavailable where a restart would make it valid again, as long as that is so.
        """
        async with self._file.changing:
            records = self._kept()
            if records.pop(token_id, None) is None and token_id not in self._lingering:
                raise Gone(
                    f"there is no valid token {token_id!r}; `gpuagent token list` shows those there are"
                )
            # First in force, then in the file: it must not let anybody in while the disk is slow.
            self._records = records
            self._lingering = dict.fromkeys([*self._lingering, token_id][-TOKENS_MOST:])
            try:
                await self._file.write()
            except Unavailable as error:
                raise Unavailable(
                    f"revoked, but a restart may make it valid again: {error}"
                ) from error
            del self._lingering[token_id]
        return f"token {token_id} is revoked"

    async def reread(self) -> None:
        """Look again whether a file that was in trouble has been put in order."""
        async with self._file.changing:
            if self.trouble:
                self._take(await asyncio.to_thread(_read, self._path))

    def _take(self, found: tuple[_Entry, ...] | str) -> None:
        self.trouble = found if isinstance(found, str) else ""
        entries = () if isinstance(found, str) else found
        now = self._clock.now()
        self._records = {e.token.id: _Record(e, now) for e in entries}


def _made(records: dict[str, _Record]) -> Callable[[], bytes]:
    """What makes the content of the file."""
    file = _File(tokens=tuple(r.entry for r in records.values()))
    return lambda: msgspec.json.encode(file)


def _over(records: dict[str, _Record]) -> int:
    """How many have to go so that there is room for one more."""
    return max(0, len(records) + 1 - TOKENS_MOST)


def _read(path: str) -> tuple[_Entry, ...] | str:
    """What the file holds, or why it is not to be trusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    except OSError as error:
        return _untrusted(path, f"it cannot be opened: {error.strerror}")
    try:
        why = doubt(os.fstat(descriptor))
        if why:
            return _untrusted(path, why)
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
