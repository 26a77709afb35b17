"""The root of the command line: the list of commands, each imported only when it is used."""

import importlib

import click

import gpuagent
from gpuagent.cli.exits import CODES, Failure
from gpuagent.cli.options import Options, common

COMMANDS: dict[str, str] = {
    "daemon": "gpuagent.cli.running:daemon",
    "status": "gpuagent.cli.status:status",
    "demo": "gpuagent.cli.demo:demo",
    "evaluate": "gpuagent.cli.evaluate:evaluate",
    "tenants": "gpuagent.cli.status:tenants",
    "top": "gpuagent.cli.top:top",
    "explain": "gpuagent.cli.explain:explain",
    "run": "gpuagent.cli.run:run",
    "check": "gpuagent.cli.check:check",
    "config": "gpuagent.cli.configuration:config",
    "override": "gpuagent.cli.override:override",
    "reload": "gpuagent.cli.control:reload",
    "pause": "gpuagent.cli.control:pause",
    "unpause": "gpuagent.cli.control:unpause",
    "release": "gpuagent.cli.control:release",
    "resume": "gpuagent.cli.control:resume",
    "token": "gpuagent.cli.token:token",
    "restore": "gpuagent.cli.running:restore",
}
"""Name of the command, and where it is."""


class Commands(click.Group):
    """A group that knows its commands by name only, so that the daemon starts small."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except Failure as failure:
            failure.show(as_json=Options.current().json)
            ctx.exit(failure.code)


@click.command(cls=Commands, epilog=CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gpuagent.__version__, prog_name="gpuagent")
@common
def cli() -> None:
    """Keeps the promises made to the tenants of a shared GPU host."""
