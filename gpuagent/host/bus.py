"""The system bus, as far as systemd is asked over it: one connection, made when it is first needed.

Every call has a deadline. After a lost connection or a call past its deadline the next attempt waits,
longer each time, and what is asked meanwhile is answered at once. The library is loaded with the first
call: a host that never needs the bus pays nothing for it.
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from gpuagent.clock import Clock
from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported

if TYPE_CHECKING:
    from dbus_fast.aio import MessageBus

CALL_SECONDS = 2.0
_PAUSE_SECONDS = 0.5
_PAUSE_MOST_SECONDS = 8.0
_SYSTEMD = "org.freedesktop.systemd1"

_MEANING: dict[str, type[AgentError]] = {
    "org.freedesktop.systemd1.NoSuchUnit": Gone,
    "org.freedesktop.systemd1.LoadFailed": Gone,
    "org.freedesktop.DBus.Error.UnknownMethod": Unsupported,
    "org.freedesktop.DBus.Error.UnknownProperty": Unsupported,
    "org.freedesktop.DBus.Error.UnknownInterface": Unsupported,
    "org.freedesktop.DBus.Error.UnknownObject": Gone,
    "org.freedesktop.DBus.Error.NotSupported": Unsupported,
    "org.freedesktop.DBus.Error.AccessDenied": Refused,
    "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired": Refused,
    "org.freedesktop.DBus.Error.InvalidArgs": Refused,
    "org.freedesktop.DBus.Error.PropertyReadOnly": Refused,
    "org.freedesktop.systemd1.UnitMasked": Refused,
    "org.freedesktop.systemd1.BadUnitSetting": Refused,
}
"""What is not here may pass: no reply, a bus that is being restarted, a limit that was hit."""


class SystemBus:
    """For one event loop at a time."""

    def __init__(self, address: str, *, clock: Clock, call_seconds: float = CALL_SECONDS) -> None:
        """`address` as the D-Bus specification writes it: "unix:path=/run/dbus/system_bus_socket"."""
        self._address = address
        self._clock = clock
        self._call_seconds = call_seconds
        self._bus: MessageBus | None = None
        self._loaded = False
        self._connecting = asyncio.Lock()
        self._pause = 0.0
        self._not_before = float("-inf")
        self._why = ""

    async def ask(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        *body: Any,
        seconds: float | None = None,
    ) -> list[Any]:
        """Call a method of systemd's and return what it answers, within so many seconds.

        Raises Gone (no such unit), Unsupported, Refused; Unavailable where there is no bus, no
        systemd on it, or no answer in time.
        """
        now = self._clock.now().mono
        if now < self._not_before:
            raise Unavailable(f"{self._why}; systemd is asked again soon")
        if not self._loaded:
            # Some 40 ms, which are not the loop's to lose, and far more on a slow host.
            await asyncio.to_thread(_load)
            self._loaded = True
        seconds = self._call_seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                answer = await self._called(path, interface, member, signature, list(body))
        except TimeoutError as error:
            raise self._lost(f"no answer over D-Bus within {seconds:g} s") from error
        except (OSError, EOFError) as error:
            raise self._lost(f"no connection to D-Bus ({error or 'it has ended'})") from error
        self._pause = 0.0
        return answer

    def close(self) -> None:
        """Let go of the connection; the next call makes a new one."""
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.disconnect()

    async def _called(
        self, path: str, interface: str, member: str, signature: str, body: list[Any]
    ) -> list[Any]:
        bus = await self._connected()
        from dbus_fast import Message, MessageType
        from dbus_fast.errors import DBusError

        message = Message(
            destination=_SYSTEMD,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=body,
        )
        try:
            reply = await bus.call(message)
        except DBusError as error:
            raise _MEANING.get(error.type, Unavailable)(f"systemd: {error.text}") from error
        if reply is None:  # how the library says that we have closed it meanwhile
            raise ConnectionAbortedError("it was closed")
        if reply.message_type is MessageType.ERROR:
            text = reply.body[0] if reply.body else reply.error_name
            raise _MEANING.get(reply.error_name or "", Unavailable)(f"systemd: {text}")
        answer: list[Any] = reply.body
        return answer

    async def _connected(self) -> "MessageBus":
        async with self._connecting:
            if self._bus is not None and self._bus.connected:
                return self._bus
            self.close()
            from dbus_fast.aio import MessageBus
            from dbus_fast.errors import AuthError, InvalidAddressError

            try:
                bus = MessageBus(bus_address=self._address)
                # A loss of the connection shows at the next call; this marks it as seen.
                bus.add_message_handler(_nothing)
                self._bus = await bus.connect()
            except (AuthError, InvalidAddressError) as error:
                raise ConnectionError(str(error)) from error
            return self._bus

    def _lost(self, why: str) -> Unavailable:
        self._pause = min(max(2 * self._pause, _PAUSE_SECONDS), _PAUSE_MOST_SECONDS)
        self._not_before = self._clock.now().mono + self._pause
        self._why = why
        with contextlib.suppress(OSError):
            self.close()
        return Unavailable(why)


def _nothing(_message: object) -> None:
    return None


def _load() -> None:
    import dbus_fast.aio
    import dbus_fast.errors  # noqa: F401
