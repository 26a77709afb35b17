"""What goes into the virtual machine: the wheel and its dependencies, the fake driver, the checks."""

import compileall
import hashlib
import io
import py_compile
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.e2e.vm import Impossible
from tests.fakes.nvml import build

ROOT = Path(__file__).parents[2]
PYTHON = "3.11"
"""Of Debian 12, which the image is."""
AGENT = "/opt/gpuagent"
"""A virtual environment with the wheel in it."""
CHECKS = "/opt/e2e"
"""What runs the checks, and what it installs: tests/ and systemd/ of this tree."""
FAKE_CACHE = "/tmp/gpuagent-fake-nvml-0"
"""Where `tests.fakes.nvml` looks for a library that is built: there is no compiler in there."""
REMOVED = (AGENT, CHECKS, FAKE_CACHE)
_LIBRARY = "/usr/lib/x86_64-linux-gnu"
_SITE = f"{AGENT}/lib/python{PYTHON}/site-packages"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
_TESTS = ("__init__.py", "e2e", "fakes", "stage")

_COMMAND = f"""#!{AGENT}/bin/python -P
import sys

from gpuagent.__main__ import main

sys.exit(main())
"""


def make(folder: Path) -> Path:
    """The payload as a tar file in `folder`. Raises Impossible where something cannot be had."""
    site = _dependencies(folder)
    wheel = _wheel(folder)
    library = build.library(into=folder / "nvml")
    payload = folder / "payload.tar"
    with tarfile.open(payload, "w") as tar:
        _add_environment(tar, site, wheel)
        for name in _TESTS:
            tar.add(ROOT / "tests" / name, f"{CHECKS}/tests/{name}", filter=_source)
        tar.add(ROOT / "systemd", f"{CHECKS}/systemd", filter=_source)
        tar.add(library.parent, f"{FAKE_CACHE}/{library.parent.name}")
        tar.add(library, f"{_LIBRARY}/{build.NAME}")
    return payload


def _source(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith("__pycache__") else entry


def _add_environment(tar: tarfile.TarFile, site: Path, wheel: Path) -> None:
    """A virtual environment is but a few files: see PEP 405."""
    tar.add(site, _SITE)
    tar.add(wheel, _SITE)
    _text(tar, f"{AGENT}/pyvenv.cfg", f"home = /usr/bin\nversion = {PYTHON}\n")
    _text(tar, f"{AGENT}/bin/gpuagent", _COMMAND, mode=0o755)
    _link(tar, f"{AGENT}/bin/python", f"/usr/bin/python{PYTHON}")
    _link(tar, "/usr/bin/gpuagent", f"{AGENT}/bin/gpuagent")


def _text(tar: tarfile.TarFile, name: str, text: str, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text), mode
    tar.addfile(entry, io.BytesIO(text.encode()))


def _link(tar: tarfile.TarFile, name: str, to: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, to
    tar.addfile(entry)


def _dependencies(folder: Path) -> Path:
    """What the agent needs, as pinned, for the image's Python; fetched once for each lock file."""
    lock = ROOT / "packaging" / "lock" / "run.txt"
    site = folder / f"site-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    if site.is_dir():
        return site
    for old in folder.glob("site-*"):
        shutil.rmtree(old)
    scratch = folder / "site.part"
    shutil.rmtree(scratch, ignore_errors=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    exact = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-compile"]
    python = ["--implementation", "cp", "--python-version", PYTHON, *platforms]
    _run([*pip, *exact, *python, "--target", str(scratch), "-r", str(lock)])
    _compile(scratch)
    scratch.rename(site)
    return site


def _wheel(folder: Path) -> Path:
    """The tree's wheel, unpacked."""
    made, unpacked = folder / "wheel", folder / "unpacked"
    for old in (made, unpacked):
        shutil.rmtree(old, ignore_errors=True)
    build_wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    _run([*build_wheel, "--outdir", str(made), str(ROOT)])
    [file] = made.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(unpacked)
    _compile(unpacked)
    return unpacked


def _compile(folder: Path) -> None:
    """Compiled here, where it is quick, if this interpreter's bytecode is the image's too."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON:
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH  # whatever time the files have
        compileall.compile_dir(
            folder, quiet=2, stripdir=folder, prependdir=_SITE, invalidation_mode=unchecked
        )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().split("\n")[-1]
        raise Impossible(f"{' '.join(command[2:4])} failed: {said}")
