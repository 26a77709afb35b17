"""The ways into the agent as they are now: its listeners, and who holds a token."""

import msgspec

from gpuagent.expose.views import ListenerView
from gpuagent.model.token import Token


class Access(msgspec.Struct, frozen=True):
    listeners: tuple[ListenerView, ...] = ()
    tokens: tuple[Token, ...] = ()
    """Those that are valid, by id."""
    tokens_why: str = ""
    """Why none is valid; empty while their file is as it should be."""
    certificate_ends_wall: float | None = None
    """When the certificate of the network listener expires, in seconds since the epoch."""
    unsaved_why: str = ""
    """Why a restart would find other tokens or overrides in force; empty while all is on the disk."""
