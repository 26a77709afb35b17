"""The reference file: it is what the code says, it loads to the defaults, its examples are right."""

import re
from pathlib import Path

import pytest
from msgspec import inspect

from gpuagent.config import Config
from gpuagent.configfile import load, parse
from gpuagent.configschema import SCHEMA, unwrapped
from gpuagent.model.inventory import Level
from gpuagent.reference import reference

FILE = Path(__file__).parent.parent / "config" / "gpuagent.toml"


def given(text: str, *, without: str) -> str:
    """The text with what is commented out given, but for some keys."""
    return re.sub(rf"^#(?=[a-z\[])(?!({without}) )", "", text, flags=re.MULTILINE)


def test_the_file_is_what_the_code_says() -> None:
    remedy = "run: python -m gpuagent.reference > config/gpuagent.toml"
    assert FILE.read_text() == reference(), remedy


def test_the_file_says_what_an_empty_one_says() -> None:
    assert load(str(FILE)).config == Config()


@pytest.mark.parametrize(
    ("without", "watts"), [("budget", 17_000 * 0.8), ("panel|budget_fraction", 3000)]
)
def test_the_examples_load(without: str, watts: float) -> None:
    config = parse(given(reference(), without=without), source="f")
    assert config.power.budget_watts == watts
    assert [(rule.name, rule.sla) for rule in config.tenants] == [
        ("nightly-training", Level.L3),
        ("chat", Level.L1),
    ]
    assert config.tenants[0].memory_limit == 40 * 1024**3


def test_every_key_is_there_once_in_its_section_with_a_comment_above() -> None:
    found = set()
    lines = reference().splitlines()
    section = ""
    for above, line in zip(["", *lines], lines, strict=False):
        if header := re.fullmatch(r"#?\[\[?([a-zA-Z0-9._]+)\]\]?", line):
            section = header[1]
            if section == "tenants" and "tenants.name" in found:
                break  # The second example has no comments.
        elif setting := re.match("#?([a-z_]+) = ", line):
            key = f"{section}.{setting[1]}".lstrip(".")
            assert key not in found
            assert re.match("# .", above), key
            found.add(key)
    assert found == keys(SCHEMA, "")


def keys(kind: inspect.StructType, section: str) -> set[str]:
    """Every key of the schema, with its section."""
    found = set()
    for field in kind.fields:
        name = f"{section}.{field.name}".lstrip(".")
        inner, _ = unwrapped(field.type)
        if isinstance(inner, inspect.VarTupleType):
            inner = inner.item_type
        found |= keys(inner, name) if isinstance(inner, inspect.StructType) else {name}
    return found


def test_no_line_is_longer_than_a_screen() -> None:
    assert max(map(len, reference().splitlines())) <= 100
