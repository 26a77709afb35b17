"""The NVML child: reads every card when it is due, sends what it finds, obeys a few commands.

Run as `python -m gpuagent.host.nvml_worker` by `nvml.NvmlGpus`. Standard library and pynvml only.
It keeps no promises about time itself: the parent watches the slot in which each call is announced
and ends the child when one does not return. It ends by itself when its input does, when there is no
driver, and when cards come or go, since only a new process makes the library look again.
"""

import contextlib
import heapq
import json
import math
import os
import sys
import time
from typing import Any

import pynvml

from gpuagent.host.child import CallSlot, Pipes, begin
from gpuagent.host.nvml_card import Card, Frame, address_of
from gpuagent.host.nvml_driver import EVERY_CARD, CardLost, Driver, DriverGone, NoValue
from gpuagent.host.nvml_fields import LINKS, SAMPLE, SLOW, STATUS
from gpuagent.host.nvml_orders import obey

PROCESSES, EVENTS, CENSUS = "processes", "events", "census"
READ_RATES = (SAMPLE, STATUS, LINKS, SLOW)

_GRID_SECONDS = 0.25
"""Least time between two rounds of work where samples are taken seldom."""
_APART_SECONDS = 0.1
_IDLE_SECONDS = 0.5
"""Longest wait: after each, the child shows that it is alive."""
_EVENT_WAIT_MS = 1
_EVENTS_AT_ONCE = 64
_RETRY_SECONDS = 1.0


class CardsChanged(Exception):
    """The number of cards is no longer what it was when this process began."""


