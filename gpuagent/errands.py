"""What is done for a command: pausing at once, the rest beside the loop, which waits for none of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from gpuagent.errors import AgentError, Unavailable, Unsupported
from gpuagent.inbox import Letter
from gpuagent.keptfile import Disk, Hung
from gpuagent.leases import Leases
from gpuagent.model.lease import utc
from gpuagent.model.plan import (
    Command,
    DropOverride,
    IssueToken,
    Pause,
    Posture,
    ReleaseGpus,
    Reload,
    ResumeGpus,
    RevokeToken,
    SetOverride,
    Snapshot,
    StartRun,
    Unpause,
)
from gpuagent.model.token import Token
from gpuagent.ports import Gpus, Wake
from gpuagent.runbook import RunBook
from gpuagent.runs import Registrar
from gpuagent.starts import PauseMark
from gpuagent.tokens import TokenBook

_log = structlog.get_logger()


class Errands:
    """Answers every letter. A `Service`: `run` owns the tasks."""

    def __init__(
        self,
        *,
        gpus: Gpus,
        mark: PauseMark,
        leases: Leases,
        tokens: TokenBook | None = None,
        runs: tuple[RunBook, Registrar] | None = None,
        reload: Callable[[str], Coroutine[Any, Any, str]],
        wake: Wake,
        posture: Callable[[], Posture],
        take: Callable[[Posture], None],
        shown: Callable[[], Coroutine[Any, Any, Snapshot | None]],
        tell: Callable[[str, str], None] = lambda _kind, _text: None,
    ) -> None:
        """`tokens` is None where none are kept, `runs` where none can be started. `posture` tells the one in force, `take` replaces it; `reload` reads the configuration.

        `shown` waits for the first picture that was made after now; None if none comes soon.
        `tell` makes an event of a kind and a text: of what leaves no other trace.
        """
        self._gpus = gpus
        self._mark = mark
        self._leases = leases
        self._tokens = tokens
        self._runs = runs
        self._reload = reload
        self._wake = wake
        self._posture = posture
        self._take = take
        self._shown = shown
        self._tell = tell
        self._disk = Disk()
        self._marking = asyncio.Lock()
        """Marks are written off the loop, and in the order in which they were asked for."""
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            runs = None if self._runs is None else self._runs[0]
            books = (self._leases, self._tokens, runs)
            keeping = [group.create_task(book.run()) for book in books if book is not None]
            try:
                await asyncio.Event().wait()
            finally:
                self._group = None
                for task in keeping:
                    task.cancel()

    def obey(self, letter: Letter) -> None:
        """Begin what a command asks; the tick that called goes on at once."""
        command, answer = letter
        _log.info("command", command=type(command).__name__, by=command.by)
        if isinstance(command, Pause):
            # In force before this very tick decides what to write.
            self._change(paused=True)
        if self._group is None:
            _leave_nobody_waiting(answer)
            return
        task = self._group.create_task(self._answer(command, answer))
        task.add_done_callback(lambda _: _leave_nobody_waiting(answer))

    async def _answer(self, command: Command, answer: "asyncio.Future[str]") -> None:
        try:
            said = await self._do(command)
        except AgentError as error:
            _log.warning("command failed", command=type(command).__name__, why=str(error))
            self._wake("a command has failed")
            await self._shown()
            if not answer.done():
                answer.set_exception(error)
            return
        # Answered once a tick has taken it up: who asks next sees what was just done.
        self._wake("a command is done")
        picture = await self._shown()
        if isinstance(command, Pause):
            said = _paused(picture)
        if not answer.done():
            answer.set_result(said)

    async def _do(self, command: Command) -> str:
        match command:
            case Pause(by=by):
                async with self._marking:
                    # Once more: an unpause that came just before it has been carried out since.
                    self._change(paused=True)
                    await self._keep_pause(by)
                return ""
            case Unpause():
                async with self._marking:
                    await self._disk.do(self._mark.clear)
                    self._change(paused=False)
                return f"no longer paused; the configured mode is {self._posture().mode}"
            case Reload(by=by):
                return await self._reload(by)
            case ReleaseGpus():
                # Even if a child hangs and keeps a handle: from here on nothing more is read.
                self._change(released=True)
                await self._gpus.release()
                return "the driver is let go of; `gpuagent resume` takes it up again"
            case ResumeGpus():
                await self._gpus.resume()
                self._change(released=False)
                return "the driver is being taken up again"
            case SetOverride(override=override):
                return await self._leases.set(override)
            case DropOverride(id=name):
                return await self._leases.drop(name)
            case StartRun(ask=ask):
                if self._runs is None:
                    raise Unsupported("this agent starts no runs: its host is a simulated one")
                return await self._runs[1].start(ask)
            case IssueToken(token=token, digest=digest):
                done = await self._book().issue(token, digest)
                self._tell("token-issued", _issued(token))
                return done
            case RevokeToken(id=token_id, by=by):
                done = await self._book().revoke(token_id)
                self._tell("token-revoked", f"token {token_id} is revoked by {by}")
                return done

    async def _keep_pause(self, by: str) -> None:
        """Raises Unavailable where a restart will not remember it."""
        try:
            await self._disk.do(lambda: self._mark.set(by))
        except Hung as error:
            raise Unavailable(f"paused, but a restart may not remember it: {error}") from error

    def _book(self) -> TokenBook:
        if self._tokens is None:
            raise Unsupported("this agent keeps no tokens")
        return self._tokens

    def _change(self, **fields: bool) -> None:
        self._take(msgspec.structs.replace(self._posture(), **fields))


def _issued(token: Token) -> str:
    """All that may be known of a new token: neither its secret nor what is kept of that."""
    return (
        f"token {token.id} is issued by {token.by}, valid until {utc(token.expires_wall)}, "
        f"with the scopes {', '.join(token.scopes)}"
    )


def _leave_nobody_waiting(answer: "asyncio.Future[str]") -> None:
    if not answer.done():
        answer.set_exception(Unavailable("the agent is starting or stopping; try again"))


def _paused(picture: Snapshot | None) -> str:
    if picture is None:
        return "paused; the loop has not turned since, so look again with `gpuagent status`"
    left = sum(o.original is not None for o in picture.outcomes.values())
    if left:
        return f"paused: nothing will be changed, and {left} settings are being put back"
    return "paused: everything is put back, and nothing will be changed"
