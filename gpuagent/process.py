"""The daemon as a process: a configuration file in, an exit code out, and nothing left behind."""

import asyncio
import os
from typing import NoReturn

import msgspec
import structlog

from gpuagent import log, trail
from gpuagent.act.restore import Occasion
from gpuagent.act.statedir import hold
from gpuagent.configfile import Loaded, load
from gpuagent.daemon import EX_BUG, Agent, tell
from gpuagent.rescue import put_back_at

_log = structlog.get_logger()


def run(config_path: str) -> NoReturn:
    """The daemon, which ends the process.

    Raises ConfigError; Refused where another agent runs, or where no books can be kept.
    """
    loaded = load(config_path)
    log.setup(level=loaded.config.log.level, form=loaded.config.log.format)
    for warning in loaded.warnings:
        _log.warning("configuration", why=warning)
    _clean_up_elsewhere(loaded)
    with hold(loaded.config.paths.state_dir):
        code = asyncio.Runner().run(_run(loaded))
        # All is put back. A thread that hangs in a call to the host must not keep us from ending, as
        # closing the loop, which waits for its threads, would let it.
        log.flush()
        os._exit(code)


def _clean_up_elsewhere(loaded: Loaded) -> None:
    """Put back what the run before left in books that this configuration no longer names."""
    paths = loaded.config.paths
    earlier = trail.left(paths)
    if earlier is None or (earlier.state_dir, earlier.cgroup_root) == (
        paths.state_dir,
        paths.cgroup_root,
    ):
        return
    _log.warning(
        "the run before used other paths: what it left is put back first",
        state_dir=earlier.state_dir,
        cgroup_root=earlier.cgroup_root,
    )
    tell(put_back_at(msgspec.structs.replace(loaded.config, paths=earlier), Occasion.BY_HAND))


async def _run(loaded: Loaded) -> int:
    agent = Agent(loaded)
    code = EX_BUG
    try:
        code = await agent.run()
    except* Exception as failure:  # noqa: BLE001  (the outermost frame: a fault ends the run)
        code = agent.failed(failure)
    return code