class Reader:
    """Everything the child does, one thing after the other."""

    def __init__(self, driver: Driver, slot: CallSlot, pipes: Pipes, settings: Frame) -> None:
        self._driver = driver
        self._slot = slot
        self._pipes = pipes
        self._every: dict[str, float] = settings["every"]
        self._retry_max: float = settings["retry_max"]
        self._skip: list[int] = settings["skip"]
        self._cards: dict[int, Card] = {}
        self._pauses: dict[int, float] = {}
        """Cards that did not answer, and for how long they are left alone."""
        self._events: Any = None
        self._uuids: dict[int, str] = {}
        """By the driver's handle, as events carry it; a card that is lost keeps its place."""
        self._registered: set[int] = set()
        self._due: list[tuple[float, bool, int, str]] = []
        """(when, whether it is less urgent than a sample, card, job): a heap."""
        self._count = 0
        self._began = time.monotonic()
        self._folder: str = settings["listing"]
        self._listed = _listing(self._folder)

    # -- the cards ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Find the cards, say hello, and plan the work."""
        self._count = int(self._driver.call(EVERY_CARD, "nvmlDeviceGetCount"))
        version = self._driver.call(EVERY_CARD, "nvmlSystemGetDriverVersion")
        with contextlib.suppress(NoValue):
            self._events = self._driver.call(EVERY_CARD, "nvmlEventSetCreate")
        self._send({"t": "hello", "driver": str(version), "count": self._count})
        for index in range(self._count):
            if index not in self._skip:
                self._find(index)
        for work in (Card.find_links, self._introduce):
            for card in list(self._cards.values()):
                self._attempt(card.index, work, card)
        self._plan(0.0, EVERY_CARD, CENSUS)
        if self._events is not None:
            self._plan(0.0, EVERY_CARD, EVENTS)

    def _find(self, index: int) -> Card | None:
        """Open a card; one that does not answer is tried again later."""
        try:
            card = Card(self._driver, index)
        except DriverGone:
            raise
        except NoValue as error:
            self._blind(index, str(error))
            return None
        twin = next((c for c in self._cards.values() if c.uuid == card.uuid), None)
        if twin is not None:
            self._blind(index, f"it says that it has the UUID of GPU {twin.index}")
            return None
        self._cards[index] = card
        return card

    def _introduce(self, card: Card) -> None:
        """Send who the card is and its first readings, and begin to work on it."""
        self._register(card)
        self._send(card.identity(list(self._cards.values())))
        self._pauses.pop(card.index, None)
        for rate in READ_RATES:
            self._read(card, rate)
        self._processes(card)
        self._begin_work(card.index)
        self._send({"t": "introduced", "i": card.index})

    def _register(self, card: Card) -> None:
        self._uuids[card.address] = card.uuid
        if self._events is None:
            return
        kind = pynvml.nvmlEventTypeXidCriticalError
        try:
            self._driver.call(
                card.index, "nvmlDeviceRegisterEvents", card.handle, kind, self._events
            )
        except (CardLost, DriverGone):
            raise
        except NoValue:
            return  # No events on this card: the kernel log is what is left.
        self._registered.add(card.index)

    def _blind(self, index: int, why: str) -> None:
        """Stop working on a card, say why, and look again after a growing pause."""
        card = self._cards.pop(index, None)
        self._drop_work(index)
        pause = min(self._retry_max, 2 * self._pauses.get(index, _RETRY_SECONDS / 2))
        self._pauses[index] = pause
        self._plan(pause, index, "find")
        self._send({"t": "blind", "i": index, "uuid": card.uuid if card else "", "why": why})

    def _attempt(self, index: int, work: Any, card: Card) -> None:
        try:
            work(card)
        except CardLost as error:
            self._blind(index, str(error))

    # -- the work -------------------------------------------------------------------------------------

    def _plan(self, seconds: float, index: int, job: str) -> None:
        """Do a job so many seconds from now, or a little later, when we are awake anyway."""
        whole = self._every[SAMPLE]
        grid = whole / math.ceil(whole / _GRID_SECONDS)
        # What is due a tenth of a grid after a round is done in that round.
        due = math.ceil((time.monotonic() + seconds) / grid - 0.1) * grid
        heapq.heappush(self._due, (due, job != SAMPLE, index, job))

    def _begin_work(self, index: int) -> None:
        """Plan everything that is read of a card; what is expensive, not for all cards at once."""
        for number, job in enumerate((*READ_RATES, PROCESSES)):
            apart = 0.0 if job == SAMPLE else (index + number) * _APART_SECONDS
            self._plan(self._every[job] + apart, index, job)

    def _drop_work(self, index: int) -> None:
        self._due = [job for job in self._due if job[2] != index]
        heapq.heapify(self._due)

    def run(self) -> None:
        """Until the parent closes the pipe. Raises DriverGone and CardsChanged."""
        while True:
            self._slot.alive()
            wait = self._due[0][0] - time.monotonic() if self._due else _IDLE_SECONDS
            try:
                lines = self._pipes.receive(min(wait, _IDLE_SECONDS))
            except EOFError:
                return
            for line in lines:
                self._obey(json.loads(line))
            self._work_off()

    def _work_off(self) -> None:
        """Take all samples that are due, then at most one job that may take longer."""
        urgent = True
        while urgent and self._due and self._due[0][0] <= time.monotonic():
            due, later, index, job = heapq.heappop(self._due)
            urgent = not later
            self._work(due, index, job)

    def _work(self, due: float, index: int, job: str) -> None:
        if job == "find":
            card = None if index in self._cards else self._find(index)
            for work in (Card.find_links, self._introduce):
                if card is not None and index in self._cards:
                    self._attempt(index, work, card)
            return
        every = self._every[job]
        # A job that is late is not made up for: the next one is due a whole interval from now.
        behind = time.monotonic() - due > every
        self._plan(every if behind else due + every - time.monotonic(), index, job)
        if job == EVENTS:
            self._drain_events()
        elif job == CENSUS:
            self._take_census()
        elif job == PROCESSES:
            self._attempt(index, self._processes, self._cards[index])
        else:
            self._attempt(index, lambda card: self._read(card, job), self._cards[index])

    def _read(self, card: Card, rate: str) -> None:
        if rate == SLOW:
            card.find_links()
            self._send(card.identity(list(self._cards.values())))
        at = time.monotonic()
        rows, sliced = card.read(rate)
        frame = {"t": "rows", "at": at, "uuid": card.uuid, "r": rows, "mig": sliced}
        self._pipes.send(frame, droppable=True)

    def _processes(self, card: Card) -> None:
        frame = card.processes()
        if frame is not None:
            self._pipes.send(frame, droppable=True)

    def _take_census(self) -> None:
        """See whether cards have come or gone, which the library shows only to a new process."""
        empty_for_long = not self._count and time.monotonic() - self._began > self._retry_max
        if empty_for_long or _listing(self._folder) != self._listed:
            raise CardsChanged

    def _drain_events(self) -> None:
        for _ in range(_EVENTS_AT_ONCE):
            try:
                event = self._driver.call(
                    EVERY_CARD, "nvmlEventSetWait_v2", self._events, _EVENT_WAIT_MS
                )
            except DriverGone:
                raise
            except CardLost:
                self._renew_events()
                return
            except NoValue:
                return  # Nothing more.
            uuid = self._uuids.get(address_of(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                xid = int(event.eventData)
                self._send({"t": "xid", "at": time.monotonic(), "uuid": uuid, "xid": xid})

    def _renew_events(self) -> None:
        """A lost card would keep the set from telling of the others: make one without it."""
        if self._registered <= set(self._cards):
            return
        self._driver.call(EVERY_CARD, "nvmlEventSetFree", self._events)
        self._events = self._driver.call(EVERY_CARD, "nvmlEventSetCreate")
        self._registered.clear()
        for card in list(self._cards.values()):
            self._attempt(card.index, self._register, card)

    def _send(self, frame: Frame) -> None:
        self._pipes.send(frame)

    # -- commands -------------------------------------------------------------------------------------

    def _obey(self, command: Frame) -> None:
        """Do as the parent asks; what goes wrong is in the answer."""
        answer: Frame = {"t": "answer", "id": command["id"], "value": None, "code": 0, "why": ""}
        try:
            answer["value"] = self._command(command)
        except DriverGone:
            raise
        except NoValue as error:
            answer["code"] = error.code
            answer["why"] = str(error)
        self._send(answer)

    def _command(self, command: Frame) -> int | None:
        do = command["do"]
        if do == "rates":
            self._every = command["every"]
            self._retry_max = command["retry_max"]
            for index in self._cards:
                self._drop_work(index)
                self._begin_work(index)
            return None
        if do == "adopt":
            self._plan(0.0, command["i"], "find")
            return None
        card = next((c for c in self._cards.values() if c.uuid == command["uuid"]), None)
        if card is None:
            raise CardLost(pynvml.NVML_ERROR_GPU_NOT_FOUND, "no card of this UUID answers")
        return obey(card.ask, do, command["value"])


def _listing(folder: str) -> list[str]:
    """Cards as the kernel module lists them; empty where it does not."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _look(driver: Driver, slot: CallSlot, pipes: Pipes, only: int | None) -> None:
    """Read every card, or one, once: for a card that hung, and for `gpuagent check`."""
    count = int(driver.call(EVERY_CARD, "nvmlDeviceGetCount"))
    version = str(driver.call(EVERY_CARD, "nvmlSystemGetDriverVersion"))
    pipes.send({"t": "hello", "driver": version, "count": count})
    for index in range(count) if only is None else (only,):
        slot.alive()
        try:
            card = Card(driver, index)
            pipes.send(card.identity([card]))
            for rate in READ_RATES:
                card.read(rate)
            card.processes()
        except DriverGone:
            raise
        except NoValue as error:
            pipes.send({"t": "blind", "i": index, "uuid": "", "why": str(error)})
    pipes.send({"t": "bye", "why": "done", "code": 0, "missing": driver.missing})


def main() -> None:
    slot, pipes, settings = begin(sys.argv)
    try:
        driver = Driver(slot, str(settings["library"]))
        if settings["look"]:
            only = settings["only"]
            _look(driver, slot, pipes, only if isinstance(only, int) else None)
        else:
            reader = Reader(driver, slot, pipes, settings)
            reader.open()
            reader.run()
    except CardsChanged:
        pipes.send({"t": "bye", "why": "cards have come or gone", "code": 0, "missing": ()})
    except NoValue as error:
        pipes.send({"t": "bye", "why": str(error), "code": error.code, "missing": ()})
    pipes.finish(1.0)


if __name__ == "__main__":
    main()
