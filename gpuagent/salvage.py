"""The paths that a configuration file names which cannot be read as a whole: for who must act anyway."""

import re

import tomli

_MOST_CHARACTERS = 1 << 20
_PATHS = ("state_dir", "socket", "cgroup_root", "nvml_library")
_PATH_LINE = re.compile(
    r"""^\s*(?:paths\s*\.\s*)?(state_dir|socket|cgroup_root|nvml_library)\s*=\s*["']([^"'\n]*)["']""",
    re.MULTILINE,
)
_OF_A_SOCKET = re.compile(r"^[^#\n]*\bsocket\b", re.MULTILINE)


def salvaged(config_path: str) -> dict[str, str]:
    """The paths by key that a file names which is not valid as a whole; none of one that is not there."""
    try:
        return _paths(_text(config_path))
    except OSError:
        return {}


def socket_in(config_path: str) -> str | None:
    """`paths.socket` of a file, valid or not; empty where it names none, None where it cannot be made out.

    Raises OSError where the file cannot be read.
    """
    text = _text(config_path)
    found = _paths(text).get("socket", "")
    return None if not found and _OF_A_SOCKET.search(text) else found


def _text(config_path: str) -> str:
    with open(config_path, encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_CHARACTERS)


def _paths(text: str) -> dict[str, str]:
    try:
        table = tomli.loads(text).get("paths", {})
    except (ValueError, RecursionError):  # no TOML, or a number that is too long
        table = dict(_PATH_LINE.findall(text))
    found = table if isinstance(table, dict) else {}
    return {k: v for k in _PATHS if isinstance(v := found.get(k), str) and v.startswith("/")}
