"""An agent to talk to: the real server, on a loop of its own in a thread."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import structlog
from click.testing import CliRunner, Result

from gpuagent.cli.main import cli
from gpuagent.model.plan import Snapshot
from tests.expose.scene import Commands, Scene, serving


@contextlib.contextmanager
def agent(snapshot: Snapshot | None, commands: Commands | None = None) -> Iterator[str]:
    """Serves `snapshot`; yields the path of the socket."""
    paths: list[str] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        scene = Scene(snapshot)
        inbox = Commands() if commands is None else commands
        inbox.carry_out = scene.admit
        async with serving(scene, inbox, listen="") as (_, path):
            paths.append(path)
            up.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(20), "the server has not started"
        yield paths[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def run(*words: str, columns: int = 80) -> Result:
    """The command line in this process, on a terminal of that width."""
    try:
        return CliRunner().invoke(cli, words, env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    finally:
        structlog.reset_defaults()  # what a command has set up is not for the tests after it
