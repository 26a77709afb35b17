'''End-to-end checks on a real host: a throw-away virtual machine with systemd and unified cgroup v2.

    make e2e                              all checks: one line each, and an exit code
    make e2e E2E="pause rival"            only those with one of these words in their name
    make e2e E2E="--list"                 the checks there are, and what each holds
    make e2e E2E="--keep pause"           ... and leave the machine running: ssh's command line is printed,
                                          and the next `make e2e` uses it again, with the tree as it is then
    make e2e E2E="--down"                 end a machine that was kept

**One more check** is one function in `checks.py` (or `checks_….py`), whose name begins with `check_` and whose docstring is
what must be so::

    def check_pause_puts_back(host: Host) -> None:
        """`gpuagent pause` puts back although the cause goes on."""
        host.hold()                                   # heat, until train's cpu.max has fallen
        assert host.agent.command("pause").returncode == 0
        host.put_back()                               # as it was, and no drop-in left

It begins with a running agent that enforces, the tenants `serve` (L1) and `train` (L3) in services, a cool
card and nobody held; `batch` (a scope) and `plain` (a service in a slice without the CPU controller) are started where
they are wanted. What it has changed of agent, card and tenants is put right after it. To wait is
`host.until(what, condition, units=12)`: how fast it is in there is not known, so a unit is what one
start of a command takes, measured first; nothing in there is held against a clock. Only the whole is,
from outside (`--limit`). `raise Skip(why)` where something cannot be asked.

**What is where.** Out here `image.sh` builds a Debian 12 image (root and apt; about a minute, once, in
build/e2e), `payload.py` makes what goes into it (wheel, dependencies as pinned, fake NVML, these
checks), `vm.py` runs qemu, `__main__.py` puts it together. Inside, `runner.py` runs the checks on a
`host.py`: tenants are units (`tenants.py`), the agent is the shipped unit (`agent.py`), the card is the fake
of `tests.fakes.nvml`. The machine has no network but ssh on 127.0.0.1, and ends with this process.

Where qemu or the image cannot be had, or where it is too slow for the agent's own deadlines, one line
says so and the exit code is 0.
'''
