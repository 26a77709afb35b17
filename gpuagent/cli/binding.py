"""Keeps this process, and what it becomes, on some NUMA nodes: its threads there, its memory there first."""

import ctypes
import os
import platform
from collections.abc import Sequence

_NODES = "/sys/devices/system/node"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""System call numbers (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)."""
_PREFERRED_MANY = 5
_PREFERRED = 1
"""MPOL_* of include/uapi/linux/mempolicy.h. Both prefer: where a node is full, memory is had elsewhere."""
_NODES_MOST = 1024


def bind(nodes: Sequence[int], *, folder: str = _NODES) -> list[str]:
    """Bind to these nodes what can be; a sentence for each thing that could not."""
    if not all(0 <= node < _NODES_MOST for node in nodes):
        return ["which NUMA nodes its cards are on is not credible: it runs on any"]
    trouble = []
    try:
        cpus = {cpu for node in nodes for cpu in _cpus(f"{folder}/node{node}/cpulist")}
        # What was forbidden before stays so: an administrator may have pinned the whole session.
        allowed = os.sched_getaffinity(0) & cpus
        if allowed:
            os.sched_setaffinity(0, allowed)
        else:
            trouble.append("none of the CPUs near its cards may be used: it runs on others")
    except (OSError, ValueError) as error:
        trouble.append(f"it is not bound to the CPUs near its cards: {error}")
    if not _prefer(nodes):
        trouble.append("its memory is not bound to the NUMA node of its cards")
    return trouble


def _cpus(path: str) -> set[int]:
    """The CPUs of a list such as "0-3,8". Raises OSError, ValueError."""
    with open(path, encoding="ascii") as file:
        text = file.read(65536).strip()
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        found |= set(range(int(first), int(last if dash else first) + 1))
    return found


def _prefer(nodes: Sequence[int]) -> bool:
    """Have memory come from these nodes while they have any (set_mempolicy(2)); whether it will."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_NODES_MOST // bits))()
    for node in nodes:
        mask[node // bits] |= 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    for mode in (_PREFERRED_MANY, _PREFERRED):  # the first is of Linux 5.15
        if libc.syscall(number, mode, mask, _NODES_MOST + 1) == 0:
            return True
    return False
