"""Builds the fake ``libnvidia-ml.so.1``, once per state of its sources."""

import contextlib
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

Variant = Literal["590", "550"]
"""The driver whose symbols the library has."""

NAME = "libnvidia-ml.so.1"
SYMBOLS = "symbols.txt"
_HERE = Path(__file__).parent
_FLAGS = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]
_FLAGS += ["-shared", "-pthread", f"-Wl,-soname,{NAME}"]


def library(variant: Variant = "590", *, into: Path | None = None) -> Path:
    """The built library, at ``into/VARIANT-HASH/libnvidia-ml.so.1``.

    ``into`` is by default a folder of this user's in the system's temporary folder, so that all
    test runs share one build. Raises CalledProcessError with the compiler's words on its stderr.
    """
    folder = (into or _default_cache()) / f"{variant}-{_fingerprint()}"
    if not (folder / NAME).exists():
        _build(variant, folder)
    return folder / NAME


def symbols(built: Path) -> list[str]:
    """The names of the functions that a built library exports, sorted."""
    return (built.parent / SYMBOLS).read_text().split()


def _default_cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"gpuagent-fake-nvml-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def _fingerprint() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(_HERE.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(variant: Variant, folder: Path) -> None:
    """Build beside the destination and rename: whoever comes second loses without harm."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        sources = [str(source) for source in sorted(_HERE.glob("*.c"))]
        command = [
            "gcc",
            *_FLAGS,
            f"-DFAKE_NVML_DRIVER={variant}",
            "-o",
            str(made / NAME),
            *sources,
        ]
        subprocess.run(command, check=True)
        (made / SYMBOLS).write_text("\n".join(_exported(made / NAME)) + "\n")
        with contextlib.suppress(OSError):  # not empty: another process was faster
            made.rename(folder)


def _exported(built: Path) -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(built)], check=True, capture_output=True, text=True
    ).stdout
    names = (line.split()[-1] for line in listing.splitlines())
    return sorted(name for name in names if name.startswith("nvml"))
