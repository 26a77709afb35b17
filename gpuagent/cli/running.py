"""`gpuagent daemon` and `gpuagent restore`: what runs the agent, or cleans up after it."""

import signal

import click

from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, absolute, common
from gpuagent.cli.show import emit, say
from gpuagent.errors import AgentError, ConfigError, Refused
from gpuagent.log import setup


@click.command(
    epilog=CODES + "  70 a fault of the agent itself; the service manager starts it again\n"
)
@common
def daemon() -> None:
    """Run the agent in the foreground, as systemd does."""
    # Until the daemon can answer a hangup, it must not die of one.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from gpuagent.process import run

    path = absolute(Options.current().config)
    try:
        run(path)
    except ConfigError as error:
        raise Failure(Exit.USAGE, str(error)) from error
    except AgentError as error:
        raise Failure(Exit.PROBLEM, str(error)) from error


@click.command(epilog=CODES)
@click.option(
    "--rescue",
    is_flag=True,
    help="Only what must not stay after a crash; limits that serve a power budget stay.",
)
@click.option(
    "--force-resume",
    is_flag=True,
    help="Resume suspended processes also where it is not known that their cards have enough memory "
    "free. One whose resumption fails for want of memory is lost: look at nvidia-smi first.",
)
@common
def restore(*, rescue: bool, force_resume: bool) -> None:
    """Put back what the agent has changed, without the agent.

    Refused while it runs: use `gpuagent pause` then.
    """
    from gpuagent.rescue import restore as put_back

    options = Options.current()
    setup(level="warning")
    try:
        report = put_back(absolute(options.config), rescue=rescue, force_resume=force_resume)
    except Refused as error:
        raise Failure(Exit.REFUSED, str(error)) from error
    except AgentError as error:
        raise Failure(Exit.PROBLEM, str(error)) from error
    failed = [item for item in report if item.what == "failed"]
    if options.json:
        items = [
            {
                "knob": item.entry.knob,
                "subject": str(item.entry.subject),
                "what": item.what,
                "why": item.why,
                "before": item.before,
                "after": item.after,
            }
            for item in report
        ]
        emit({"items": items})
    else:
        for item in report:
            say(f"{item.entry.knob} of {item.entry.subject}: {item.what}: {item.why}")
        if not report:
            say("Nothing of the agent's is left to put back.")
    click.get_current_context().exit(Exit.PROBLEM if failed else Exit.OK)
