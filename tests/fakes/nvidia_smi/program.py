"""The program itself: standard library only, its state in smi.json beside it."""

import json
import sys
import time
from pathlib import Path
from typing import Any

STATE = Path(sys.argv[0]).resolve().with_name("smi.json")
NAMES = ("Default", "Short", "Medium", "Long")
HELP = """
    Compute Policy -- Control and list compute policies.

    Usage: nvidia-smi compute-policy [options]
"""


def write(state: dict[str, Any]) -> None:
    whole = STATE.with_suffix(f".{time.monotonic_ns()}")
    whole.write_text(json.dumps(state))
    whole.replace(STATE)


def answer(words: list[str], state: dict[str, Any]) -> tuple[int, str]:
    slices, mode = state["slices"], state["mode"]
    if words[:1] != ["compute-policy"] or mode == "old":
        return 2, "Unrecognized command-line parameter. Please run 'nvidia-smi -h' for help."
    if words[1:2] != ["-i"] or len(words) < 4:
        return 0, HELP
    uuid, action = words[2], words[3]
    if uuid not in slices:
        return 6, "No devices were found"
    if action == "--list":
        if mode == "babbles":
            return 0, "Default Short Medium Long"
        line = f"GPU {list(slices).index(uuid)}: {uuid}: Timeslice: {NAMES[slices[uuid]]}"
        return 0, f"GPU compute policies (default unless set):\n{line}"
    if mode == "denies":
        return 0, "Failed to set timeslice config: Insufficient Permissions"
    if mode != "lies":
        slices[uuid] = int(words[4])
        write(state)
    return (3 if mode == "fails" else 0), "Timeslice config set."


def main() -> None:
    state = json.loads(STATE.read_text())
    state["calls"].append(sys.argv[1:])
    write(state)
    while state["mode"] == "hangs":
        time.sleep(60)
    code, text = answer(sys.argv[1:], state)
    print(text)
    sys.exit(code)


main()
