"""The simulated control daemons of MPS, asked as the agent asks real ones (`ports.Mps`)."""

from collections.abc import Sequence

from gpuagent.errors import Gone, Refused
from gpuagent.model.inventory import MpsClient, MpsDaemon, MpsServer
from gpuagent.sim.mps import SimMps


def name_of(index: int) -> str:
    """What the daemon of this group of the scenario is called."""
    return f"mps-{index}"


class SimMpsControl:
    """Implements `ports.Mps`. Daemons are there from the beginning; none is the agent's own."""

    def __init__(self, daemons: Sequence[SimMps], uuids: Sequence[str]) -> None:
        """`uuids` are those of all cards, by index."""
        self._daemons = {name_of(i): daemon for i, daemon in enumerate(daemons)}
        self._uuids = uuids

    async def daemons(self) -> Sequence[MpsDaemon]:
        return [self._told(name, daemon) for name, daemon in self._daemons.items()]

    def _told(self, name: str, daemon: SimMps) -> MpsDaemon:
        servers = daemon.get_server_list()
        return MpsDaemon(
            name,
            up=True,
            servers=tuple(
                MpsServer(pid, "ACTIVE", daemon.get_active_thread_percentage(pid) / 100)
                for pid in servers
            ),
            clients=tuple(
                MpsClient(c.pid, pid, c.percentage / 100)
                for pid in servers
                for c in daemon.clients.values()
            ),
            default_threads_ratio=daemon.get_default_active_thread_percentage() / 100,
            gpus=tuple(self._uuids[i] for i in daemon.cards),
        )

    async def default_threads(self, name: str) -> float:
        return self._found(name).get_default_active_thread_percentage() / 100

    async def set_default_threads(self, name: str, ratio: float) -> None:
        wanted = round(ratio * 100, 1)
        if self._found(name).set_default_active_thread_percentage(wanted) != wanted:
            raise Refused(f"{wanted} % is not taken")

    async def running(self, name: str) -> bool:
        self._found(name)
        return True

    async def start(self, name: str) -> None:
        self._found(name)

    async def stop(self, name: str) -> None:
        raise Refused(f"{name} is not the agent's own")

    def place(self, name: str) -> str:
        self._found(name)
        return name

    def recall(self, name: str, place: str) -> None:
        pass

    async def terminate_client(self, pid: int) -> bool:
        found = False
        for daemon in self._daemons.values():
            for server in daemon.get_server_list():
                if pid in daemon.clients:
                    daemon.terminate_client(server, pid)
                    found = True
        return found

    def _found(self, name: str) -> SimMps:
        if name not in self._daemons:
            raise Gone(f"no MPS group is called {name}")
        return self._daemons[name]
