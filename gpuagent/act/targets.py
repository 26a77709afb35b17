"""What a knob of a tenant or of a process is known by in the ledger, and who else may set it: nobody."""

from gpuagent.errors import Gone
from gpuagent.model.inventory import Subject
from gpuagent.ports import Ender


class OfTenant:
    """What is kept of a tenant in the agent itself: known by the tenant's name."""

    async def identity(self, subject: Subject) -> str:
        return subject.tenant

    async def verify(self, subject: Subject, identity: str) -> None:
        if subject.tenant != identity:
            raise Gone(f"{subject} is not {identity}")

    async def owner(self, subject: Subject) -> int:
        """Root: nothing of it is anywhere that somebody else could change it."""
        return 0


class OfProcess:
    """What is done to a process: known by its number and its start time."""

    def __init__(self, ender: Ender) -> None:
        self._ender = ender

    async def identity(self, subject: Subject) -> str:
        """PID:STARTED. The ledger keeps the boot: within one no two processes have both."""
        return f"{subject.pid}:{subject.started}"

    async def verify(self, subject: Subject, identity: str) -> None:
        if identity != await self.identity(subject):
            raise Gone(f"{subject} is not process {identity}")
        await self._alive(subject)

    async def owner(self, subject: Subject) -> int:
        """Root: to whom the process belongs has nothing to gain by any of it."""
        return 0

    async def _alive(self, subject: Subject) -> None:
        """Raises Gone where it has ended."""
        if not await self._ender.alive(subject.pid, subject.started):
            raise Gone(f"process {subject.pid} has ended, and nothing brings it back")
