"""`gpuagent top`: what keys do, what is drawn, and the command without a terminal."""

import json
import re
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpuagent.cli.client import Client, Document
from gpuagent.cli.exits import Exit
from gpuagent.cli.top import ask
from gpuagent.cli.topdraw import lines
from gpuagent.cli.topview import SORTS, Sort, Told, View, pressed, settled, shown
from tests.cli.stage import agent, run
from tests.expose import snapshots
from tests.expose.full import full
from tests.expose.scene import short_folder

# -- what keys do ------------------------------------------------------------------------------------------

NAMES = ("ann", "bob", "cat")


def after(*keys: str) -> View:
    view = View(selected="ann")
    for key in keys:
        view = pressed(view, key, NAMES)
    return view


def test_keys_change_the_view() -> None:
    assert after("q").over
    assert [after(*"s" * i).sort for i in range(len(SORTS) + 1)] == [*SORTS, SORTS[0]]
    assert after("p").paused
    assert not after("p", "p").paused
    assert after("?").help
    assert not after("?", "escape").help
    assert after("w").why
    assert after("enter").why
    assert not after("w", "enter").why
    assert after("x", "tab", "\u00e9") == View(selected="ann")


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        (["j"], "bob"),
        (["down", "down", "down"], "cat"),
        (["j", "k"], "ann"),
        (["up"], "ann"),
        (["end"], "cat"),
        (["end", "home"], "ann"),
        (["page down", "page up"], "ann"),
    ],
)
def test_a_tenant_is_chosen(keys: list[str], selected: str) -> None:
    assert after(*keys).selected == selected


def test_while_a_filter_is_typed_keys_are_text() -> None:
    typed = after("/", *"qsjw?p")
    assert (typed.wanted, typed.typing, typed.over, typed.help) == ("qsjw?p", True, False, False)
    assert after("/", *"ab", "backspace", "enter") == View(selected="ann", wanted="a")
    assert after("/", "a", "escape") == View(selected="ann")
    assert after("/", "a", "enter", "escape").wanted == ""
    assert after("/", "down").selected == "bob"


def test_the_successor_is_chosen_when_a_tenant_leaves() -> None:
    view = after("j")
    assert settled(view, ("ann", "cat")).selected == "cat"
    assert settled(view, ("ann",)).selected == "ann"
    assert settled(view, ()).selected == ""
    assert settled(settled(view, ()), NAMES).selected in NAMES


_KEYS = st.sampled_from(
    [*"qs/wp?jkx", "enter", "escape", "backspace", "up", "down", "home", "end", "page down"]
)


