"""Becomes another user, in the cgroup of a tenant, and turns into a command: the child of `Ender.run_as`.

Started as `python runas.py ERRORS PROCS UID GID GROUPS COMMAND...`: descriptor for what goes wrong,
descriptor of cgroup.procs or -1, user, group, all groups by comma. A process of its own, since none of
this can be done safely between fork and exec of one that has threads. Standard library only.
"""

import contextlib
import ctypes
import os
import signal
import sys

_CLONE_NEWNS = 0x00020000  # include/uapi/linux/sched.h


def main(argv: list[str]) -> None:
    """Does not return: a word of `errors` and a text into ERRORS where the command cannot be run."""
    errors, procs, uid, gid = (int(word) for word in argv[1:5])
    groups = [int(word) for word in argv[5].split(",")]
    command = argv[6:]
    os.set_inheritable(errors, False)
    try:
        _move(procs)
        see_the_host()
        if os.geteuid() == 0:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        if os.getresuid() != (uid, uid, uid):
            raise PermissionError(f"the agent may not run anything as user {uid}")
        os.chdir("/")
        os.umask(0o022)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        os.execve(command[0], command, dict(os.environ))  # noqa: S606  (no shell is meant)
    except OSError as error:
        os.write(
            errors, f"{command[0]}: {error.strerror or error}".encode("utf-8", "replace")[:500]
        )
    sys.exit(125)


def _move(procs: int) -> None:
    """Into the tenant's cgroup, where it takes us."""
    if procs >= 0:
        with contextlib.suppress(OSError):
            os.write(procs, b"0\n")
        os.close(procs)


def see_the_host(mounts: str = "/proc/1/ns/mnt") -> None:
    """The mounts that everybody sees, instead of the few that a service manager leaves to the agent."""
    with contextlib.suppress(OSError):
        fd = os.open(mounts, os.O_RDONLY | os.O_CLOEXEC)
        if not os.path.samestat(os.fstat(fd), os.stat("/proc/self/ns/mnt")):
            ctypes.CDLL(None).setns(fd, _CLONE_NEWNS)
        os.close(fd)


if __name__ == "__main__":
    main(sys.argv)
