"""The control daemon of CUDA MPS for a group of simulated cards, as the classic one ("v2") answers.

No command changes a running client (FACTS 3): what a server allows is read when a client starts. A
default is for the next server; a server's own value is for its later clients. Commands are named as
the daemon names them; where it says that there is no such server or client, these raise Gone.
"""

from collections.abc import Callable, Mapping

import msgspec

from gpuagent.errors import Gone
from gpuagent.sim.profiles import MpsProfile

_MIB = 2**20


class Client(msgspec.Struct, frozen=True):
    """A process that uses a card through MPS, and what it started with."""

    pid: int
    ordinal: int
    """Of its card, among those of the daemon."""
    percentage: float
    """Its active thread percentage: a ceiling, not a reservation."""
    memory_limit_bytes: int | None
    """Device memory it may have, its context included; None for as much as there is."""


class Environment(msgspec.Struct, frozen=True):
    """What a client's own environment says. It can only tighten what its server allows."""

    percentage: float | None = None
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE."""
    memory_limit_bytes: int | None = None
    """CUDA_MPS_PINNED_DEVICE_MEM_LIMIT."""


class _Server:
    """The process that works for all clients of one user."""

    def __init__(self, pid: int, percentage: float, limits: Mapping[int, int]) -> None:
        self.pid = pid
        self.percentage = percentage
        self.limits = dict(limits)


class SimMps:
    """One control daemon. It starts its server with the first client, and keeps it.

    `start_server` makes that process and says its pid; `end_work` takes a client off its card.
    """

    def __init__(
        self,
        profile: MpsProfile,
        cards: tuple[int, ...],
        *,
        start_server: Callable[[], int],
        end_work: Callable[[int], None],
    ) -> None:
        self.cards = cards
        """Indices of its cards; a card's place in here is its ordinal."""
        self.clients: dict[int, Client] = {}
        """Those connected, by pid."""
        self._contexts = int(profile.contexts_per_card.value)
        self._start_server = start_server
        self._end_work = end_work
        self._percentage = 100.0
        self._limits: dict[int, int] = {}
        self._server: _Server | None = None

    # -- what the daemon is asked ---------------------------------------------------------------------

    def get_default_active_thread_percentage(self) -> float:
        """Percentage with which the next server starts."""
        return self._percentage

    def set_default_active_thread_percentage(self, percentage: float) -> float:
        """The value now in force: the old one where this is not over 0 and at most 100."""
        self._percentage = _allowed(percentage, self._percentage)
        return self._percentage

    def get_active_thread_percentage(self, server: int) -> float:
        """What the next client of a server gets. Raises Gone."""
        return self._found(server).percentage

    def set_active_thread_percentage(self, server: int, percentage: float) -> float:
        """For later clients of this server; answers as the default does. Raises Gone."""
        found = self._found(server)
        found.percentage = _allowed(percentage, found.percentage)
        return found.percentage

    def get_default_device_pinned_mem_limit(self, ordinal: int) -> int | None:
        """Bytes for each client of the next server on this card; None for no limit."""
        return self._limits.get(ordinal)

    def set_default_device_pinned_mem_limit(self, ordinal: int, limit: int) -> None:
        """Answers nothing: read it back. Kept in whole MiB; nothing changes for no such card."""
        if ordinal < len(self.cards):
            self._limits[ordinal] = limit // _MIB * _MIB

    def get_device_pinned_mem_limit(self, server: int, ordinal: int) -> int | None:
        """Raises Gone."""
        return self._found(server).limits.get(ordinal)

    def set_device_pinned_mem_limit(self, server: int, ordinal: int, limit: int) -> None:
        """For later clients of this server. Raises Gone."""
        found = self._found(server)
        if ordinal < len(self.cards):
            found.limits[ordinal] = limit // _MIB * _MIB

    def get_server_list(self) -> tuple[int, ...]:
        """Pids of the servers; empty before the first client."""
        return () if self._server is None else (self._server.pid,)

    def get_client_list(self, server: int) -> tuple[int, ...]:
        """Pids of its clients. Raises Gone."""
        self._found(server)
        return tuple(self.clients)

    def terminate_client(self, server: int, client: int) -> None:
        """End a client's work on its card; its process lives on. Raises Gone."""
        self._found(server)
        if client not in self.clients:
            raise Gone(f"Client {client} not found")
        self._end_work(client)
        self.leave(client)

    def _found(self, server: int) -> _Server:
        if self._server is None or self._server.pid != server:
            raise Gone(f"Server {server} not found")
        return self._server

    # -- what clients do ------------------------------------------------------------------------------

    def connect(self, pid: int, card: int, environment: Environment) -> Client | None:
        """A process starts to use a card; None where the card has all the contexts it can have."""
        ordinal = self.cards.index(card)
        if self._server is None:
            self._server = _Server(self._start_server(), self._percentage, self._limits)
        if sum(c.ordinal == ordinal for c in self.clients.values()) >= self._contexts:
            return None
        own, most = environment.memory_limit_bytes, self._server.limits.get(ordinal)
        limits = [limit for limit in (own, most) if limit is not None]
        client = self.clients[pid] = Client(
            pid=pid,
            ordinal=ordinal,
            percentage=min(environment.percentage or 100.0, self._server.percentage),
            memory_limit_bytes=min(limits, default=None),
        )
        return client

    def set_defaults(self, percentage: float | None, memory_limit: int | None) -> None:
        """What the next server begins with, on all its cards; None for as it is."""
        if percentage is not None:
            self.set_default_active_thread_percentage(percentage)
        if memory_limit is not None:
            for ordinal in range(len(self.cards)):
                self.set_default_device_pinned_mem_limit(ordinal, memory_limit)

    def leave(self, pid: int) -> None:
        """A client is no more, if it was one."""
        self.clients.pop(pid, None)


def _allowed(percentage: float, before: float) -> float:
    return percentage if 0.0 < percentage <= 100.0 else before
