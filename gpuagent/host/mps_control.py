"""One MPS control daemon, asked through its control program: a process for each command, one at a time.

This is the classic interface ("v2"): a command on standard input, the daemon's answer on standard
output. What a later interface asks otherwise has its place in another class with this `ask`.
"""

import asyncio
import os
import stat
from collections.abc import Mapping

from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host import mps_replies, tool

COMMAND_SECONDS = 3.0
"""A command takes 2 to 5 ms; one that takes this long has met a daemon that hangs."""
_SOCKET = "control"
_LONGEST_SOCKET = "control_privileged"
SOCKET_BYTES_MOST = 100
"""A longer path fails without a word (FACTS 3)."""
_KEPT_BYTES = 1 << 16
"""Of an answer. The longest lists pids, some hundreds of them at most."""
_NO_DAEMON = "Cannot find MPS control daemon process"
_SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def too_long(pipe_directory: str) -> str:
    """Why no daemon can be reached there; empty where one can."""
    path = os.path.join(pipe_directory, _LONGEST_SOCKET)
    if len(os.fsencode(path)) <= SOCKET_BYTES_MOST:
        return ""
    return f"{path} is longer than {SOCKET_BYTES_MOST} bytes: MPS could not be reached there"


def environment(pipe_directory: str, path: str | None = None) -> dict[str, str]:
    """What the control program is started with: nothing of the agent's own but where to look."""
    return {
        "PATH": path or os.environ.get("PATH", _SEARCHED),
        "LC_ALL": "C",
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory,
    }


class Control:
    """The daemon of one pipe directory."""

    def __init__(
        self, program: str, pipe_directory: str, *, seconds: float = COMMAND_SECONDS
    ) -> None:
        self.pipe_directory = pipe_directory
        self._program = program
        self._seconds = seconds
        self._one = asyncio.Lock()
        self._lacks: set[str] = set()
        """Commands that the daemon which made the socket below does not know."""
        self._socket: tuple[int, int] | None = None

    async def ask(self, command: str) -> str:
        """The daemon's answer to one command, which may be empty.

        Raises Gone (no daemon), Unsupported (no program; a command it does not know), Refused (not
        one to be trusted, or no path for a socket), Unavailable (no answer in time).
        """
        word = command.split(maxsplit=1)[0]
        self._look()
        if word in self._lacks:
            raise Unsupported(f"this MPS control daemon knows no {word}")
        async with self._one:
            code, out, complaint = await run(
                (self._program,),
                environment(self.pipe_directory),
                said=f"{command}\n",
                seconds=self._seconds,
            )
        if code and word != "quit":
            if _NO_DAEMON in complaint:
                raise Gone(f"no MPS control daemon runs in {self.pipe_directory}")
            raise Unavailable(f"{self._program} ends with {code}: {complaint or 'no word'}")
        if out.startswith("Unknown command"):
            self._lacks.add(word)
            raise mps_replies.trouble(out)
        return out

    async def servers(self) -> tuple[int, ...]:
        """Pids. Raises as `ask`, as all of these."""
        return mps_replies.pids(await self.ask("get_server_list"))

    async def clients(self, server: int) -> tuple[int, ...]:
        """Pids of a server's clients. Gone also where there is no such server."""
        return mps_replies.pids(await self.ask(f"get_client_list {server}"))

    async def state(self, server: int) -> str:
        """State of a server. Unsupported before 550. Gone as above."""
        return mps_replies.state(await self.ask(f"get_server_status {server}"))

    async def threads(self, server: int) -> float | None:
        """Ceiling for a server's later clients; None of one that does not say yet. Gone as above."""
        reply = await self.ask(f"get_active_thread_percentage {server}")
        return mps_replies.percentage(reply) if reply else None

    async def default_threads(self) -> float:
        return mps_replies.percentage(await self.ask("get_default_active_thread_percentage"))

    async def set_default_threads(self, ratio: float) -> None:
        """Refused where the daemon keeps another value, whatever it answers."""
        percent = mps_replies.percent_text(ratio)
        mps_replies.percentage(await self.ask(f"set_default_active_thread_percentage {percent}"))
        kept = mps_replies.percent_text(await self.default_threads())
        if kept != percent:
            raise Refused(f"the MPS control daemon keeps {kept} % and takes no {percent} %")

    async def memory_limit(self, ordinal: int) -> int | None:
        """Device memory in bytes for each client of the next server; None for no limit."""
        return mps_replies.size(await self.ask(f"get_default_device_pinned_mem_limit {ordinal}"))

    async def set_memory_limit(self, ordinal: int, limit: int) -> None:
        """Refused where the daemon would keep, or keeps, another value."""
        text = mps_replies.size_text(limit, ordinal)
        mps_replies.silence(await self.ask(f"set_default_device_pinned_mem_limit {text}"))
        kept = await self.memory_limit(ordinal)
        if kept != limit:
            raise Refused(f"the MPS control daemon keeps {kept} bytes and takes no {limit}")

    def _look(self) -> None:
        """See that a daemon of root's, or of our own user, may be there: root is to obey no other's."""
        if why := too_long(self.pipe_directory):
            raise Refused(why)
        path = os.path.join(self.pipe_directory, _SOCKET)
        try:
            folder, found = os.stat(self.pipe_directory), os.lstat(path)
        except FileNotFoundError as error:
            raise Gone(f"no MPS control daemon runs in {self.pipe_directory}") from error
        except OSError as error:
            raise Gone(f"no MPS control daemon runs: {path}: {error.strerror}") from error
        for one, what in ((folder, self.pipe_directory), (found, path)):
            if one.st_uid not in {0, os.geteuid()}:
                raise Refused(f"{what} belongs to user {one.st_uid}: only root's MPS is asked")
        if not stat.S_ISSOCK(found.st_mode):
            raise Refused(f"{path} is no socket")
        # One that was started anew has made it anew, and may know other commands.
        made = (found.st_ino, found.st_ctime_ns)
        if made != self._socket:
            self._socket = made
            self._lacks.clear()


async def run(
    command: tuple[str, ...], env: Mapping[str, str], *, said: str = "", seconds: float
) -> tuple[int, str, str]:
    """Exit code, standard output and what it complains of, on one line.

    Raises Unsupported (no such program), Refused, Unavailable.
    """
    program = tool.find(command[0], "it is the control program of MPS, set [mps] control")
    ran = await tool.run(
        (program, *command[1:]), seconds=seconds, said=said, env=env, apart=True, kept=_KEPT_BYTES
    )
    if ran.code is None:
        raise Unavailable(f"{command[0]} has not answered within {seconds:g} s")
    if not ran.whole:
        raise Unavailable(f"{command[0]} answers without end")
    return ran.code, ran.text, " ".join(ran.complaint.split())[:200]
