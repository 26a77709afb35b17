"""A fake cuda-checkpoint, and the CUDA processes it acts on.

    tool = FakeCheckpoint(tmp_path)
    tool.add(pid)                          a CUDA process, running
    tool.on(pid, "lock", "hangs")          what that step does to this process from now on
    tool.state(pid)                        running, locked, checkpointed or failed
    tool.calls                             every call so far, as (what, pid)

A step can *hang* (until `heal`), *hang after* it has done its work, *lie* (exit 0, nothing done), be
*shy* (exit 1 although done), *fail* (exit 1, nothing done), *break* (the state becomes failed) or
*babble* (junk on its output). As the real one it refuses a step that does not fit the state, and a lock
waits for work that does not end (`busy`) until its timeout.
"""

import shutil
from pathlib import Path
from typing import Literal

Step = Literal["get-state", "lock", "checkpoint", "restore", "unlock"]
How = Literal["", "hangs", "hangs after", "lies", "shy", "fails", "breaks", "babbles"]
_PROGRAM = Path(__file__).parent / "cuda-checkpoint"


class FakeCheckpoint:
    """The executable in a folder of its own, with a few files for each process beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoint"
        self._folder.mkdir()
        self.program = str(shutil.copy(_PROGRAM, self._folder))

    def add(self, pid: int, state: str = "running") -> None:
        self._write(pid, "state", state)

    def remove(self, pid: int) -> None:
        """It has no CUDA state any more."""
        (self._folder / f"{pid}.state").unlink()

    def state(self, pid: int) -> str:
        return (self._folder / f"{pid}.state").read_text().strip()

    def put(self, pid: int, state: str) -> None:
        """Somebody else has brought it into this state."""
        self._write(pid, "state", state)

    def on(self, pid: int, step: Step, how: How) -> None:
        if how:
            self._write(pid, step, how)
        else:
            (self._folder / f"{pid}.{step}").unlink(missing_ok=True)

    def heal(self, pid: int) -> None:
        """Every step works from now on, and what hangs returns."""
        for file in self._folder.glob(f"{pid}.*"):
            if file.suffix != ".state":
                file.unlink()

    def busy(self, pid: int) -> None:
        """Its kernels never end: no lock comes about."""
        self._write(pid, "busy", "yes")

    @property
    def calls(self) -> list[tuple[str, int]]:
        try:
            lines = (self._folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(what, int(pid)) for what, pid in (line.split() for line in lines)]

    @property
    def actions(self) -> list[str]:
        """The steps that were asked for, without questions about the state."""
        return [what for what, _ in self.calls if what != "get-state"]

    def _write(self, pid: int, what: str, text: str) -> None:
        whole = self._folder / "new"
        whole.write_text(text + "\n")
        whole.replace(self._folder / f"{pid}.{what}")
