"""`gpuagent token`: who may ask the agent over TCP, for what, and for how long."""

from datetime import UTC, datetime

import click

from gpuagent import quantities
from gpuagent.cli.client import Client, quoted
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, common
from gpuagent.cli.show import UNKNOWN, emit, listed, say, table
from gpuagent.log import printable
from gpuagent.model.token import scope_trouble, tenant_of


def _seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    try:
        return quantities.seconds(text)
    except quantities.QuantityError as error:
        raise click.BadParameter(str(error), context, option) from None


def _scopes(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    for text in texts:
        if trouble := scope_trouble(text):
            raise click.BadParameter(f"{printable(repr(text))}: {trouble}", context, option)
    return texts


_HELP = """Issue, list and revoke tokens for the loopback address and the network.

\b
Scopes:
  read             see everything, of all tenants
  metrics          scrape /metrics and /metrics/dcgm
  latency:TENANT   report the latency of that tenant
  override         override how a tenant or a card is treated
  admin            everything
"""


@click.group(help=_HELP, epilog=CODES)
@common
def token() -> None:
    """Tokens."""


@token.command(epilog=CODES)
@click.option(
    "--scope",
    "scopes",
    metavar="SCOPE",
    multiple=True,
    required=True,
    callback=_scopes,
    help="What it allows; may be given several times: read, metrics, latency:TENANT, override, admin.",
)
@click.option(
    "--expires",
    metavar="TIME",
    required=True,
    callback=_seconds,
    help="When it ends, from now, such as 30d; 365d at most.",
)
@click.option("--note", metavar="TEXT", default="", help="What it is for.")
@common
def issue(scopes: tuple[str, ...], expires: float, note: str) -> None:
    """Issue a token. Its secret is printed this once, alone on standard output."""
    options = Options.current()
    body = {"scopes": scopes, "expires_seconds": expires, "note": note}
    client = Client(options.socket)
    issued = client.post("/v1/tokens", body)
    for tenant in filter(None, map(tenant_of, scopes)):
        _doubt(client, tenant)
    if options.json:
        emit(issued)
        return
    click.echo(issued["token"])
    until = _day(issued["expires_at"])
    text = f"token {issued['id']} for {listed(issued['scopes'])}, valid until {until}"
    click.echo(f"{text}; its secret is not kept and not shown again", err=True)


def _doubt(client: Client, tenant: str) -> None:
    """Say so where nobody has this name: it may be misspelt, or come later."""
    try:
        client.tenant(tenant, "/environment")
    except Failure as failure:
        if failure.code is Exit.UNKNOWN_TENANT:
            name = printable(tenant)
            click.echo(
                f"gpuagent: warning: no tenant {name} runs here, and no rule names it", err=True
            )


@token.command("list", epilog=CODES)
@common
def list_() -> None:
    """List the tokens that are valid. No secret is shown: none is kept."""
    options = Options.current()
    items = list(Client(options.socket).items("/v1/tokens"))
    if options.json:
        emit({"items": items})
        return
    if not items:
        say("No token is valid.")
        return
    rows = [
        (t["id"], listed(t["scopes"]), _day(t["expires_at"]), t["issued_by"], t["note"] or UNKNOWN)
        for t in items
    ]
    table(("ID", "SCOPES", "VALID UNTIL", "ISSUED BY", "NOTE"), rows)


@token.command(epilog=CODES)
@click.argument("token_id", metavar="ID")
@common
def revoke(token_id: str) -> None:
    """Make a token invalid at once. ID is as `token list` shows it."""
    options = Options.current()
    done = Client(options.socket).delete(f"/v1/tokens/{quoted(token_id)}")
    if options.json:
        emit(done)
    else:
        say(printable(str(done["done"])))


def _day(wall: float) -> str:
    """A wall time, for people: UTC, to the minute."""
    return f"{datetime.fromtimestamp(wall, UTC):%Y-%m-%d %H:%M} UTC"
