"""What the agent last saw and did, for every reader, and in the log what changed since."""

import asyncio
import contextlib
import math
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from gpuagent.host.notify import Notify
from gpuagent.log import HealthChanges
from gpuagent.model.audit import Action
from gpuagent.model.declare import On
from gpuagent.model.inventory import on_tenant
from gpuagent.model.plan import Hold, Snapshot, plainly
from gpuagent.model.run import RunList
from gpuagent.model.state import EVENT_KINDS, Event, KnobKey, Outcome

EVENTS_KEPT = 500
KINDS_MOST = 64
"""Kinds of events that are counted one by one: each is a series in /metrics."""
SHARE_STEP = 0.1
"""A share that moves less than this is no news."""
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")

_log = structlog.get_logger()


class Publisher:
    """Holds the latest snapshot. Readers share it; nobody changes it."""

    def __init__(
        self,
        notify: Notify,
        audit: Callable[[], tuple[Action, ...]] = tuple,
        runs: Callable[[], RunList] = RunList,
    ) -> None:
        """`audit` gives the latest actions, without waiting for anything; so do `runs` theirs."""
        self._notify = notify
        self._audit = audit
        self._runs = runs
        self._latest: Snapshot | None = None
        self._news = asyncio.Event()
        self._run = secrets.token_hex(4)
        self._count = 0
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._by_kind = dict.fromkeys(EVENT_KINDS, 0)
        self._listeners: list[Callable[[], None]] = []
        self._shares = Shares()
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

    def listen(self, ring: Callable[[], None]) -> None:
        """Call `ring` after each snapshot, for good. The loop waits for it: it must only note that."""
        self._listeners.append(ring)

    def note(self, event: Event) -> None:
        """Add an event that no sensor and no policy has made. It is told with the next snapshot."""
        self._add((event,))

    def publish(self, snapshot: Snapshot) -> None:
        """Called once a tick: this is also the sign of life for the service manager."""
        self._say(snapshot)
        self._add(snapshot.events)
        self._add(self._shares.news(snapshot))
        self._latest = msgspec.structs.replace(
            snapshot,
            run=self._run,
            events=tuple(self._events),
            events_by_kind=dict(self._by_kind),
            audit=self._audit(),
            runs=self._runs(),
        )
        self._news.set()
        self._news = asyncio.Event()
        for ring in self._listeners:
            ring()
        self._notify.watchdog()

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            self._count += 1
            self._events.append(msgspec.structs.replace(event, number=self._count))
            known = event.kind in self._by_kind or len(self._by_kind) < KINDS_MOST
            kind = event.kind if known else "other"
            self._by_kind[kind] = self._by_kind.get(kind, 0) + 1
            _say_event(event)

    def _say(self, snapshot: Snapshot) -> None:
        now = snapshot.state.now.mono
        for health in snapshot.state.health.values():
            self._health.say(health, now)
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


class Shares:
    """What tenants are left of their activity, as news for them: they may adapt to it (DESIGN 5, rung 0).

    Only what is so on the host counts, not what is merely decided.
    """

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        """Of those that are left less than all; as it was last told."""

    def news(self, snapshot: Snapshot) -> Iterator[Event]:
        """Events for the tenants whose share has moved by `SHARE_STEP`, or has become whole again.

        Its own user is told of them: they name nobody else, nor what another is promised.
        """
        now = _tightest(snapshot.holds)
        at = snapshot.state.now.mono
        present = {t.name for t in snapshot.state.inventory.tenants or ()}
        for name in sorted((now.keys() | self._told.keys()) & present):
            before, hold = self._told.get(name, 1.0), now.get(name)
            share = 1.0 if hold is None else hold.share
            if share == before or (share < 1 and abs(share - before) < SHARE_STEP and before < 1):
                continue
            self._told[name] = share
            yield _share_event(name, hold, at, cut=share < before)
        self._told = {n: s for n, s in self._told.items() if s < 1 and n in present}


def _tightest(holds: Iterable[Hold]) -> dict[str, Hold]:
    found: dict[str, Hold] = {}
    for hold in holds:
        if hold.subject.on is On.TENANT and hold.in_force and hold.share < 1:
            name = hold.subject.tenant
            found[name] = min(found.get(name, hold), hold, key=lambda h: h.share)
    return found


def _share_event(name: str, hold: Hold | None, at: float, *, cut: bool) -> Event:
    kind = "share-cut" if cut else "share-raised"
    if hold is None:
        text, share = f"tenant {name} is held back no longer", 1.0
    else:
        share = hold.share
        text = f"tenant {name} is left {share * 100:.0f} % of its usual activity: {plainly(hold.cause)}"
    return Event(kind, at, text, on_tenant(name), (("share_ratio", share),))


def _say_event(event: Event) -> None:
    say = _log.warning if event.alert else _log.info
    say(event.text, kind=event.kind, subject=str(event.subject or "node"))


def _told(value: float | None) -> float | str | None:
    """A value as a log line can hold it: JSON has no infinity."""
    if value is None:
        return None
    return "unlimited" if math.isinf(value) else round(value, 3)
