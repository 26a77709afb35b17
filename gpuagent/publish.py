"""What the agent last saw and did, for every reader, and in the log what changed since."""

import asyncio
import contextlib
import math
import re
from collections import deque

import msgspec
import structlog

from gpuagent.host.notify import Notify
from gpuagent.log import HealthChanges
from gpuagent.model.plan import Snapshot
from gpuagent.model.state import Event, KnobKey, Outcome

EVENTS_KEPT = 500
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")

_log = structlog.get_logger()


class Publisher:
    """Holds the latest snapshot. Readers share it; nobody changes it."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._latest: Snapshot | None = None
        self._news = asyncio.Event()
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._health = HealthChanges()
        self._said: dict[KnobKey, tuple[str, str]] = {}

    def latest(self) -> Snapshot | None:
        return self._latest

    async def shown(self, since: float, *, seconds: float = 2.0) -> Snapshot | None:
        """The first snapshot of a tick that began after `since` (monotonic seconds).

        None if there is none within `seconds`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._latest is None or self._latest.state.now.mono <= since:
                    await self._news.wait()
                return self._latest
        return None

    def note(self, event: Event) -> None:
        """Add an event that no sensor and no policy has made."""
        self._events.append(event)
        _say_event(event)

    def publish(self, snapshot: Snapshot) -> None:
        """Called once a tick: this is also the sign of life for the service manager."""
        self._events += snapshot.events
        self._say(snapshot)
        self._latest = msgspec.structs.replace(snapshot, events=tuple(self._events))
        self._news.set()
        self._news = asyncio.Event()
        self._notify.watchdog()

    def _say(self, snapshot: Snapshot) -> None:
        now = snapshot.state.now.mono
        for health in snapshot.state.health.values():
            self._health.say(health, now)
        for event in snapshot.events:
            _say_event(event)
        settings = snapshot.plan.by_key()
        for key, outcome in snapshot.outcomes.items():
            wish = settings.get(key)
            self._say_outcome(key, outcome, wish.why if wish is not None else "")
        for key in self._said.keys() - snapshot.outcomes.keys():
            del self._said[key]
            _log.info("setting ended", knob=key[0].name, subject=str(key[1]))

    def _say_outcome(self, key: KnobKey, outcome: Outcome, why: str) -> None:
        """Once for each new result, and for each new reason why something is not as wished.

        Numbers in a reason (seconds waited, values read) make no new one: they change all the time.
        """
        reason = _NUMBER.sub("", outcome.why) if outcome.result != "applied" else ""
        now = (outcome.result, reason)
        if self._said.get(key) == now:
            return
        self._said[key] = now
        _log.info(
            "setting",
            knob=outcome.knob.name,
            subject=str(outcome.subject),
            result=outcome.result,
            wanted=_told(outcome.wanted),
            real=_told(outcome.real),
            original=_told(outcome.original),
            why=why,
            became=outcome.why,
        )


def _say_event(event: Event) -> None:
    say = _log.warning if event.alert else _log.info
    say(event.text, kind=event.kind, subject=str(event.subject or "node"))


def _told(value: float | None) -> float | str | None:
    """A value as a log line can hold it: JSON has no infinity."""
    if value is None:
        return None
    return "unlimited" if math.isinf(value) else round(value, 3)
