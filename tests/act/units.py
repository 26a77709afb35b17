"""A systemd in memory: properties of units, drop-ins, and the control files it writes from them."""

from collections.abc import Sequence

import msgspec

from gpuagent.errors import AgentError, Gone, Unsupported
from tests.act.host import Tree

DEFAULTS = {
    "cpu.max": "max 100000",
    "cpu.weight": "100",
    "io.weight": "default 100",
    "memory.high": "max",
    "memory.max": "max",
}


class Before(msgspec.Struct):
    memory: str | None
    dropin: str | None


class FakeUnits:
    """Implements `ports.Units` for the units it has; each is one cgroup of a `Tree`.

    As systemd does, it writes the control file from memory when a value is set, at a reload, and
    into the new cgroup at a restart; a reload takes the values from the drop-ins.
    """

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = tree
        self.units: dict[str, str] = {}
        """Cgroup by unit, of those that are loaded."""
        self.memory: dict[tuple[str, str], str] = {}
        """Text by unit and file, where it was ever set."""
        self.dropins: dict[tuple[str, str], str] = {}
        self.fails: AgentError | None = None
        self.calls: list[tuple[str, ...]] = []

    # -- what happens on the host ---------------------------------------------------------------------

    def start(self, unit: str, cgroup: str, **files: str) -> int:
        """Start it, or start it again; its cgroup's inode."""
        assert self.tree is not None
        self.stop(unit)
        inode = self.tree.make(cgroup, **files)
        self.units[unit] = cgroup
        for (name, file), text in self.memory.items():
            if name == unit:
                self._apply(unit, file, text)
        return inode

    def stop(self, unit: str) -> None:
        """Its cgroup goes; in memory it stays as it is."""
        cgroup = self.units.get(unit)
        if cgroup is None or self.tree is None:
            return
        folder = self.tree.root / cgroup[1:]
        if folder.exists():
            # Kept under another name, so that its inode is not given again at once.
            folder.rename(folder.with_name(f"gone-{len(list(folder.parent.iterdir()))}"))

    def set_property(self, unit: str, file: str, text: str) -> None:
        """As `systemctl set-property --runtime` does."""
        self.memory[unit, file] = self.dropins[unit, file] = text
        self._apply(unit, file, text)

    def reload(self) -> None:
        """As `systemctl daemon-reload` does."""
        for unit, file in list(self.memory):
            text = self.dropins.get((unit, file))
            if text is None:
                del self.memory[unit, file]
            else:
                self.memory[unit, file] = text
            self._apply(unit, file, text or DEFAULTS[file])

    # -- ports.Units ----------------------------------------------------------------------------------

    def manages(self, cgroup: str) -> str:
        return next((unit for unit, path in self.units.items() if path == cgroup), "")

    async def before(self, unit: str, cgroup: str, file: str) -> str:
        self._call("before", unit, file)
        if unit not in self.units:
            raise Gone(f"{unit} is not loaded")
        key = (unit, file)
        return msgspec.json.encode(Before(self.memory.get(key), self.dropins.get(key))).decode()

    async def write(self, unit: str, file: str, text: str) -> None:
        self._call("write", unit, file, text)
        self.set_property(unit, file, text)

    async def give_back(self, unit: str, file: str, before: str, ours: Sequence[str]) -> None:
        self._call("give back", unit, file)
        was = msgspec.json.decode(before, type=Before)
        key = (unit, file)
        if self.memory.get(key) in ours:
            self._put(self.memory, key, was.memory)
            self._apply(unit, file, was.memory or DEFAULTS[file])
        if self.dropins.get(key) in ours:
            self._put(self.dropins, key, was.dropin)

    def _put(
        self, kept: dict[tuple[str, str], str], key: tuple[str, str], text: str | None
    ) -> None:
        if text is None:
            kept.pop(key, None)
        else:
            kept[key] = text

    def _call(self, *call: str) -> None:
        self.calls.append(call)
        if self.fails is not None:
            raise self.fails

    def _apply(self, unit: str, file: str, text: str) -> None:
        if file not in DEFAULTS:
            raise Unsupported(f"no property for {file}")
        cgroup = self.units.get(unit)
        if cgroup is None or self.tree is None:
            return
        folder = self.tree.root / cgroup[1:]
        if folder.exists():
            (folder / file).write_text(text + "\n")
