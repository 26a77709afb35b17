"""An MPS control daemon of our own: started, proven, and taken down again where it does not work.

A daemon whose server cannot start makes clients fail, where without one they would run (FACTS 3). So
one that was started is asked for a server at once; unless that comes up, the daemon is ended.
"""

import asyncio
import contextlib
import os

from gpuagent.config import MpsGroup
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.host.mps_control import Control
from gpuagent.host.mps_keeper import Keeper

_ANSWER_SECONDS = 5.0
_PROOF_SECONDS = 15.0
_STANDS_SECONDS = 1.0
"""A server that fails is listed for 15 ms (FACTS 3): one that is still there has not."""
_QUIT_SECONDS = 1.0
_END_SECONDS = 4.0
_POLL_SECONDS = 0.05


class OwnDaemon:
    """The daemon of one group."""

    def __init__(
        self, group: MpsGroup, control: Control, keeper: Keeper, *, proof: float = _PROOF_SECONDS
    ) -> None:
        """`proof` is how long a server may take to come up, in seconds."""
        self._group = group
        self._control = control
        self._keeper = keeper
        self._proof = proof

    async def running(self) -> bool:
        """Whether a daemon answers, whoever has started it."""
        try:
            await self._control.servers()
        except Gone:
            return False
        return True

    async def start(self) -> None:
        """Start it and prove it. Raises Unsupported where it has no working server, or as the keeper."""
        if await self.running():
            return
        try:
            await self._keeper.begin(self._group)
            await self._answers()
            await self._prove()
        except (AgentError, asyncio.CancelledError) as error:
            taken = await self._take_down()
            if isinstance(error, AgentError):
                raise type(error)(f"{error}; {taken}") from error
            raise

    async def stop(self) -> None:
        """End it unless it has clients; then Refused. What is connecting just now it waits for."""
        clients = [c for s in await self._control.servers() for c in await self._clients(s)]
        if clients:
            listed = ", ".join(map(str, clients[:5]))
            raise Refused(
                f"it has {len(clients)} clients (pid {listed}) and is not ended under them"
            )
        # A client that has come since ends before the daemon does: `quit` takes no more of them.
        with contextlib.suppress(Unavailable):
            await self._control.ask("quit")
        if not await self._gone(_QUIT_SECONDS):
            raise Unavailable("it has been told to end, and waits for its last client")

    async def _answers(self) -> None:
        for _ in range(round(_ANSWER_SECONDS / _POLL_SECONDS)):
            if await self.running():
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise Unavailable(f"it does not answer within {_ANSWER_SECONDS:g} s")

    async def _prove(self) -> None:
        """See a server come up, then end it: the next one takes the defaults that are set by then."""
        now = asyncio.get_running_loop().time
        before = now()
        if not await self._control.servers():
            await self._control.ask(f"start_server -uid {os.geteuid()}")
        while now() - before < self._proof:
            servers = await self._control.servers()
            if not servers:
                raise Unsupported("its server cannot start, so that every client would fail")
            state = await self._state(servers[0])
            if state == "FAULT":
                raise Unsupported("its server starts with a fault")
            if state == "ACTIVE" or (not state and now() - before >= _STANDS_SECONDS):
                await self._retire(servers[0])
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise Unsupported(f"its server is not ready after {self._proof:g} s")

    async def _state(self, server: int) -> str:
        """Empty where the daemon knows no states."""
        try:
            return await self._control.state(server)
        except Unsupported:
            return ""
        except Gone:
            return "FAULT"

    async def _retire(self, server: int) -> None:
        if not await self._clients(server):
            await self._control.ask(f"shutdown_server {server}")

    async def _clients(self, server: int) -> tuple[int, ...]:
        try:
            return await self._control.clients(server)
        except Gone:
            return ()

    async def _take_down(self) -> str:
        """End a daemon that does not work: whoever is connected to it has failed already."""
        with contextlib.suppress(AgentError):
            await self._control.ask("quit -t 1")
        if await self._gone(_END_SECONDS):
            return "it has been taken down"
        try:
            await self._keeper.end(self._group)
        except AgentError as error:
            return f"and it cannot be taken down: {error}"
        return "it has been taken down"

    async def _gone(self, seconds: float) -> bool:
        for _ in range(round(seconds / _POLL_SECONDS)):
            with contextlib.suppress(Unavailable):
                if not await self.running():
                    return True
            await asyncio.sleep(_POLL_SECONDS)
        return False
