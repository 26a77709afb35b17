"""What single rungs need of others, for `gpuagent check`: which of it the configuration asks for."""

import asyncio
import os
from collections.abc import Iterator, Sequence

from gpuagent.config import Config
from gpuagent.host import tools
from gpuagent.host.offers import Offer
from gpuagent.model.inventory import Level, MpsDaemon

_BOOTED = "/run/systemd/system"


def needs(config: Config) -> frozenset[str]:
    """Names of the offers below that this configuration asks for."""
    levers = {lever for rule in config.tenants for lever in rule.levers}
    wanted = {f"MPS group {group.name}" for group in config.mps.groups if not group.own}
    if config.mps.groups:
        wanted.add(tools.MPS)
    if "suspend" in levers:
        wanted.add(tools.CHECKPOINT)
    if "freeze" in levers:
        wanted.add(tools.FREEZER)
    if any(card.time_slice for card in config.cards):
        wanted.add(tools.NVIDIA_SMI)
    if config.mode == "enforce" and os.path.isdir(_BOOTED):
        wanted.add(tools.UNITS)
    return frozenset(wanted)


def look(config: Config, driver: str) -> list[Offer]:
    """Programs and interfaces of others. `driver` is the driver's version, empty for none."""
    booted = os.path.isdir(_BOOTED)
    return [
        tools.mps(config),
        *_groups(config),
        tools.checkpoint(config, driver),
        tools.nvidia_smi(config),
        tools.freezer(config.paths.cgroup_root),
        tools.units(asyncio.run(_bus_trouble()) if booted else "", booted=booted),
    ]


async def _bus_trouble() -> str:
    from gpuagent.clock import SystemClock
    from gpuagent.errors import AgentError
    from gpuagent.host.units import SystemdUnits

    units = SystemdUnits(clock=SystemClock(), own_slice="", cgroup_root="")
    manager = "org.freedesktop.systemd1.Manager"
    try:
        await units.bus.ask(
            "/org/freedesktop/systemd1",
            "org.freedesktop.DBus.Properties",
            "Get",
            "ss",
            manager,
            "Version",
        )
    except AgentError as error:
        return str(error)
    finally:
        units.close()
    return ""


def _groups(config: Config) -> list[Offer]:
    if not config.mps.groups:
        return []
    from gpuagent.host.mps import MpsDaemons

    found = asyncio.run(MpsDaemons(config.mps).daemons())
    own = {group.name for group in config.mps.groups if group.own}
    enforce = config.mode == "enforce"
    return [
        tools.daemon(one, own=one.name in own, enforce=enforce, mixed=tuple(mixed(config, one)))
        for one in found
    ]


def mixed(config: Config, daemon: MpsDaemon) -> Iterator[str]:
    """Of each L1 tenant with whom it shares a server of this daemon now."""
    owners = _owners(config, [c.pid for c in daemon.clients])
    for server in daemon.servers:
        here = {owners[c.pid] for c in daemon.clients if c.server == server.pid}
        for name, level in sorted(here):
            others = [f"{n} ({lv.name})" for n, lv in sorted(here) if n != name]
            if level is Level.L1 and others:
                yield f"{name} (L1) shares server {server.pid} with {', '.join(others)}"


def _owners(config: Config, pids: Sequence[int]) -> dict[int, tuple[str, Level]]:
    from gpuagent.errors import AgentError
    from gpuagent.host.procfs import ProcTable
    from gpuagent.sense.tenancy import Rules

    rules, table = Rules(config.tenants), ProcTable()
    owners = {}
    for pid in pids:
        try:
            rule = rules.claim(table.read(pid))
        except AgentError:
            rule = None
        owners[pid] = (f"pid {pid}", config.found.sla) if rule is None else (rule.name, rule.sla)
    return owners
