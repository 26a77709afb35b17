"""CUDA MPS on this host: the control daemons that are configured, asked and, where they are ours, kept.

Implements `ports.Mps` for the classic control interface (see `mps_control`). A daemon that is not ours
is only read, but for the values that are set.
"""

import asyncio
import os
from collections.abc import Callable, Sequence

import msgspec

from gpuagent import config
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.host.mps_clients import Starts
from gpuagent.host.mps_control import Control
from gpuagent.host.mps_keeper import Detached, Keeper, Unit
from gpuagent.host.mps_own import OwnDaemon
from gpuagent.model.inventory import MpsClient, MpsDaemon, MpsServer

UNIT_FOLDER = "/run/gpuagent-mps"
"""As the template `gpuagent-mps@.service` says: it outlives the agent, as the daemons do."""
LOG_FOLDER = "/var/log/gpuagent-mps"
_SYSTEMD = "/run/systemd/system"
"""There while systemd runs the host (sd_booted(3))."""
_TERMINATE_TRIES = 40
_TERMINATE_POLL_SECONDS = 0.1


def keeper(program: str) -> Keeper:
    """What this host keeps daemons with."""
    if os.path.isdir(_SYSTEMD):
        return Unit(program, folder=UNIT_FOLDER, logs=LOG_FOLDER)
    return Detached(program, logs=LOG_FOLDER)


class _Daemon:
    """A group and what is known of its daemon."""

    def __init__(self, group: config.MpsGroup, program: str, keeper: Keeper, proc: str) -> None:
        self.made_of = (group, program)
        self.group = group
        self.control = Control(program, group.pipe_directory)
        self.own = OwnDaemon(group, self.control, keeper)
        self.starts = Starts(proc)


class MpsDaemons:
    """Implements `ports.Mps`."""

    def __init__(
        self,
        settings: config.Mps,
        *,
        kept_by: Callable[[str], Keeper] = keeper,
        proc: str = "/proc",
    ) -> None:
        self._kept_by = kept_by
        self._proc = proc
        self._daemons: dict[str, _Daemon] = {}
        self._former: dict[str, _Daemon] = {}
        """Those that are configured no longer: what was set of them can still be put back."""
        self.reconfigure(settings)

    def reconfigure(self, settings: config.Mps) -> None:
        """Know these daemons from now on. What is the same as before goes on as it was."""
        before = self._former | self._daemons
        keeper, self._daemons = self._kept_by(settings.control), {}
        for group in settings.groups:
            known = before.get(group.name)
            if known is None or known.made_of != (group, settings.control):
                known = _Daemon(group, settings.control, keeper, self._proc)
            self._daemons[group.name] = known
        self._former = {n: d for n, d in before.items() if n not in self._daemons}
        self._program, self._keeper = settings.control, keeper

    # -- what is asked -------------------------------------------------------------------------------

    async def daemons(self) -> Sequence[MpsDaemon]:
        return await asyncio.gather(*(_read(d) for d in self._daemons.values()))

    async def default_threads(self, name: str) -> float:
        return await self._found(name).control.default_threads()

    async def set_default_threads(self, name: str, ratio: float) -> None:
        await self._found(name).control.set_default_threads(ratio)

    async def running(self, name: str) -> bool:
        found = self._found(name)
        running = await found.own.running()
        # Of one that is configured no longer it is known no more than where it is.
        if running and found.group.own and name in self._daemons:
            self._keeper.running(found.group)
        return running

    async def start(self, name: str) -> None:
        found = self._found(name)
        if not found.group.own:
            raise Refused(f"the MPS group {name} is not the agent's own to start")
        await found.own.start()

    async def stop(self, name: str) -> None:
        await self._found(name).own.stop()

    def place(self, name: str) -> str:
        return self._found(name).group.pipe_directory

    def recall(self, name: str, place: str) -> None:
        if name not in self._daemons and name not in self._former:
            group = config.MpsGroup(name, pipe_directory=place, own=True)
            self._former[name] = _Daemon(group, self._program, self._keeper, self._proc)

    async def terminate_client(self, pid: int) -> bool:
        found = False
        for daemon in self._daemons.values():
            try:
                servers = await daemon.control.servers()
            except (Gone, Unsupported, Refused):
                # None runs there, or one of somebody's own, which is not asked: whoever could bind that
                # socket would else decide that nobody on this host may be ended.
                continue
            for server in servers:
                found |= await _terminate(daemon.control, server, pid)
        return found

    def _found(self, name: str) -> _Daemon:
        found = self._daemons.get(name) or self._former.get(name)
        if found is None:
            raise Gone(f"no MPS group is called {name}")
        return found


async def _read(daemon: _Daemon) -> MpsDaemon:
    group, control = daemon.group, daemon.control
    told = MpsDaemon(group.name, up=False, pipe_directory=group.pipe_directory, gpus=group.gpus)
    try:
        default = await control.default_threads()
        listed = await control.servers()
    except AgentError as error:
        return msgspec.structs.replace(told, why=str(error))
    servers: list[MpsServer] = []
    clients: list[MpsClient] = []
    amiss = ""
    for pid in listed:
        try:
            server = MpsServer(pid, await _state(control, pid), await control.threads(pid))
            here = await control.clients(pid)
        except Gone:
            continue  # it has ended since it was listed
        except AgentError as error:
            amiss = str(error)
            continue
        servers.append(server)
        clients += (daemon.starts.client(c, pid, server.threads_ratio) for c in here)
    daemon.starts.keep(clients)
    return msgspec.structs.replace(
        told,
        up=True,
        why=amiss,
        servers=tuple(servers),
        clients=tuple(clients),
        default_threads_ratio=default,
    )


async def _state(control: Control, server: int) -> str:
    try:
        return await control.state(server)
    except Unsupported:
        return ""


async def _terminate(control: Control, server: int, pid: int) -> bool:
    """Whether it was a client of this server. Raises Unavailable where it still is."""
    try:
        if pid not in await control.clients(server):
            return False
    except Gone:
        return False
    try:
        # Its answer is not settled between versions: the list of clients is what counts.
        await control.ask(f"terminate_client {server} {pid}")
        for _ in range(_TERMINATE_TRIES):
            if pid not in await control.clients(server):
                return True
            await asyncio.sleep(_TERMINATE_POLL_SECONDS)
    except Gone:
        return True  # the server has ended, and its clients' work with it
    raise Unavailable(f"process {pid} is still a client of MPS server {server}")
