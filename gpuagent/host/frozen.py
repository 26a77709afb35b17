"""Whether a process is frozen: cuda-checkpoint hangs on one that is (checkpoint-restore/criu#2470)."""

import asyncio
from collections.abc import Callable

from gpuagent.clock import Clock
from gpuagent.errors import Refused, Unavailable, Unsupported
from gpuagent.ports import Cgroups, Processes

Frozen = Callable[[int], bool | None]
"""Whether a process is in a frozen cgroup, None for unknown. Blocking; raises Gone."""

_FOR_GOOD_SECONDS = 30.0
"""A process that is frozen for longer is frozen for good: the agent's own pulses are far shorter."""
_KEPT = 1024


class Thaw:
    """Waits for processes to be thawed, and says when that is in vain."""

    def __init__(self, frozen: Frozen, clock: Clock) -> None:
        self._frozen = frozen
        self._clock = clock
        self._since: dict[tuple[int, int], float] = {}
        """Since when each was frozen whenever it was looked at."""

    async def see(self, pid: int, started: int) -> None:
        """Raises Gone; Unavailable while it is frozen or that is not known, Refused if it is for good."""
        frozen = await asyncio.to_thread(self._frozen, pid)
        if frozen is None:
            raise Unavailable(
                f"it is not known whether process {pid} is frozen: waits until it is known to be "
                "thawed, for cuda-checkpoint hangs on a frozen process"
            )
        key, now = (pid, started), self._clock.now().mono
        if not frozen:
            self._since.pop(key, None)
            return
        for_seconds = now - self._since.setdefault(key, now)
        while len(self._since) > _KEPT:
            del self._since[next(iter(self._since))]
        if for_seconds < _FOR_GOOD_SECONDS:
            raise Unavailable(
                f"process {pid} is frozen, and waits until it is thawed: cuda-checkpoint hangs on it"
            )
        raise Refused(
            f"somebody else has frozen process {pid}, for {for_seconds:.0f} s by now, and "
            "cuda-checkpoint hangs on a frozen process: thaw its control group (`systemctl thaw UNIT`, "
            "or 0 into its cgroup.freeze)"
        )


def frozen_by_cgroup(processes: Processes, cgroups: Cgroups) -> Frozen:
    """By the process's cgroup, itself or from above."""

    def frozen(pid: int) -> bool | None:
        path = processes.cgroup(pid)
        if path in ("", "/"):
            return False  # No cgroup v2, or its root, which cannot be frozen.
        try:
            return "frozen 1" in cgroups.read(path, "cgroup.events").splitlines()
        except (Refused, Unsupported, Unavailable):
            return None

    return frozen
