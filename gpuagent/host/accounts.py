"""Users and groups of this host, by number."""

import grp
import pwd
from collections.abc import Sequence

from gpuagent.config import Launch
from gpuagent.model.run import Starter


def starters(entries: Sequence[Launch]) -> tuple[Starter, ...]:
    """Who may start what. An entry that names nobody who exists allows nobody anything.

    Blocking: the answer may come from a directory service.
    """
    return tuple(found for entry in entries if (found := _starter(entry)) is not None)


def _starter(entry: Launch) -> Starter | None:
    uid = user_id(entry.user) if entry.user else None
    gid = group_id(entry.group) if entry.group else None
    if (entry.user and uid is None) or (entry.group and gid is None):
        return None
    return Starter(uid, gid, entry.sla)


def user_id(name: str) -> int | None:
    """Of a user by name or number; None where there is no such user."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # ValueError: a zero byte in the name
        return None


def group_id(name: str) -> int | None:
    """Of a group by name or number; None where there is no such group."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        return None
