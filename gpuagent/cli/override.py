"""`gpuagent override`: how a tenant or a card is to be treated, by your word, for a limited time."""

from collections.abc import Callable

import click

from gpuagent import quantities
from gpuagent.cli.client import Client, Document, quoted
from gpuagent.cli.exits import CODES, Exit, Failure
from gpuagent.cli.options import Options, common
from gpuagent.cli.show import UNKNOWN, amount, emit, say, seconds, table

Parse = Callable[[object], float]


def _in(parse: Parse) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """What turns the text of an option into base units, or refuses it."""

    def read(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
        try:
            return None if text is None else parse(text)
        except quantities.QuantityError as error:
            raise click.BadParameter(str(error), context, option) from None

    return read


@click.group(epilog=CODES)
@common
def override() -> None:
    """Order for a limited time how a tenant or a card is treated.

    An override wins over what the policies wish, as far as that is safe: nothing of an L1 tenant is
    turned, nobody is held below its floor, and no card gets more than the power budget and the heat
    allow. It ends by itself, and it survives a restart of the agent.
    """


@override.command("set", epilog=CODES)
@click.argument("name")
@click.option("--tenant", metavar="TENANT", help="Whose share is overridden; goes with --share.")
@click.option("--gpu", metavar="CARD", help="UUID or index of a card; goes with --power.")
@click.option(
    "--share",
    metavar="SHARE",
    callback=_in(quantities.ratio),
    help="Such as 50%, of the CPU it used before; 100% leaves the tenant alone.",
)
@click.option(
    "--power",
    metavar="POWER",
    callback=_in(quantities.watts),
    help="Power limit of the card, such as 250W.",
)
@click.option(
    "--for",
    "ttl",
    metavar="TIME",
    required=True,
    callback=_in(quantities.seconds),
    help="How long, such as 2h: 1s to 30d.",
)
@click.option("--why", metavar="TEXT", required=True, help="The reason, told with all it leads to.")
@common
def set_(
    name: str,
    *,
    tenant: str | None,
    gpu: str | None,
    share: float | None,
    power: float | None,
    ttl: float,
    why: str,
) -> None:
    """Put override NAME in force, or in the place of the one that has this name.

    Examples: `gpuagent override set quiet --tenant train --share 50% --for 2h --why "demo"` and
    `gpuagent override set cool --gpu 0 --power 250W --for 1d --why "fan broken"`.
    """
    options = Options.current()
    client = Client(options.socket)
    body: dict[str, object] = {"ttl_seconds": ttl, "why": why}
    if tenant is not None and share is not None and gpu is None and power is None:
        client.tenant(tenant)  # one that does not exist has an exit code of its own
        body |= {"tenant": tenant, "share_ratio": share}
    elif gpu is not None and power is not None and tenant is None and share is None:
        body |= {"gpu": _uuid(client, gpu), "power_limit_watts": power}
    else:
        raise click.UsageError("give --tenant with --share, or --gpu with --power")
    _say_done(options, client.put(f"/v1/overrides/{quoted(name)}", body))


@override.command("list", epilog=CODES)
@common
def list_() -> None:
    """List the overrides in force, and what became of each."""
    options = Options.current()
    items = list(Client(options.socket).items("/v1/overrides"))
    if options.json:
        emit({"items": items})
        return
    if not items:
        say("There are no overrides.")
        return
    table(
        ("NAME", "ON", "VALUE", "LEFT", "EFFECT", "BY", "WHY"),
        (
            (
                item["name"],
                item["tenant"] or item["gpu"] or UNKNOWN,
                value_of(item),
                seconds(item["remaining_seconds"]),
                _effect(item),
                item["by"],
                item["why"],
            )
            for item in items
        ),
    )


@override.command("drop", epilog=CODES)
@click.argument("name")
@common
def drop(name: str) -> None:
    """End override NAME before its time."""
    options = Options.current()
    _say_done(options, Client(options.socket).delete(f"/v1/overrides/{quoted(name)}"))


def value_of(item: Document) -> str:
    """What an override says, as people write it."""
    if item["power_limit_watts"] is not None:
        return amount("watts", item["power_limit_watts"])
    return amount("ratio", item["share_ratio"])


def _effect(item: Document) -> str:
    effect, why = item["effect"] or UNKNOWN, item["effect_why"]
    return f"{effect}: {why}" if why and effect not in {"applied", "would"} else effect


def _say_done(options: Options, done: Document) -> None:
    if options.json:
        emit(done)
    else:
        say(str(done["done"]))


def _uuid(client: Client, card: str) -> str:
    """UUID of a card that is named by it or by its index. Raises Failure."""
    if not (card.isascii() and card.isdigit()):
        return card
    for known in client.items("/v1/gpus"):
        if str(known["index"]) == card:
            return str(known["uuid"])
    raise Failure(
        Exit.PROBLEM, f"there is no card with the index {card}", "`gpuagent status` lists the cards"
    )
