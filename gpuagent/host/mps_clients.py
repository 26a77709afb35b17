"""With which thread percentage each MPS client started: nothing that is set later changes it (FACTS 3).

A client takes the lower of what its environment says and what its server allowed when it connected.
No command tells that of a running client, so it is noted when the client is first seen.
"""

from collections.abc import Iterable

from gpuagent.model.inventory import MpsClient

_VARIABLE = b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="
_ENVIRONMENT_BYTES_MOST = 1 << 20


class Starts:
    """What the clients that are there now have started with."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._known: dict[tuple[int, int], tuple[str, float | None]] = {}
        """Start time and ratio by server and client."""

    def client(self, pid: int, server: int, allowed: float | None) -> MpsClient:
        """A client whose server allows so much now."""
        known = self._known.get((server, pid))
        started = self._started(pid)
        if known is None or known[0] != started:
            own = self._own(pid)
            ratio = None if own is None or allowed is None else min(own, allowed)
            known = self._known[server, pid] = (started, ratio)
        return MpsClient(pid, server, known[1])

    def keep(self, clients: Iterable[MpsClient]) -> None:
        """Forget all others."""
        here = {(c.server, c.pid) for c in clients}
        self._known = {key: value for key, value in self._known.items() if key in here}

    def _started(self, pid: int) -> str:
        try:
            with open(f"{self._proc}/{pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read(4096).rpartition(")")[2].split()[19]
        except (OSError, IndexError):
            return ""

    def _own(self, pid: int) -> float | None:
        """What its environment says, 1 where that says nothing; None where it cannot be read."""
        try:
            with open(f"{self._proc}/{pid}/environ", "rb") as file:
                words = file.read(_ENVIRONMENT_BYTES_MOST).split(b"\0")
        except OSError:
            return None
        said = [w.removeprefix(_VARIABLE) for w in words if w.startswith(_VARIABLE)]
        try:
            percent = float(said[0]) if said else 100.0
        except ValueError:
            return None
        return percent / 100 if 0 < percent <= 100 else None
