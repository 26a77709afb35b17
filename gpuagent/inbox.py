"""Where commands wait for the next tick, and how their senders learn what came of them."""

import asyncio
from collections import deque
from collections.abc import Iterator

from gpuagent.errors import Unavailable
from gpuagent.model.plan import Command
from gpuagent.ports import Wake

_ROOM = 64

Letter = tuple[Command, "asyncio.Future[str]"]


class Inbox:
    """A bounded queue of commands. Each is answered with a sentence, or an error of ours."""

    def __init__(self, wake: Wake) -> None:
        self._letters: deque[Letter] = deque()
        self._wake = wake

    async def submit(self, command: Command) -> str:
        """Hand a command in and wait for its answer. Raises Unavailable when the inbox is full."""
        if len(self._letters) >= _ROOM:
            raise Unavailable(f"{_ROOM} commands are waiting already; try again in a moment")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._letters.append((command, answer))
        self._wake(f"command from {command.by}")
        return await answer

    def drain(self) -> Iterator[Letter]:
        """The commands that have come since, oldest first, without those given up meanwhile."""
        while self._letters:
            letter = self._letters.popleft()
            if not letter[1].done():
                yield letter
