"""Who may use a route, and what to do for those who may not."""

from gpuagent.expose.auth import Peer
from gpuagent.expose.problems import Trouble
from gpuagent.expose.routes import For

BY_TOKEN = "use a token with the scope for this: `gpuagent token issue --scope SCOPE` makes one"  # noqa: S105 - no secret
"""What to do where rights come from tokens."""


def by_group(group: str) -> str:
    """What to do where rights come from the host: the group to join, if there is one."""
    if not group:
        return "ask root: the configuration names no group of administrators (api.group)"
    return (
        f"join the group {group} (usermod -aG {group} USER, then log in again), "
        "or ask an administrator"
    )


class Gate:
    """Tells who may use a route."""

    def __init__(self, remedy: str) -> None:
        self.remedy = remedy
        """What to do where it is refused."""

    def check(self, peer: Peer, audience: For, name: str = "") -> None:
        """Raises Trouble (403). `name` is the variable part of the path, decoded.

        Whether a tenant exists is not asked: who may not report for it does not learn that.
        """
        if not allows(peer, audience, name):
            raise forbidden(peer, "do this")


def allows(peer: Peer, audience: For, name: str = "") -> bool:
    """Whether `peer` is among those that a route is for. What it may see there is another question."""
    match audience:
        case For.ANYONE:
            return True
        case For.TENANTS:
            return peer.sees_all or bool(peer.tenants)
        case For.READERS:
            return peer.sees_all
        case For.SCRAPERS:
            return peer.may_scrape
        case For.REPORTERS:
            return peer.may_report_for(name)
        case For.OVERRIDERS:
            return peer.may_override
        case For.LOCALS:
            return peer.local
        case For.ADMINS:
            return peer.admin


def forbidden(peer: Peer, what: str) -> Trouble:
    reason = f": {peer.why}" if peer.why else ""
    return Trouble(403, f"{peer.label} may not {what}{reason}")
