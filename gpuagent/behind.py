"""Work that may hang, done by a thread that nobody has to wait for."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Behind(Generic[Item]):
    """A bounded queue, and a thread that takes what has come, all of it at a time.

    A thread that hangs in a call to the kernel keeps neither a caller waiting nor the process alive.
    """

    def __init__(self, take: Callable[[list[Item]], None], *, most: int, name: str) -> None:
        """At most `most` items wait. `take` runs in the thread of this name, and raises nothing."""
        self._take = take
        self._most = most
        self._waiting: list[Item] = []
        self._at_work = False
        self._closed = False
        # Its lock is reentrant: a destructor that runs within `put` may have something to say, too.
        self._changed = threading.Condition()
        self.refused = 0
        """Items for which there was no room, or that came after `close`."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, item: Item) -> None:
        """Hand over one item; returns at once."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._most:
                self.refused += 1
                return
            self._waiting.append(item)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all is done, but no longer than that; whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._at_work, timeout=seconds
            )

    def close(self, seconds: float) -> bool:
        """Take nothing more, and `flush`. The thread ends once it has done what it was given."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.flush(seconds)

    def _run(self) -> None:
        while items := self._next():
            self._take(items)

    def _next(self) -> list[Item]:
        """What has come, once there is something; nothing at the end."""
        with self._changed:
            self._at_work = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closed)
            items, self._waiting = self._waiting, []
            self._at_work = bool(items)
            return items
