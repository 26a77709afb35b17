"""Binding to NUMA nodes: in a process of its own, since it cannot be undone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
from gpuagent.cli.binding import bind
trouble = bind(json.loads(sys.argv[1]), folder=sys.argv[2])
print(json.dumps({"trouble": trouble, "cpus": sorted(os.sched_getaffinity(0))}))
"""


def bound(nodes: list[int], folder: Path) -> tuple[list[str], list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(nodes), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    return found["trouble"], found["cpus"]


def node(folder: Path, number: int, cpus: str) -> None:
    (folder / f"node{number}").mkdir()
    (folder / f"node{number}/cpulist").write_text(f"{cpus}\n")


def of_memory(trouble: list[str]) -> list[str]:
    """Whether memory can be bound is the kernel's affair: a container may forbid it."""
    return [t for t in trouble if "memory is not bound" not in t]


def test_its_threads_run_near_its_cards_as_far_as_they_may_at_all(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    node(tmp_path, 0, f"{mine[0]},4000-4003")
    trouble, cpus = bound([0], tmp_path)
    assert (of_memory(trouble), cpus) == ([], [mine[0]])


def test_of_cards_on_two_nodes_both(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    node(tmp_path, 0, str(mine[0]))
    node(tmp_path, 3, str(mine[-1]))
    _, cpus = bound([0, 3], tmp_path)
    assert cpus == sorted({mine[0], mine[-1]})


@pytest.mark.parametrize("cpus", ["4000", "", "x", "1-", "\u0663"])
def test_where_none_of_them_may_be_used_it_runs_as_before(tmp_path: Path, cpus: str) -> None:
    node(tmp_path, 0, cpus)
    trouble, left = bound([0], tmp_path)
    assert left == sorted(os.sched_getaffinity(0))
    assert len(of_memory(trouble)) == 1


@pytest.mark.parametrize("nodes", [[7], [-1], [10**9]])
def test_a_node_that_is_not_there_is_said(tmp_path: Path, nodes: list[int]) -> None:
    trouble, left = bound(nodes, tmp_path)
    assert left == sorted(os.sched_getaffinity(0))
    assert of_memory(trouble)
