"""A host to try the whole agent on: a fake driver, real processes in real cgroups, a real daemon.

The development machine has no cgroup v2 CPU controller. So tenants are real processes in real
cgroups, which is where the agent finds them, and the control files that it reads and writes lie in
a tree of plain files with the same paths (`paths.cgroup_root`).
"""

from tests.stage.cgroups import CgroupMirror, cgroup2_mount
from tests.stage.client import ApiError, Client
from tests.stage.stage import Daemon, Stage, Staged, until

__all__ = [
    "ApiError",
    "CgroupMirror",
    "Client",
    "Daemon",
    "Stage",
    "Staged",
    "cgroup2_mount",
    "until",
]
