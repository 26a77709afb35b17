"""Work behind a thread: in order, bounded, and never waited for longer than asked."""

import threading
from collections.abc import Iterator

import pytest

from gpuagent.behind import Behind


class Sink:
    """Takes items once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.at_it = threading.Event()
        self.taken: list[int] = []
        self.behind = Behind(self.take, most=3, name="sink")

    def take(self, items: list[int]) -> None:
        self.at_it.set()
        self.gate.wait()
        self.taken += items


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sink.gate.set()
    assert sink.behind.close(20)


def test_all_is_done_in_order(sink: Sink) -> None:
    sink.gate.set()
    for item in range(3):
        sink.behind.put(item)
    assert sink.behind.flush(20)
    sink.behind.put(3)
    assert sink.behind.flush(20)
    assert sink.taken == [0, 1, 2, 3]


def test_what_hangs_is_not_waited_for_and_there_is_room_for_so_much_only(sink: Sink) -> None:
    sink.behind.put(0)
    assert sink.at_it.wait(20)
    for item in range(1, 6):
        sink.behind.put(item)
    assert sink.behind.refused == 2
    assert not sink.behind.flush(0.01)
    assert not sink.behind.close(0.01)
    sink.gate.set()
    assert sink.behind.flush(20)
    assert sink.taken == [0, 1, 2, 3]


def test_nothing_is_taken_after_the_end_and_the_thread_is_gone(sink: Sink) -> None:
    before = threading.active_count()
    sink.gate.set()
    sink.behind.put(0)
    assert sink.behind.close(20)
    sink.behind.put(1)
    assert (sink.taken, sink.behind.refused) == ([0], 1)
    for thread in threading.enumerate():
        if thread.name == "sink":
            thread.join(20)
    assert threading.active_count() < before


class Babbler:
    """Says something as it is destroyed."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def __del__(self) -> None:
        self.sink.behind.put(7)


def test_a_destructor_may_hand_in_something_in_the_middle_of_it(sink: Sink) -> None:
    sink.gate.set()
    with sink.behind._changed:  # as within `put`, where the collector may run
        babbler = Babbler(sink)
        del babbler
    assert sink.behind.flush(20)
    assert sink.taken == [7]
