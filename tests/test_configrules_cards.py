"""[[cards]]: which entry counts, and every contradiction with its line."""

import pytest

from gpuagent.config import Config
from gpuagent.configfile import parse
from tests.test_configschema import problems

HEADER = '[[cards]]\ngpu = "{}"\n'


def cards(*entries: tuple[str, str]) -> str:
    return "".join(HEADER.format(gpu) + f"{rest}\n" for gpu, rest in entries)


def test_the_first_entry_that_fits_counts() -> None:
    text = cards(("GPU-1*", 'compute_mode = "exclusive_process"'), ("*", "persistence_mode = true"))
    config = parse(text, source="f")
    one, other = config.card("GPU-12"), config.card("GPU-2")
    assert one is not None
    assert (one.compute_mode, one.persistence_mode) == ("exclusive_process", None)
    assert other is not None
    assert (other.compute_mode, other.persistence_mode) == ("", True)
    assert Config().card("GPU-2") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            cards(("*", 'time_slice = "long"'), ("GPU-1", "clock_unlocked = true")),
            '5: cards[1].gpu: "GPU-1" never counts: cards[0] comes first and fits all it fits',
        ),
        (
            cards(("GPU-1*", 'time_slice = "long"'), ("GPU-1*", "clock_unlocked = true")),
            '5: cards[1].gpu: "GPU-1*" never counts: cards[0] comes first and fits all it fits',
        ),
        (
            cards(("GPU-?", 'time_slice = "long"'), ("GPU-1", "clock_unlocked = true")),
            '5: cards[1].gpu: "GPU-1" never counts: cards[0] comes first and fits all it fits',
        ),
        (
            cards(("0", 'time_slice = "long"')),
            (
                '2: cards[0].gpu: "0" is an index, which fits no UUID; write the UUID that '
                "nvidia-smi -L shows"
            ),
        ),
        (
            cards(("GPU-1", 'compute_mode = ""')),
            (
                "2: cards[0].gpu: nothing is declared of it; give compute_mode, persistence_mode, "
                "time_slice or clock_unlocked"
            ),
        ),
        (
            "[power]\nkeep_on_stop = true\n" + cards(("*", "persistence_mode = false")),
            (
                "5: cards[0].persistence_mode: contradicts power.keep_on_stop: without it the driver "
                "forgets every limit at our end"
            ),
        ),
        (
            cards(("GPU-*", 'compute_mode = "prohibited"'))
            + '[[mps.groups]]\nname = "m"\ngpus = ["GPU-7"]\n',
            '3: cards[0].compute_mode: contradicts mps.groups[0], which runs MPS on "GPU-7"',
        ),
    ],
)
def test_a_contradiction_is_told_with_its_line(text: str, told: str) -> None:
    assert problems(text) == [told]


@pytest.mark.parametrize(
    "text",
    [
        cards(("GPU-1", "persistence_mode = false"), ("*", 'time_slice = "short"')),
        cards(("GPU-[12]", 'time_slice = "long"'), ("GPU-*", "clock_unlocked = true")),
        "[power]\nkeep_on_stop = true\n" + cards(("*", "persistence_mode = true")),
        cards(("GPU-8", 'compute_mode = "prohibited"'))
        + '[[mps.groups]]\nname = "m"\ngpus = ["GPU-7"]\n',
        cards(("GPU-7", 'compute_mode = "exclusive_process"'))
        + '[[mps.groups]]\nname = "m"\ngpus = ["GPU-7"]\n',
    ],
)
def test_what_fits_together_is_no_problem(text: str) -> None:
    assert parse(text, source="f").cards


def test_a_mistake_within_an_entry_is_told_once() -> None:
    (problem,) = problems(cards(("*", 'compute_mode = "exclusive"')))
    assert problem.startswith("3: cards[0].compute_mode:")
