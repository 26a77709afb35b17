"""A fake nvidia-smi that knows `compute-policy` and nothing else, and the cards behind it.

smi = FakeSmi(tmp_path, ["GPU-1", "GPU-2"])
ComputePolicy(smi.program)
smi.slices["GPU-1"]            what the card has; assigning: somebody else set it
smi.mode = "lies"              exit 0 and nothing done; "fails": exit 3 although done;
                               "hangs", "denies", "old" (no such command), "babbles"
"""

import json
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Literal

Mode = Literal["", "lies", "fails", "hangs", "denies", "old", "babbles"]
_HERE = Path(__file__).parent


class FakeSmi:
    """The executable in a folder of its own, with a file of state beside it."""

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self._state = folder / "smi.json"
        program = folder / "nvidia-smi"
        source = (_HERE / "program.py").read_text()
        program.write_text(f"#!{sys.executable} -I\n{source}")
        program.chmod(0o755)
        self.program = str(program)
        self._write({"slices": dict.fromkeys(uuids, 0), "mode": "", "calls": []})

    @property
    def slices(self) -> "Slices":
        return Slices(self)

    @property
    def mode(self) -> Mode:
        mode: Mode = self.read()["mode"]  # type: ignore[assignment]
        return mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._write({**self.read(), "mode": mode})

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of every call so far."""
        calls = self.read()["calls"]
        assert isinstance(calls, list)
        return calls

    def read(self) -> dict[str, object]:
        state: dict[str, object] = json.loads(self._state.read_text())
        return state

    def _write(self, state: dict[str, object]) -> None:
        whole = self._state.with_suffix(".new")
        whole.write_text(json.dumps(state))
        whole.replace(self._state)


class Slices(MutableMapping[str, int]):
    """Time slice by UUID, as the state file has it."""

    def __init__(self, smi: FakeSmi) -> None:
        self._smi = smi

    def _all(self) -> dict[str, int]:
        slices = self._smi.read()["slices"]
        assert isinstance(slices, dict)
        return slices

    def __getitem__(self, uuid: str) -> int:
        return self._all()[uuid]

    def __setitem__(self, uuid: str, value: int) -> None:
        self._smi._write({**self._smi.read(), "slices": {**self._all(), uuid: value}})

    def __delitem__(self, uuid: str) -> None:
        """The card is gone."""
        left = {u: v for u, v in self._all().items() if u != uuid}
        self._smi._write({**self._smi.read(), "slices": left})

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
