"""`gpuagent check`: what this host offers, what the configuration needs of it, and how to get that."""

import asyncio

import click

from gpuagent.cli import tools
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import DEFAULT_CONFIG, Options, absolute, common
from gpuagent.cli.show import emit, say
from gpuagent.config import Config
from gpuagent.host import offers
from gpuagent.host.nvml_probe import probe
from gpuagent.host.offers import Offer


@click.command(epilog=CODES)
@common
def check() -> None:
    """Say what this host offers, what is missing, and how to get it.

    Each endpoint that the configuration names with latency_from is asked once. Exits with 1 if
    something is missing that the configuration needs. The agent need not run.
    """
    options = Options.current()
    config, said = _config(options.config)
    found = look(config)
    wanted = needs(config)
    short = [o for o in found if o.name in wanted and o.state != "ok"]
    if options.json:
        emit(
            {
                "config": said,
                "ok": not short,
                "offers": [
                    {
                        "name": o.name,
                        "state": o.state,
                        "needed": o.name in wanted,
                        "what": o.what,
                        "remedy": o.remedy,
                    }
                    for o in found
                ],
            }
        )
    else:
        say(f"Checked for {said}.")
        for offer in found:
            _say_offer(offer, needed=offer.name in wanted)
        names = ", ".join(o.name for o in short)
        say(f"Needed and not there: {names}." if short else "Everything that is needed is there.")
    click.get_current_context().exit(Exit.PROBLEM if short else Exit.OK)


def _config(path: str) -> tuple[Config, str]:
    """The configuration to check for, and its description. Raises Failure if it is invalid."""
    import os

    from gpuagent.configfile import load
    from gpuagent.errors import ConfigError

    path = absolute(path)
    if path == DEFAULT_CONFIG and not os.path.exists(path):
        return Config(), "the default configuration"
    try:
        return load(path).config, path
    except ConfigError as error:
        raise Failure(Exit.USAGE, str(error)) from error


def needs(config: Config) -> frozenset[str]:
    """Names of the offers without which this configuration does not do what it says."""
    always = frozenset({"NVML", "cgroup v2"} if config.mode == "enforce" else {"NVML"})
    return always | tools.needs(config)


def look(config: Config) -> list[Offer]:
    """All that this host offers."""
    driver = asyncio.run(probe(config.paths.nvml_library))
    return [
        offers.nvml(driver),
        offers.cgroups(config.paths.cgroup_root),
        offers.pressure(),
        offers.netlink(),
        offers.kernel_log(config.paths.kernel_log),
        offers.systemd(),
        *tools.look(config, driver.driver),
        *_latencies(config),
    ]


def _latencies(config: Config) -> list[Offer]:
    """Whether the metrics that latencies are to be read from can be, each asked once."""
    rules = [rule for rule in config.tenants if rule.latency_from is not None]
    if not rules:
        return []
    # What fetches a page costs this command a third of a second to have at hand.
    from gpuagent.host.pages import HttpPages
    from gpuagent.sense.sources import trouble

    async def ask() -> list[str]:
        pages = HttpPages()
        try:
            return list(await asyncio.gather(*(trouble(rule, pages) for rule in rules)))
        finally:
            await pages.close()

    found = zip(rules, asyncio.run(ask()), strict=True)
    return [offers.latency(rule.name, rule.latency_from, why) for rule, why in found]


def _say_offer(offer: Offer, *, needed: bool) -> None:
    say(f"{offer.state:<8} {offer.name}{' (needed)' if needed else ''}: {offer.what}", hang=9)
    if offer.remedy:
        say(f"{'':<8} {offer.remedy}", hang=0)
