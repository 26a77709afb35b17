"""What may be asked about the memory of cards, by those who free it and need it again."""

from collections.abc import Mapping
from typing import Protocol


class Memory(Protocol):
    """Who holds how much of which card, as it was last read. Never waits."""

    def memory_of(self, pid: int, since: float) -> Mapping[str, int] | None:
        """Bytes that a process holds, by card, as read since then (monotonic seconds); None for unknown."""

    def memory_free(self, uuid: str, since: float) -> float | None:
        """Bytes of a card that nobody holds, as sampled since then; None for unknown."""
