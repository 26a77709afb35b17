"""systemd in the virtual machine: its units by their files, their properties and their cgroups."""

import shutil
import subprocess
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
UNITS = Path("/run/systemd/system")
PROPERTY_DROP_INS = (Path("/run/systemd/system.control"), Path("/etc/systemd/system.control"))
"""Where systemd keeps what is set through SetUnitProperties: at runtime, and for good."""


def call(*command: str) -> str:
    """What it prints. AssertionError with its words where it fails."""
    done = run(*command)
    assert done.returncode == 0, (
        f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}"
    )
    return done.stdout.strip()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def begin(*command: str) -> None:
    """Start it and leave it to itself."""
    subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def show(unit: str, *names: str) -> dict[str, str]:
    """Properties of a unit."""
    lines = call("systemctl", "show", unit, "-p", ",".join(names)).splitlines()
    return dict(line.split("=", 1) for line in lines)


def lay(name: str, text: str) -> bool:
    """Write a unit file, or a drop-in, of the tests' own; whether that changes anything."""
    file = UNITS / name
    if file.exists() and file.read_text() == text:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return True


def read_again() -> None:
    """daemon-reload: seconds under emulation, so only where something has changed."""
    call("systemctl", "daemon-reload")


def forget_properties(unit: str) -> None:
    """Remove what SetUnitProperties has left for a unit that does not run."""
    if properties_set(unit):
        for place in PROPERTY_DROP_INS:
            shutil.rmtree(place / f"{unit}.d", ignore_errors=True)
        read_again()


def properties_set(unit: str) -> dict[str, str]:
    """The drop-ins that SetUnitProperties has left for a unit: path and content."""
    found = [f for place in PROPERTY_DROP_INS for f in (place / f"{unit}.d").glob("*")]
    return {str(file): file.read_text() for file in found}
