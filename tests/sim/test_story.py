"""Everything that can happen in a scenario can be said."""

from typing import get_args

import msgspec
import pytest

from gpuagent.sim import scenario
from gpuagent.sim.scenario import Happening, Lose, Mps, Patch, Xid
from gpuagent.sim.story import told


@pytest.mark.parametrize("kind", get_args(Happening))
def test_each_kind_has_a_sentence_of_its_own(kind: type[Happening]) -> None:
    numbers = {"at": 1.0, "tenant": "chat", "rate": 65.0, "card": 3, "seconds": 40.0, "xid": 31}
    numbers |= {"celsius": 47.0, "percentage": 40.0, "agent": {"power": {"budget": "380W"}}}
    given = {name: numbers[name] for name in kind.__struct_fields__ if name in numbers}
    text = told(msgspec.convert({**given, "do": kind.__struct_config__.tag}, kind))
    shown = [v for n, v in given.items() if n != "at" and not isinstance(v, dict)]
    assert all(f"{v:g}" in text if isinstance(v, float) else str(v) in text for v in shown)


def test_some_in_full() -> None:
    assert told(Lose(at=1, card=1)) == "card 1 falls off the bus"
    assert told(Xid(at=1, card=0, xid=31)) == "the driver reports XID 31 on card 0"
    assert told(Mps(at=1, memory_limit_bytes=2**30)).endswith("next clients: 1.0 GiB")
    patch = Patch(at=1, agent={"power": {"budget": "380W"}})
    assert told(patch) == 'the operator changes the configuration: [power] budget = "380W"'


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_can_be_told(name: str) -> None:
    assert all(told(one).isprintable() for one in scenario.named(name).happenings())
