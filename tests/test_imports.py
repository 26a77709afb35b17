"""Imports go one way (DESIGN 1): each part sees only what it is built on."""

import ast
from pathlib import Path

import pytest

import gpuagent

ROOT = Path(gpuagent.__file__).parent
ANYTHING = None

BASE = {"gpuagent", "model", "errors"}
"""`gpuagent` itself holds the version only."""
VALUES = BASE | {"ports", "config", "quantities"}
SHELL = VALUES | {"clock", "log", "behind"}
ALLOWED: dict[str, set[str] | None] = {
    "model": {"model"},
    "errors": set(),
    "clock": BASE,
    "behind": set(),
    "log": BASE | {"behind"},
    "ports": BASE | {"clock"},
    "config": BASE,
    "quantities": BASE,
    "configfile": VALUES
    | {"configfile", "configdoubts", "configrules", "configschema", "tomllines", "tlspair"},
    "configdoubts": VALUES | {"configrules", "configschema", "tomllines"},
    "tlspair": BASE,
    "configrules": VALUES | {"configrules", "configschema", "tomllines"},
    "configschema": VALUES | {"configschema", "tomllines"},
    "tomllines": BASE,
    "reference": VALUES | {"configschema"},
    "host": SHELL,
    "sim": SHELL | {"tomllines"},
    "sense": SHELL,
    "act": SHELL,
    "decide": VALUES,
    # quantities: the one place that says what a loopback address is; tlspair: what a certificate is.
    "expose": BASE | {"ports", "quantities", "clock", "log", "tlspair"},
    "sensing": BASE | {"ports", "clock"},
    "inbox": BASE | {"ports"},
    "record": BASE | {"ports", "decide"},
    "loop": BASE | {"ports", "clock", "decide", "act", "sensing", "inbox"},
    "keptfile": BASE | {"clock"},
    "starts": BASE | {"keptfile"},
    "leases": BASE | {"clock", "keptfile"},
    "runbook": BASE | {"clock", "keptfile"},
    "runs": BASE | {"ports", "config", "clock", "decide", "runbook"},
    "trail": BASE | {"config", "keptfile"},
    "tokens": BASE | {"clock", "keptfile"},
    "errands": BASE
    | {"ports", "inbox", "keptfile", "starts", "leases", "tokens", "runbook", "runs"},
    "publish": BASE | {"log", "host"},
    "core": ANYTHING,
    "lab": ANYTHING,
    "daemon": ANYTHING,
    "process": ANYTHING,
    "rescue": ANYTHING,
    "salvage": set(),
    "cli": ANYTHING,
    "__main__": ANYTHING,
    "__init__": set(),
}
"""What a part of the package may import of ours, itself included where it is a package."""

IMPURE = {
    "asyncio",
    "time",
    "datetime",
    "random",
    "secrets",
    "os",
    "io",
    "logging",
    "structlog",
    "socket",
    "subprocess",
    "threading",
    "pathlib",
    "uuid",
}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, at any depth of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "gpuagent":
                found |= {f"gpuagent.{a.name}" for a in node.names if a.name[0].islower()}
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    inside = path.relative_to(ROOT)
    part = inside.parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{inside}: say in ALLOWED what {part} is built on"
    allowed = ALLOWED[part]
    if allowed is ANYTHING:
        return
    ours = {part_of(m) for m in imports(path) if m.split(".")[0] == "gpuagent"}
    may = allowed | ({part} if len(inside.parts) > 1 else set())
    assert ours <= may, f"{inside} imports {sorted(ours - may)}"


@pytest.mark.parametrize("path", sorted((ROOT / "decide").rglob("*.py")), ids=lambda p: p.name)
def test_decide_is_pure(path: Path) -> None:
    outside = {m.split(".")[0] for m in imports(path)}
    assert not outside & IMPURE


def test_the_drivers_module_is_imported_in_the_child_only() -> None:
    users = {p.name for p in FILES if any(m.startswith("pynvml") for m in imports(p))}
    assert users <= {"nvml_worker.py", "nvml_card.py", "nvml_driver.py", "nvml_fields.py"}


def test_only_the_probes_may_import_bcc() -> None:
    assert not [p for p in FILES if any(m.split(".")[0] == "bcc" for m in imports(p))]
