"""How a report reads: what it claims, what it admits, and that it fits a terminal."""

import importlib.util
import os
from pathlib import Path

import msgspec
import pytest

from gpuagent.lab import plots
from gpuagent.lab.report import WIDTH, conclusion, percent, text
from gpuagent.lab.stats import Interval
from tests.lab.made import Made
from tests.lab.test_study import report, study, world


def test_goals_that_are_reached_everywhere_are_claimed() -> None:
    found = report("static", "tgs", "aimd", sweep=True, seeds=5)
    told = " ".join(text(found).split())
    assert conclusion(found, "aimd") == "yes"
    assert (
        "aimd: all goals are reached, as modelled and in 6 variations; no harm where no lever acts "
        "(cpu.max does not work)." in told
    )
    assert "aimd against the best static shares, static L3=0.6" in told
    assert "MISSED" not in told


def test_without_a_sweep_that_is_said() -> None:
    told = text(report("static", "aimd"))
    assert "aimd: all goals are reached, as modelled, not swept." in told


def test_where_nothing_is_to_be_reached_nothing_is_claimed() -> None:
    one = Made(lambda _: {"missed": 0.001, "p99": 0.7, "training": 1.0})
    told = text(study("static", "aimd").run(one))
    assert "aimd: nothing to protect, and it does no harm, as modelled, not swept." in told
    assert "all goals" not in told


def test_goals_that_are_missed_are_said_with_the_best_trade_off() -> None:
    found = report("static", "aimd", "pi", judged="aimd pi", sweep=True, seeds=5)
    assert conclusion(found, "pi") == "no"
    told = " ".join(text(found).split())
    assert "pi: not all goals are reached" in told
    assert "as modelled: work -" in told
    assert "L3 keeps 50.0 %, goal at least 80 %" in told
    assert "Best trade-off while L3 keeps 80%: aimd, misses 1.0" in told
    assert "The candidate: pi, misses 0.5" in told


def test_one_variation_is_enough_to_claim_nothing() -> None:
    found = report("static", "aimd", sweep=True, seeds=5)
    one, *others = found.sweep
    missed = msgspec.structs.replace(one.checks[0], met="no")
    bad = msgspec.structs.replace(one, checks=(missed, *one.checks[1:]))
    found = msgspec.structs.replace(found, sweep=(bad, *others))
    assert conclusion(found, "aimd") == "no"
    told = text(found)
    assert "aimd: not all goals are reached; tried as modelled and in 6 variations." in told
    assert f"\n  {one.variation}: misses -" in told
    assert "Best trade-off" not in told, "as modelled they are"


def test_levers_that_were_let_go_are_given_as_a_reason() -> None:
    found = report("static", "pi", judged="pi")
    assert "let go as of no use" not in text(found)
    runs = tuple(msgspec.structs.replace(r, let_go=int(r.seed < 3)) for r in found.runs)
    told = " ".join(text(msgspec.structs.replace(found, runs=runs)).split())
    assert "goal at least 80 %; levers were let go as of no use in 2 of 3 runs" in told


def test_a_goal_that_nothing_reaches_is_called_so() -> None:
    shares = {"static L3=0.2": 0.06, "static L3=0.6": 0.07, "aimd": 0.075}
    weak = Made(lambda j: {**world(j), "missed": shares.get(j.member.name, 0.1)})
    told = " ".join(text(study("static", "aimd").run(weak)).split())
    assert "no policy tried does more for misses than static L3=0.2, -14 %" in told
    strong = Made(lambda j: {**world(j), "missed": 0.01 if "L3=0.2" in j.member.name else 0.09})
    assert "does more for misses" not in text(study("static", "aimd").run(strong))


def test_one_seed_claims_nothing() -> None:
    told = text(report("static", "aimd", seeds=1))
    assert "aimd: it is not clear yet; take more seeds" in told
    assert "reached," not in told


@pytest.mark.parametrize("sweep", [True, False])
def test_it_fits_a_terminal_and_is_plain(sweep: bool) -> None:
    told = text(report("static", "tgs", "aimd", "pi", judged="aimd pi", sweep=sweep))
    assert max(map(len, told.splitlines())) <= WIDTH
    assert all(line.isprintable() for line in told.splitlines())
    assert "…" not in told


def test_figures_with_and_without_an_interval() -> None:
    assert percent(Interval(0.123, 0.1, 0.146, 5)) == "12.3 ±2.3"
    assert percent(Interval(0.123, None, None, 1)) == "12.3"
    assert percent(Interval(0.5, 0.4, 0.6, 5), digits=0, spread=False) == "50"
    assert percent(None) == "-"


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report("static", "tgs", "aimd", sweep=False)
    written = plots.draw(found, str(tmp_path))
    names = sorted(os.listdir(tmp_path))
    assert names == ["energy.png", "latency.png", "share-training.png", "throughput.png"]
    assert sorted(map(os.path.basename, written)) == names
    assert all(Path(p).read_bytes().startswith(b"\x89PNG") for p in written)
    assert plots.available() == (importlib.util.find_spec("matplotlib") is not None)
