"""MPS as values that a test sets: what the agent is told of daemons, and what it has asked for."""

from collections.abc import Sequence

import msgspec

from gpuagent.errors import AgentError, Gone, Refused
from gpuagent.model.inventory import MpsClient, MpsDaemon, MpsServer
from gpuagent.ports import Mps


class FakeMps:
    """Daemons by name; those in `own` can be started and stopped."""

    def __init__(self, *daemons: MpsDaemon) -> None:
        self.all = {d.name: d for d in daemons}
        self.own: set[str] = set()
        self.ended: list[int] = []
        """Clients that were ended."""
        self.asked = 0
        self.fails: AgentError | None = None
        """What `start` raises."""

    def put(self, daemon: MpsDaemon) -> None:
        self.all[daemon.name] = daemon

    async def daemons(self) -> Sequence[MpsDaemon]:
        self.asked += 1
        return list(self.all.values())

    async def default_threads(self, name: str) -> float:
        ratio = self._up(name).default_threads_ratio
        assert ratio is not None
        return ratio

    async def set_default_threads(self, name: str, ratio: float) -> None:
        found = self._up(name)
        self.put(msgspec.structs.replace(found, default_threads_ratio=ratio))

    async def running(self, name: str) -> bool:
        return self._found(name).up

    async def start(self, name: str) -> None:
        if self.fails is not None:
            raise self.fails
        self.put(msgspec.structs.replace(self._found(name), up=True, default_threads_ratio=1.0))

    async def stop(self, name: str) -> None:
        if self._found(name).clients:
            raise Refused("it has clients")
        self.put(msgspec.structs.replace(self._found(name), up=False))

    def place(self, name: str) -> str:
        return self._found(name).pipe_directory

    def recall(self, name: str, place: str) -> None:
        if name not in self.all:
            self.put(MpsDaemon(name, up=True, default_threads_ratio=1.0, pipe_directory=place))

    async def terminate_client(self, pid: int) -> bool:
        found = False
        for daemon in list(self.all.values()):
            left = tuple(c for c in daemon.clients if c.pid != pid)
            found |= len(left) < len(daemon.clients)
            self.put(msgspec.structs.replace(daemon, clients=left))
        if found:
            self.ended.append(pid)
        return found

    def _found(self, name: str) -> MpsDaemon:
        if name not in self.all:
            raise Gone(f"no MPS group is called {name}")
        return self.all[name]

    def _up(self, name: str) -> MpsDaemon:
        found = self._found(name)
        if not found.up:
            raise Gone(f"no MPS control daemon of {name} runs")
        return found


def daemon(
    name: str = "g",
    *,
    clients: dict[int, int] | None = None,
    states: dict[int, str] | None = None,
    gpus: tuple[str, ...] = (),
    default: float = 1.0,
) -> MpsDaemon:
    """A daemon that is up: `clients` are servers by the pid of the client, `states` are by server."""
    on = clients or {}
    known = dict.fromkeys(sorted(set(on.values())), "ACTIVE") | (states or {})
    return MpsDaemon(
        name,
        up=True,
        servers=tuple(MpsServer(pid, state, 1.0) for pid, state in known.items()),
        clients=tuple(MpsClient(pid, server, 1.0) for pid, server in on.items()),
        default_threads_ratio=default,
        pipe_directory=f"/mps/{name}",
        gpus=gpus,
    )


_fits: Mps = FakeMps()
"""mypy looks."""
