"""How a tenant is told that it is held back: a signal to those of its processes that catch it, a command.

It is told once each time that it begins. What fails is tried a few times; signals that have been sent
are not sent again meanwhile.
"""

import asyncio
import signal
from collections.abc import Sequence

import structlog

from gpuagent.act.protects import Seen
from gpuagent.act.targets import OfTenant
from gpuagent.errors import Gone, Refused, Unavailable
from gpuagent.model.declare import Knob
from gpuagent.model.inventory import Notice, Place, Process, Subject, Tenant
from gpuagent.model.vocab import NOTICED
from gpuagent.ports import Ender, Real

UNTOLD = Real(0.0, "untold")
TOLD = Real(1.0, "told")
COMMAND_SECONDS = 10.0
TRIES = 3
FORGET_SECONDS = 180.0
"""Nobody has asked for so long: the next time is another occasion. Lanes ask again within 60 s."""
_KEPT = 1024

_log = structlog.get_logger()


class _Attempt:
    """What has been done of one notice that has not succeeded yet."""

    def __init__(self) -> None:
        self.at = 0.0
        """Loop time at which somebody last asked for it."""
        self.tries = 0
        self.why = ""
        self.signalled: set[tuple[int, int]] = set()


class Noticed(OfTenant):
    """Whether a tenant has been told. Kept in memory: an agent that starts anew tells anew."""

    knob: Knob = NOTICED

    def __init__(self, ender: Ender, *, seen: Seen) -> None:
        self._ender = ender
        self._seen = seen
        self._told: dict[str, None] = {}
        self._attempts: dict[str, _Attempt] = {}

    async def get(self, subject: Subject) -> Real:
        return TOLD if subject.tenant in self._told else UNTOLD

    def encode(self, subject: Subject, value: float, original: Real) -> Real:
        # Written so that not-a-number, too, asks for nothing.
        return TOLD if value >= TOLD.value else original

    async def set(self, subject: Subject, raw: str) -> None:
        name = subject.tenant
        if raw == UNTOLD.raw:
            self._told.pop(name, None)
            return
        tenant = self._seen().tenant(name)
        if tenant is None:
            raise Gone(f"there is no tenant {name}")
        attempt = self._attempt(name)
        if attempt.tries >= TRIES:
            raise Refused(f"told {TRIES} times in vain, and not again: {attempt.why}")
        try:
            await self._tell(tenant, attempt)
        except (Refused, Unavailable) as error:
            attempt.tries += 1
            attempt.why = str(error)
            raise
        self._attempts.pop(name, None)
        self._told[name] = None
        _shorten(self._told)

    # -- telling --------------------------------------------------------------------------------------

    def _attempt(self, name: str) -> _Attempt:
        now = asyncio.get_running_loop().time()
        known = self._attempts.get(name)
        if known is None or now - known.at > FORGET_SECONDS:
            known = self._attempts[name] = _Attempt()
            _shorten(self._attempts)
        known.at = now
        return known

    async def _tell(self, tenant: Tenant, attempt: _Attempt) -> None:
        notice = tenant.notice
        deaf = await self._signal(notice, tenant.processes, attempt) if notice.signal else 0
        if notice.command:
            await self._run(notice.command, tenant)
        elif notice.signal and not attempt.signalled:
            raise Refused(
                f"none of its {len(tenant.processes)} processes catches {notice.signal}: give it a handler, "
                "or a notice_command"
            )
        if notice:
            _log.info(
                "tenant told",
                tenant=tenant.name,
                signalled=len(attempt.signalled),
                do_not_catch_it=deaf,
                not_looked_at=max(0, tenant.process_count - len(tenant.processes)),
                command=" ".join(notice.command),
            )

    async def _signal(self, notice: Notice, processes: Sequence[Process], attempt: _Attempt) -> int:
        """Signal those that catch it, once; how many do not."""
        number = signal.Signals[notice.signal]
        deaf = 0
        for process in processes:
            key = (process.pid, process.started)
            if key in attempt.signalled:
                continue
            try:
                if await self._ender.catches(*key, number):
                    await self._ender.send(*key, number)
                    attempt.signalled.add(key)
                else:
                    deaf += 1
            except Gone:
                continue
        return deaf

    async def _run(self, command: Sequence[str], tenant: Tenant) -> None:
        uid = _user(tenant)
        path, inode = _cgroup(tenant)
        await self._ender.run_as(uid, command, COMMAND_SECONDS, cgroup=path, inode=inode)


def _user(tenant: Tenant) -> int:
    """As whom a tenant's command is run. Raises Refused where that is not plain, or not safe."""
    users = {p.uid: p.user for p in tenant.processes}
    if not users:
        raise Gone(f"{tenant.name} has no process")
    if len(users) > 1:
        names = ", ".join(sorted(users.values())[:5])
        raise Refused(
            f"its processes have several users ({names}): as whom is not plain; make it a tenant for each, "
            "or use notice_signal"
        )
    (uid,) = users
    if uid == 0 and not all(_on_the_host(p) for p in tenant.places):
        raise Refused(
            "its processes are root inside a container: nothing is run as root for it; let it run as another "
            "user, or use notice_signal"
        )
    return uid


def _on_the_host(place: Place) -> bool:
    """Whether who is root there is root here."""
    inside = place.container or place.pod or place.slurm_job
    return not inside and not place.home.startswith("/machine.slice/")


def _cgroup(tenant: Tenant) -> tuple[str, int]:
    """A cgroup of the tenant's own in which a process of it lives; empty for none."""
    inhabited = {p.cgroup for p in tenant.processes}
    for seat in tenant.seats:
        if not seat.refusal and seat.path in inhabited:
            return seat.path, seat.inode
    return "", 0


def _shorten(kept: "dict[str, None] | dict[str, _Attempt]") -> None:
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]
