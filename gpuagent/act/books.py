"""Sensor `ledger`: whether changes can be recorded, for without that none is made."""

from gpuagent.act.audit import AuditLog
from gpuagent.act.ledger import Ledger
from gpuagent.errors import Refused
from gpuagent.model.state import Instant, NodeState, Sensed


class Books:
    """Has nothing to read but the health of the ledger and the audit log."""

    name = "ledger"
    interval = 1.0

    def __init__(self, ledger: Ledger, audit: AuditLog) -> None:
        self._ledger = ledger
        self._audit = audit

    async def read(self, now: Instant, state: NodeState) -> Sensed:
        """Nothing. Raises Refused while the disk does not take what it is given."""
        if self._ledger.trouble:
            raise Refused(
                f"{self._ledger.trouble}; nothing new is changed until it can be recorded"
            )
        if self._audit.trouble:
            raise Refused(f"{self._audit.trouble}; actions go on, but are not logged")
        return Sensed()
