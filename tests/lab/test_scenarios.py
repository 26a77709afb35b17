"""What a scenario says to the agent is read with it, and told off with file, line and key."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import ConfigError
from gpuagent.lab import scenarios
from gpuagent.sim import scenario
from gpuagent.sim.reading import wrong
from gpuagent.sim.scenario import Scenario

HOST = """
name = "small"
about = "One tenant."
seconds = 60
[[cards]]
profile = "a40"
[[tenants]]
name = "train"
run = "bert-training"
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        scenarios.parse(HOST + text, source="s.toml")
    return list(caught.value.problems)


@pytest.mark.parametrize("name", scenario.names())
def test_those_that_come_with_the_agent_are_right(name: str) -> None:
    assert scenarios.named(name) == scenario.named(name)


def test_a_mistake_is_told_where_it_is_written() -> None:
    [found] = problems('[agent]\nmode = "enforc"')
    assert found.startswith("s.toml:11: agent.mode: ")
    assert "enforce" in found
    text = '[[timeline]]\nat = 5\ndo = "config"\n[timeline.agent.power]\nbudget = "5 apples"\n[agent]\n'
    [found] = problems(text + 'mode = "enforce"')
    assert found.startswith("s.toml:14: timeline[0].agent.power.budget: ")


def test_what_contradicts_itself_only_later_is_told_once() -> None:
    text = (
        '[agent]\nmode = "enforce"\n[agent.backpressure]\nmemory_high = 0.8\nmemory_clear = 0.7\n'
        + 2
        * '[[timeline]]\nat = 5\ndo = "config"\nagent = { backpressure = { memory_high = 0.6 } }\n'
    )
    found = problems(text)
    assert found
    assert len(set(found)) == len(found)
    assert all("memory" in problem for problem in found)


def test_an_agent_that_is_missing_is_told() -> None:
    [found] = problems("")
    assert found.startswith("s.toml:1: agent: missing; ")


VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.dates(),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(["mode", "tenants", "power", "budget", "tick"]), below)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["mode", "tenants", "power", "tick"]), VALUES))
def test_any_table_is_a_configuration_or_has_problems(table: dict[str, Any]) -> None:
    found: tuple[str, ...] = ()
    try:
        made = scenarios.configuration(table, source="mine")
    except ConfigError as error:
        found = tuple(error.problems)
    assert found or made.mode in ("observe", "enforce")
    assert all(p.startswith("mine: agent") for p in found)


@given(VALUES)
def test_any_document_is_a_scenario_or_has_problems(value: object) -> None:
    base = {"name": "x", "about": "y", "seconds": 60.0, "cards": [{"profile": "a40"}]}
    for key in ("tenants", "timeline", "agent", "mps", "host", "cards", "zzz"):
        found = list(wrong(Scenario, {**base, "tenants": [], key: value}))
        assert all(p.path for p in found)
