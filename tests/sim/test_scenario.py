"""Scenario files: those that come with the agent are right, and wrong ones are told off by key."""

from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.configfile import parse as parse_config
from gpuagent.errors import ConfigError
from gpuagent.model.inventory import Level
from gpuagent.sim import profiles, scenario

NAMES = scenario.names()

SMALL = """
name = "small"
about = "One tenant."
seconds = 60
[[cards]]
profile = "a40"
[[tenants]]
name = "train"
run = "bert-training"
"""


def test_the_scenarios_are_there() -> None:
    assert {
        "co-location",
        "memory-growth",
        "hot-card",
        "mps-neighbours",
        "power-budget-cut",
        "driver-fault",
        "quiet-night",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_scenario_says_who_is_who_in_words_the_agent_reads(name: str) -> None:
    made = scenario.named(name)
    assert made.name == name
    for at in (0.0, *made.agent_changes()):
        config = parse_config(made.agent_toml(at), source=name)
        assert config.mode == "enforce"
        assert any(rule.sla is Level.L1 for rule in config.tenants)
        assert {rule.name for rule in config.tenants} <= {t.name for t in made.tenants}


def test_changes_of_the_configuration_add_up() -> None:
    made = scenario.named("power-budget-cut")
    budgets = [parse_config(made.agent_toml(at), source="t").power.budget for at in (0, 120, 420)]
    assert budgets == [560.0, 380.0, 560.0]
    assert len(parse_config(made.agent_toml(120), source="t").tenants) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("name = 1 2", "s.toml:10: not valid TOML"),
        ('kind = "x"', "s.toml: tenants[0]: "),
        ("card = 3", "s.toml: tenants[0].card: there is no card 3"),
        ("set = { rate = 3 }", "tenants[0]: small: tenant train: "),
        ('set = { shape = "cake" }', "tenants[0].set.shape: a40 has no cake"),
        ("set = { launch = 2.0 }", "launch: Expected `float` <= 1.0"),
        ('cgroup = "train"', "s.toml: tenants[0].cgroup: "),
        ('[[tenants]]\nname = "train"\nrun = "holder"', "train is given twice"),
        ('[[tenants]]\nname = "other"\nrun = "cake"', "'cake' is no workload; there are chat"),
        ('[[cards]]\nprofile = "h999"', "cards[1]: h999 is no kind of card"),
        (
            '[[cards]]\nprofile = "v100"\nset = { price = 3 }',
            "cards[1]: set.price: no number of v100",
        ),
        ('[[timeline]]\nat = 1\ndo = "dance"', "s.toml: timeline[0]"),
        ('[[timeline]]\nat = 1\ndo = "stop"\ntenant = "x"', "timeline[0].tenant: there is no"),
        ('[[timeline]]\nat = 1\ndo = "lose"\ncard = 1', "timeline[0].card: there is no such card"),
        (
            '[[timeline]]\nat = 1\ndo = "load"\ntenant = "train"\nrate = 2',
            "train has no rate of requests",
        ),
        ("[[mps]]\ncards = []", "mps[0].cards"),
        ("[[mps]]\ncards = [1]", "mps[0].cards: there is no card 1"),
        ("[[mps]]\ncards = [0]\n[[mps]]\ncards = [0]", "mps[1].cards: card 0 is given twice"),
        ("[[mps]]\ncards = [0]\npercentage = 0", "mps[0].percentage"),
        ("[[mps]]\ncards = [0]\nset = { width = 1 }", "mps[0]: set.width: no number of mps"),
        ("thread_percentage = 101", "tenants[0].thread_percentage"),
        ("thread_percentage = 50", "tenants[0]: its MPS limits mean nothing; card 0 has no MPS"),
        (
            '[[mps]]\ncards = [0]\n[[tenants]]\nname = "b"\nrun = "holder"\nuser = "bob"',
            "mps[0]: a server works for one user at a time; give alice and bob one",
        ),
        (
            '[[timeline]]\nat = 1\ndo = "mps"\npercentage = 5',
            "timeline[0].mps: there is no MPS group 0",
        ),
        (
            '[[mps]]\ncards = [0]\n[[timeline]]\nat = 1\ndo = "mps"',
            "timeline[0]: give percentage or memory_limit_bytes; it sets nothing",
        ),
        ('[[timeline]]\nat = 1\ndo = "restart"\ntenant = "x"', "timeline[0].tenant: there is no"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_key(more: str, said: str) -> None:
    text = (
        SMALL.replace("seconds = 60", "seconds = 60\nseconds = 1") if said[7:9] == "10" else SMALL
    )
    with pytest.raises(ConfigError) as caught:
        scenario.parse(text + more if text is SMALL else SMALL + "\nname = ", source="s.toml")
    if text is SMALL:
        assert said in str(caught.value)
    else:
        assert "not valid TOML" in str(caught.value)


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        scenario.named(str(tmp_path / "none.toml"))
    (tmp_path / "odd.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        scenario.named(str(tmp_path / "odd.toml"))
    with pytest.raises(ConfigError, match=r"is no scenario; .* co-location"):
        scenario.named("nowhere")


@given(st.text(max_size=60))
def test_any_text_is_read_or_told_off(text: str) -> None:
    with pytest.raises(ConfigError):
        scenario.parse(text, source="s.toml")


SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**60), 2**60), st.text(max_size=9), st.floats(0, 9)
)
KEYS = st.from_regex("[a-z_]{1,9}", fullmatch=True)
TABLES: st.SearchStrategy[Any] = st.recursive(
    st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), max_size=4),
    lambda below: st.dictionaries(
        KEYS, st.one_of(SCALARS, below, st.lists(below, min_size=1, max_size=3)), max_size=4
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(TABLES)
def test_the_agents_table_is_written_as_it_was_read(table: dict[str, Any]) -> None:
    made = scenario.parse(SMALL, source="s.toml")
    made = scenario.Scenario(
        name=made.name,
        about=made.about,
        seconds=made.seconds,
        cards=made.cards,
        tenants=made.tenants,
        agent=table,
    )
    assert tomli.loads(made.agent_toml()) == table


def test_every_coefficient_has_its_source() -> None:
    for kind in profiles.cards():
        made = profiles.card(kind)
        for name in made.__struct_fields__:
            value = getattr(made, name)
            sources = [s.source for s in value.values()] if name == "shapes" else []
            sources += [value.source] if isinstance(value, profiles.Number | profiles.Flag) else []
            for source in sources:
                assert any(w in source for w in ("assumed", "Zeus", "FACTS", "measured")), source
    assert profiles.host().cpus.source
