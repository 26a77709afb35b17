"""What the driver offers, asked once in a child with a deadline: for `gpuagent check`."""

import msgspec

from gpuagent.errors import Unavailable
from gpuagent.host import nvml_frames as frames
from gpuagent.host.nvml import MODULE, QUIET_SECONDS
from gpuagent.host.nvml_errors import no_driver
from gpuagent.host.worker import Worker
from gpuagent.model.inventory import Gpu


class NvmlOffer(msgspec.Struct, frozen=True):
    """What there is to read, and what stands in the way."""

    driver: str = ""
    """Version; empty where there is no driver to talk to."""
    cards: tuple[Gpu, ...] = ()
    """A card that does not answer says why in `blind`."""
    missing: tuple[str, ...] = ()
    """pynvml functions that we would use and that this library lacks; others take their place."""
    problem: str = ""
    """What is wrong and what to do about it; empty if nothing is."""


async def probe(library: str, *, deadline: float = 5.0) -> NvmlOffer:
    """Ask the driver behind `library` (empty: the one the linker finds) what it offers.

    `deadline`: seconds that one call of the driver may take. Raises nothing of its own.
    """
    heard: list[frames.Frame] = []
    worker = Worker(
        MODULE,
        settings={"library": library, "look": True, "only": None},
        decode=frames.decode,
        take=heard.append,
        deadline=deadline,
        quiet=QUIET_SECONDS,
    )
    try:
        ending = await worker.run()
    except Unavailable as error:
        return NvmlOffer(problem=str(error))
    hello = next((f for f in heard if isinstance(f, frames.Hello)), None)
    driver = "" if hello is None else hello.driver
    bye = next((f for f in heard if isinstance(f, frames.Bye)), None)
    if bye is None:
        problem = ending.why
    else:
        problem = str(no_driver(bye.why, bye.code)) if bye.code else ""
    cards = [f.gpu(driver) for f in heard if isinstance(f, frames.CardFrame)]
    for frame in heard:
        if isinstance(frame, frames.BlindFrame):
            known = {card.index: card for card in cards}.get(frame.i)
            blind = known or Gpu(uuid=f"unknown-{frame.i}", index=frame.i, name="")
            cards = [card for card in cards if card is not known]
            cards.append(msgspec.structs.replace(blind, blind=frame.why))
    return NvmlOffer(
        driver=driver,
        cards=tuple(sorted(cards, key=lambda card: card.index)),
        missing=() if bye is None else bye.missing,
        problem=problem,
    )