@given(st.lists(_KEYS, max_size=30), st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
def test_whatever_is_pressed_a_tenant_that_is_there_is_chosen(
    keys: list[str], names: list[str]
) -> None:
    view = settled(View(), names)
    for key in keys:
        view = settled(pressed(view, key, names), names)
        assert (view.selected in names) if names else view.selected == ""


# -- pictures ----------------------------------------------------------------------------------------------

SNAPSHOTS = {
    "busy": snapshots.busy(),
    "observing": snapshots.busy(posture=snapshots.OBSERVING),
    "full": full(),
    "hostile": snapshots.hostile(),
    "large": snapshots.large(),
    "empty": snapshots.empty(),
    "unread": snapshots.unread(),
}


@pytest.fixture(scope="module")
def told() -> dict[str, Told]:
    """What a real server answers for each snapshot."""
    found = {}
    for name, snapshot in SNAPSHOTS.items():
        with agent(snapshot) as path:
            client = Client(path)
            chosen = ask(client).tenants
            found[name] = ask(client, chosen[-1]["name"] if chosen else "")
    return found


def picture(
    told: Told | None, view: View = View(), *, trouble: str = "", columns: int = 80, rows: int = 24
) -> list[str]:
    view = settled(view, [row["name"] for row in shown(view, told)])
    return [line.text.rstrip() for line in lines(view, told, trouble, columns, rows)]


def test_a_busy_host_at_80_by_24(told: dict[str, Told]) -> None:
    drawn = picture(told["busy"], View(selected="train", why=True))
    assert drawn[0].startswith("gpuagent 1.2.3   mode enforce, acting   ")
    assert drawn[1] == "Cards 2, 510 W   Tenants 2, held back 1   Causes 1   CPU -   Free -"
    assert drawn[3] == "Card Name                  Busy          Memory      Power  Heat Tenants"
    assert drawn[4] == (
        "0    NVIDIA H100 80GB HB~  75 %   70.0/80.0 GiB  510/700 W  71 C serve, train"
    )
    assert drawn[7:10] == [
        "  Tenant           Lvl Class     Share      Latency   GPU mem Held back for",
        "  serve            L1  -         100 %            -         -",
        "> train            L3  -          49 %            -  60.0 GiB memory (cpu_max)",
    ]
    assert drawn[11] == "Why train (L3, best effort: held back first)"
    assert drawn[12] == "Held back to 49 % for memory: cut twice"
    assert "cgroup_cpu_max: wanted 2.1 cores, real 2.1 cores: applied" in drawn
    assert drawn[23] == "q quit  s sort: name  / filter: all  w why  p freeze  ? help"
    assert len(drawn) == 24


def test_what_was_not_measured_is_a_dash(told: dict[str, Told]) -> None:
    drawn = picture(told["busy"])
    assert drawn[5] == "1    NVIDIA H100              -               -          -     - -"
    assert picture(told["unread"])[1].startswith("Cards -, -   Tenants -,")


def test_a_fraction_of_a_watt_takes_no_room_from_the_limit(told: dict[str, Told]) -> None:
    assert any(" 510/600 W  71 C" in line for line in picture(told["full"]))


def test_what_is_wrong_is_said(told: dict[str, Told]) -> None:
    assert "Sensor nvml: no driver is loaded" in picture(told["empty"])
    assert "There are no cards." in picture(told["empty"])
    assert 'Nothing is changed: the configuration says mode = "observe"' in picture(
        told["observing"]
    )
    assert "Card 1 cannot be read: a call hangs" in picture(told["full"])
    gone = picture(told["busy"], trouble="No answer: the agent does not run")
    assert "No answer: the agent does not run" in gone
    assert any("train" in line for line in gone), "the last picture stays"
    assert picture(None, trouble="No answer")[:2] == ["gpuagent", "No answer"]
    assert "The display is frozen; p lets it go on." in picture(told["busy"], View(paused=True))


# -- latency, class, overrides, simulation -----------------------------------------------------------------


def row(name: str = "serve", **changes: object) -> Document:
    base: Document = {
        "name": name,
        "level": "L1",
        "kind": "",
        "may_be_held_back": True,
        "share_ratio": 1.0,
        "held_back": None,
        "processes": 1,
        "gpus": [0],
        "gpu_memory_bytes": 60 << 30,
        "cpu_cores": 1.5,
        "latency_seconds": None,
        "latency_objective_seconds": None,
        "latency_quantile": 0.99,
        "latency_estimated": False,
    }
    return {**base, **changes}


def table(seen: Told, *rows: Document, columns: int = 80, **changes: Any) -> list[str]:
    """The lines that begin with the names of these rows, and before them the titles."""
    told = replace(seen, tenants=rows, **changes)
    drawn = picture(told, View(), columns=columns)
    top = next(i for i, text in enumerate(drawn) if text.startswith("  Tenant"))
    return drawn[top : top + 1 + len(rows)]


def test_a_latency_stands_against_its_objective(told: dict[str, Told]) -> None:
    slow = row("slow", latency_seconds=0.12, latency_objective_seconds=0.1, kind="interactive")
    fine = row("well", latency_seconds=0.093, latency_objective_seconds=0.1, kind="inference")
    mute = row("x", latency_objective_seconds=1.5)
    assert table(told["busy"], slow, fine, mute) == [
        "  Tenant           Lvl Class     Share      Latency   GPU mem Held back for",
        "> slow             L1  interact~ 100 %  120/100 ms!  60.0 GiB",
        "  well             L1  inference 100 %    93/100 ms  60.0 GiB",
        "  x                L1  -         100 %      -/1.5 s  60.0 GiB",
    ]


def test_who_misses_its_objective_stands_out(told: dict[str, Told]) -> None:
    slow = row("slow", latency_seconds=0.12, latency_objective_seconds=0.1)
    seen = replace(told["busy"], tenants=(row("a"), slow))
    drawn = lines(View(selected="a"), seen, "", 80, 24)
    assert [x.style for x in drawn if x.text.startswith("  slow")] == ["bad"]


@pytest.mark.parametrize(
    ("columns", "gone"),
    [
        (80, {"Cards", "Cores", "Procs"}),
        (89, {"Cores", "Procs"}),
        (95, {"Procs"}),
        (99, set()),
        (160, set()),
    ],
)
def test_what_is_least_needed_gives_way_on_a_narrow_screen(
    columns: int, gone: set[str], told: dict[str, Told]
) -> None:
    head = table(told["busy"], row(), columns=columns)[0]
    every = {"Tenant", "Lvl", "Class", "Share", "Latency", "Cards", "Cores", "Procs", "GPU", "mem"}
    assert every - set(head.split()) == gone
    assert head.endswith("Held back for")


def test_what_is_sorted_by_is_shown(told: dict[str, Told]) -> None:
    for sort, title in (("cores", "Cores"), ("memory", "GPU mem"), ("latency", "Latency")):
        view = View(sort=cast("Sort", sort))
        assert [x for x in picture(told["busy"], view) if title in x and "Held back for" in x]
        assert max(map(len, picture(told["busy"], view))) <= 80


def test_an_override_is_seen_in_the_table_and_in_the_reasons(told: dict[str, Told]) -> None:
    item = {
        "name": "quiet",
        "tenant": "train",
        "gpu": None,
        "share_ratio": 1.0,
        "power_limit_watts": None,
        "remaining_seconds": 3000.0,
        "by": "root",
        "why": "a demo",
        "effect": "applied",
        "effect_why": "it is left alone",
    }
    cooled = {**item, "name": "cool", "tenant": None, "gpu": "GPU-0", "power_limit_watts": 250}
    train = row("train", level="L3")
    assert table(told["busy"], train, overrides=(cooled, item))[1].endswith(" override to 100 %")
    waits = {**item, "share_ratio": 0.5, "effect": None}
    waiting = table(told["busy"], train, columns=120, overrides=(waits,))[1]
    assert waiting.endswith(" decided: override to 50 %")
    assert "override" not in table(told["busy"], row(), overrides=(cooled, item))[1]
    why = {**(told["busy"].explanation or {}), "overrides": [item, cooled]}
    drawn = picture(
        replace(told["busy"], explanation=why), View(selected="train", why=True), columns=160
    )
    assert (
        "Override quiet of root: to 100 %, 50 min more: applied (it is left alone); a demo" in drawn
    )
    assert any(x.startswith("Override cool of root: card GPU-0 to 250 W, 50 min") for x in drawn)


def test_the_latency_is_among_the_reasons(told: dict[str, Told]) -> None:
    drawn = picture(told["full"], View(selected="train", why=True), rows=40)
    assert "Latency at p99, of its objective: 1/2 s" in drawn


def test_a_simulated_host_is_marked_as_such(told: dict[str, Told]) -> None:
    seen = told["busy"]
    assert not any("SIMULATED" in x for x in picture(seen))
    simulated = replace(seen, node={**seen.node, "simulated": True})
    for columns in (40, 80):
        assert picture(simulated, columns=columns)[0].startswith(
            "gpuagent 1.2.3   SIMULATED HOST   "
        )


def test_listeners_and_tokens_in_trouble_are_told(told: dict[str, Told]) -> None:
    listeners = [
        {"name": "unix", "address": "/s", "up": True, "why": ""},
        {"name": "network", "address": ":1", "up": True, "why": "its certificate is bad"},
        {"name": "loopback", "address": ":2", "up": False, "why": ""},
    ]
    seen = told["busy"]
    health = {**seen.health, "listeners": listeners, "tokens_why": "the file is damaged"}
    unsaved = picture(replace(seen, health={**seen.health, "unsaved_why": "no room"}))
    assert unsaved[2] == "Not saved: no room"
    drawn = picture(replace(seen, health=health))
    assert drawn[2:5] == [
        "Listener network: its certificate is bad",
        "Listener loopback: it is not open",
        "Tokens: the file is damaged",
    ]
    health["sensors"] = [{"name": "gpus", "up": False, "why": "gone"}]
    drawn = picture(replace(seen, health=health))
    assert drawn[2:5] == [
        "Sensor gpus: gone",
        "Listener network: its certificate is bad",
        "... and 2 more; `gpuagent status` tells all",
    ]


def test_help_names_every_key(told: dict[str, Told]) -> None:
    text = "\n".join(picture(told["busy"], View(help=True)))
    for key in ("q ", "s ", "/ ", "w, Enter", "p ", "? ", "j, k"):
        assert f"\n{key}" in text or f" {key}" in text


def test_who_may_not_see_cards_is_told_so(told: dict[str, Told]) -> None:
    seen = told["busy"]
    text = " ".join(picture(Told(seen.node, seen.health, None, None)))
    assert "shown to administrators" in text


def test_the_filter_shows_some(told: dict[str, Told]) -> None:
    names = [r["name"] for r in shown(View(wanted="TRA"), told["busy"])]
    assert names == ["train"]
    assert 'There are no tenants with "zz".' in picture(told["busy"], View(wanted="zz"))
    assert "Tenants with: se_   (Enter keeps it, Escape shows all)" in picture(
        told["busy"], View(wanted="se", typing=True)
    )


LATENCIES = {
    "serve": {"latency_seconds": 0.12, "latency_objective_seconds": 0.1},
    "train": {"latency_seconds": 9.0, "latency_objective_seconds": 5.0},
}


@pytest.mark.parametrize("sort", SORTS)
def test_each_order_has_the_unknown_last(sort: Sort, told: dict[str, Told]) -> None:
    seen = told["busy"]
    rows = seen.tenants or ()
    rows = tuple({**r, **LATENCIES[r["name"]]} for r in rows)
    unknown = {**rows[0], "name": "a", "gpu_memory_bytes": None, "cpu_cores": None, "level": "L3"}
    unknown["latency_seconds"] = None
    more = {**rows[0], "name": "z", "gpu_memory_bytes": 80 << 30, "cpu_cores": 9.0, "level": "L2"}
    order = [r["name"] for r in shown(View(sort=sort), Told({}, {}, (), (*rows, unknown, more)))]
    assert (
        order
        == {
            "name": ["a", "serve", "train", "z"],
            "level": ["serve", "z", "a", "train"],
            "share": ["train", "a", "serve", "z"],
            "latency": ["train", "serve", "z", "a"],
            "memory": ["z", "train", "a", "serve"],
            "cores": ["z", "train", "a", "serve"],
        }[sort]
    )


def test_the_chosen_tenant_is_always_in_the_picture(told: dict[str, Told]) -> None:
    names = [r["name"] for r in shown(View(), told["large"])]
    for name in (names[0], names[100], names[-1]):
        drawn = picture(told["large"], View(selected=name, why=True))
        assert [x for x in drawn if x.startswith(f"> {name} ")], name


_VIEWS = st.builds(
    View,
    why=st.booleans(),
    help=st.booleans(),
    typing=st.booleans(),
    paused=st.booleans(),
    wanted=st.text(max_size=5),
    sort=st.sampled_from(SORTS),
)


@given(st.sampled_from([*SNAPSHOTS]), st.tuples(st.integers(1, 160), st.integers(1, 50)), _VIEWS)
def test_every_picture_fits_and_is_harmless(
    told: dict[str, Told], name: str, size: tuple[int, int], view: View
) -> None:
    columns, rows = size
    chosen = (told[name].tenants or ({"name": ""},))[-1]["name"]
    view = replace(view, selected=chosen)
    drawn = lines(view, told[name], "gone \x1b[31m\n\u202e", columns, rows)
    assert len(drawn) == rows
    for line in drawn:
        assert cell_len(line.text) <= columns, line
        assert line.text.isprintable(), line


# -- the command without a terminal ------------------------------------------------------------------------


def test_without_a_terminal_it_prints_once() -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, "top")
    assert done.exit_code == 0, done.output
    assert "  train            L3  -          49 %" in done.stdout
    assert "q quit" not in done.stdout
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_without_a_terminal_nothing_is_left_out() -> None:
    with agent(snapshots.large(16, 200)) as path:
        done = run("--socket", path, "top")
    assert len(re.findall(r"^  tenant-", done.stdout, re.MULTILINE)) == 200
    assert len(re.findall(r"^\d+ +NVIDIA", done.stdout, re.MULTILINE)) == 16


def test_json_is_one_object() -> None:
    with agent(snapshots.busy()) as path:
        done = run("--socket", path, "top", "--json")
    found = json.loads(done.stdout)
    assert set(found) == {"node", "health", "gpus", "tenants", "overrides"}
    assert [t["name"] for t in found["tenants"]] == ["serve", "train"]
    assert [g["index"] for g in found["gpus"]] == [0, 1]


def test_without_an_agent_it_says_so_and_ends() -> None:
    with short_folder() as folder:
        done = run("--socket", f"{folder}/none", "top")
    assert done.exit_code == Exit.UNREACHABLE
    assert "systemctl start gpuagent" in done.stderr


@pytest.mark.parametrize("interval", ["0", "0.1", "-1", "nan", "x", "1e9"])
def test_an_interval_out_of_range_is_refused(interval: str) -> None:
    done = run("top", "--interval", interval)
    assert done.exit_code == Exit.USAGE
