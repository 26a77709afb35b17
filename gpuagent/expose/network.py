"""The listener for other machines: TLS or nothing, and no more of it at once than the agent can bear.

Whoever connects is counted before the handshake, which is where the work is: so many at once, so
many a second for one address and for all of them, each with a few seconds' time. What hinders the
listener (an address that is not there yet, a certificate that cannot be used) keeps nothing else of
the agent from its work: it is said, and tried again once a minute.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from gpuagent.clock import Clock
from gpuagent.errors import Refused
from gpuagent.expose.allowance import Allowance
from gpuagent.expose.sockets import BACKLOG
from gpuagent.quantities import split_address
from gpuagent.tlspair import Stamp, Validity, context, stamp, validity

HANDSHAKES = 16
HANDSHAKES_PER_ADDRESS = 4
"""At once; one more ends the one that has taken longest."""
HANDSHAKE_SECONDS = 5.0
LOOK_SECONDS = 60.0
"""Between looks at the files, and between attempts to listen."""
_OF_ONE = {"burst": 32, "per_second": 4.0}
_OF_ALL = {"burst": 128, "per_second": 32.0}
_ADDRESSES_MOST = 1024
_FULL_SECONDS = 1.0
_GOODBYE_SECONDS = 1.0

Tell = Callable[[str, str, bool], None]
"""Kind of an event, its text, and whether somebody has to do something."""

_log = structlog.get_logger()


def say(kind: str, text: str, alert: bool) -> None:
    """Tell the log."""
    (_log.warning if alert else _log.info)(text, kind=kind)


class Crowd:
    """Who may begin a handshake, by address. Bounded, however many addresses come."""

    def __init__(self) -> None:
        self._all = Allowance(**_OF_ALL)  # type: ignore[arg-type]
        self._each: OrderedDict[str, Allowance] = OrderedDict()

    def __len__(self) -> int:
        return len(self._each)

    def admits(self, address: str, now: float) -> bool:
        """Whether one more may begin. The own allowance comes first: one cannot use up that of all."""
        own = self._each.setdefault(address, Allowance(**_OF_ONE))  # type: ignore[arg-type]
        self._each.move_to_end(address)
        while len(self._each) > _ADDRESSES_MOST:
            self._each.popitem(last=False)
        return own.take(now) and self._all.take(now)


@dataclass(frozen=True, slots=True)
class Remote:
    """Where to listen for other machines, and the files of the pair (see `tlspair`)."""

    listen: str
    certificate: str
    key: str


class Network:
    """Listens, greets, and keeps the certificate fresh. `run` does all of it."""

    def __init__(
        self,
        remote: Remote,
        *,
        admission: Callable[[], asyncio.Protocol],
        clock: Clock,
        tell: Tell = say,
    ) -> None:
        """`admission` receives each connection once its handshake is done."""
        self._listen = remote.listen
        self._pair = (remote.certificate, remote.key)
        self._admission = admission
        self._clock = clock
        self._tell = tell
        self._context: ssl.SSLContext | None = None
        self._stamps: tuple[Stamp, ...] | None = None
        """Of the files when they were last read."""
        self._pair_why = ""
        self._validity: Validity | None = None
        """Of the certificate in use."""
        self._listen_why = ""
        self._told = ""
        self._sock: socket.socket | None = None
        self._greeting: dict[asyncio.Task[None], str] = {}
        """The handshakes in progress, by age, and with whom."""
        self._crowd = Crowd()
        self._asked = asyncio.Event()
        self.tried = asyncio.Event()
        """Set while every look that was asked for has been made."""

    @property
    def port(self) -> int | None:
        """Where it listens; None while it does not."""
        return None if self._sock is None else int(self._sock.getsockname()[1])

    @property
    def why(self) -> str:
        """What is amiss; empty while all is well."""
        whys = (self._listen_why, self._pair_why, self._validity_why)
        return "; ".join(w for w in whys if w)

    @property
    def _validity_why(self) -> str:
        """Clients refuse a certificate out of its time; who does not look at that is served."""
        why = self._validity.why_not(self._clock.now().wall) if self._validity is not None else ""
        return f"clients refuse its certificate: {why}" if why else ""

    @property
    def certificate_ends_wall(self) -> float | None:
        """When the certificate in use expires, in seconds since the epoch; None if not known."""
        return None if self._validity is None else self._validity.ends_wall

    @property
    def handshakes(self) -> int:
        """How many are in progress."""
        return len(self._greeting)

    def renew(self) -> None:
        """Look at the files now, whether they have changed or not."""
        self._stamps = None
        self.tried.clear()
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled; then nothing is open any more but what was handed on."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    await self._look()
                    if self._context is not None and self._sock is None:
                        self._open(group)
                    self._say()
                    if not self._asked.is_set():
                        self.tried.set()
                    await self._until_asked()
            finally:
                if self._sock is not None:
                    self._sock.close()

    async def _until_asked(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._asked.wait()
        self._asked.clear()

    def _say(self) -> None:
        if self.why == self._told:
            return
        self._told = self.why
        if self.why:
            self._tell("network-listener", f"the network listener: {self.why}", True)
        else:
            self._tell("network-listener", f"the network listener is well: {self._listen}", False)

    # -- the pair ------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Read the files if they have changed. A pair that cannot be used leaves the old in force."""
        stamps = await asyncio.to_thread(lambda: tuple(stamp(path) for path in self._pair))
        if stamps == self._stamps:
            return
        self._stamps = stamps
        before = self._context
        try:
            self._context = await asyncio.to_thread(context, *self._pair)
            self._validity = await asyncio.to_thread(validity, self._pair[0])
        except Refused as error:
            old = "; the one before stays in use" if before is not None else ""
            self._pair_why = f"its certificate cannot be used{old}: {error}"
            return
        self._pair_why = ""
        if before is not None:
            self._tell("certificate", "the network listener has read its certificate again", False)

    # -- the door ------------------------------------------------------------------------------------

    def _open(self, group: asyncio.TaskGroup) -> None:
        host, port = split_address(self._listen, anywhere=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setblocking(False)
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            self._listen_why = f"cannot listen on {self._listen} ({error.strerror}); it is tried again every minute"
            return
        self._listen_why = ""
        self._sock = sock
        group.create_task(self._take(sock, group))

    async def _take(self, sock: socket.socket, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(sock)
            except OSError:
                # No file descriptors, or no memory, for a while.
                await asyncio.sleep(_FULL_SECONDS)
                continue
            whose = network_of(address)
            if self._crowd.admits(whose, self._clock.now().mono):
                self._make_room(whose)
                task = group.create_task(self._greet(connection))
                self._greeting[task] = whose
                task.add_done_callback(self._greeted)
            else:
                connection.close()
            # Without this, a crowd that never ends would keep everything else from its turn. It also
            # lets the greeting begin: from then on the connection is closed with it, come what may.
            await asyncio.sleep(0)

    def _make_room(self, whose: str) -> None:
        own = [t for t, address in self._greeting.items() if address == whose]
        if len(own) >= HANDSHAKES_PER_ADDRESS:
            self._end(own[0])
        elif len(self._greeting) >= HANDSHAKES:
            self._end(next(iter(self._greeting)))

    def _end(self, greeting: asyncio.Task[None]) -> None:
        greeting.cancel()
        self._greeted(greeting)

    def _greeted(self, greeting: asyncio.Task[None]) -> None:
        self._greeting.pop(greeting, None)

    async def _greet(self, connection: socket.socket) -> None:
        """The handshake, with the certificate as it is now. Who fails it is gone without a word."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._admission,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=_GOODBYE_SECONDS,
            )
        except OSError:
            return  # an SSLError and a TimeoutError are OSErrors as well
        except Exception:  # noqa: BLE001 - the outermost frame: no connection ends the daemon
            _log.exception("a connection met a fault of the agent")


def network_of(address: Any) -> str:
    """Whose connection it is: an IPv4 address, or the 64 bits that one IPv6 host has to itself."""
    whole = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(whole, ipaddress.IPv4Address):
        return str(whole)
    if whole.ipv4_mapped is not None:
        return str(whole.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(whole) >> 64 << 64))
