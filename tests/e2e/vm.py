"""The virtual machine: one qemu process, reached by ssh on 127.0.0.1 and by nothing else."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

BOOT_SECONDS = 240.0
"""A machine that has not booted by then will not finish the checks in time either."""
JOB = "e2e-checks.service"
"""What `start` has begun: it goes on when ssh ends, until the next `unpack`."""
PAYLOAD_BYTES = 512 << 20
_MEMORY_MIB = 1536
_CPUS = 2
_KERNEL = (
    "console=ttyS0 quiet mitigations=off nokaslr panic=-1 random.trust_cpu=on audit=0 "
    "cryptomgr.notests no_timer_check tsc=reliable rcupdate.rcu_expedited=1 net.ifnames=0 "
    "systemd.show_status=false systemd.unified_cgroup_hierarchy=1 psi=1"
)
_PAYLOAD = "/dev/disk/by-id/virtio-payload"


class Impossible(Exception):
    """This machine cannot have the virtual machine; the text says why in one line."""


def _kvm() -> bool:
    """Whether KVM runs a stock kernel here, which a nested one without VMX or SVM does not."""
    modules = ("kvm_intel", "kvm_amd")
    return os.access("/dev/kvm", os.W_OK) and any(Path("/sys/module", m).exists() for m in modules)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Vm:
    """Its files are in a folder, so that one that was kept is found again."""

    def __init__(self, image: Path, folder: Path) -> None:
        self._image = image
        self._folder = folder

    # ---- life ----

    @property
    def pid(self) -> int | None:
        """Of a machine that runs from this image; None where there is none."""
        try:
            pid = int((self._folder / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if str(self._image).encode() in command else None

    def up(self, payload: Path, *, keep: bool) -> None:
        """Boot, unless it runs; ssh works when this returns. Raises Impossible.

        One that is not kept dies with this process, whatever ends it.
        """
        if self.pid is None:
            self.down()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._start(keep=keep)
        self._lay(payload)
        self._wait()

    def _start(self, *, keep: bool) -> None:
        qemu = shutil.which("qemu-system-x86_64")
        if qemu is None:
            raise Impossible("there is no qemu-system-x86_64 here")
        port = _free_port()
        (self._folder / "port").write_text(str(port))
        with (self._folder / "payload").open("wb") as file:
            file.truncate(PAYLOAD_BYTES)
        tied = [] if keep else ["setpriv", "--pdeathsig", "KILL"]
        with (self._folder / "qemu.log").open("wb") as log:
            process = subprocess.Popen(
                [*tied, qemu, *self._arguments(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self._folder / "pid").write_text(str(process.pid))

    def _arguments(self, port: int) -> list[str]:
        fast = _kvm()
        accelerator = "kvm" if fast else "tcg,thread=multi,tb-size=512"
        root, payload = self._image / "root.img", self._folder / "payload"
        # cache=unsafe: nothing of this disk is wanted once the machine has ended.
        return [
            *("-accel", accelerator, "-cpu", "host" if fast else "Nehalem"),
            *("-M", "pc-q35-7.2,smm=off,usb=off,vmport=off,hpet=off"),
            *("-m", str(_MEMORY_MIB), "-smp", str(_CPUS)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(self._image / "vmlinuz"), "-initrd", str(self._image / "initrd")),
            *("-append", _KERNEL),
            *("-drive", f"file={root},format=raw,if=none,id=root,snapshot=on,cache=unsafe"),
            *("-device", "virtio-blk-pci,drive=root"),
            *("-drive", f"file={payload},format=raw,if=none,id=payload,readonly=on"),
            *("-device", "virtio-blk-pci,drive=payload,serial=payload"),
            "-nic",
            f"user,model=virtio-net-pci,restrict=on,hostfwd=tcp:127.0.0.1:{port}-10.0.2.15:22",
            *("-serial", f"file:{self._folder / 'console'}", "-monitor", "none"),
        ]

    def _lay(self, payload: Path) -> None:
        """Into the disk as it is, so that a machine that runs sees it."""
        with payload.open("rb") as source, (self._folder / "payload").open("r+b") as disk:
            if source.seek(0, os.SEEK_END) > PAYLOAD_BYTES:
                raise Impossible(f"{payload} is larger than {PAYLOAD_BYTES >> 20} MiB")
            source.seek(0)
            shutil.copyfileobj(source, disk, 1 << 20)

    def _wait(self) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while not self._answers():
            if self.pid is None:
                raise Impossible(f"qemu has ended: {self._words('qemu.log')}")
            if time.monotonic() > deadline:
                words = self._words("console")
                raise Impossible(f"no ssh within {BOOT_SECONDS:.0f} s of booting: {words}")
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            return self.run(["true"], timeout=30).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def _words(self, file: str) -> str:
        with contextlib.suppress(OSError):
            lines = (self._folder / file).read_text(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "nothing said")
        return "nothing said"

    def down(self) -> None:
        """End it, if it runs; nothing of it is kept."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        (self._folder / "pid").unlink(missing_ok=True)

    # ---- inside ----

    @property
    def ssh(self) -> list[str]:
        """The command line that gets a shell in it."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        more = ("BatchMode=yes", "ConnectTimeout=25", "Ciphers=aes128-ctr")
        flags = [word for option in (*options, *more) for word in ("-o", option)]
        port = (self._folder / "port").read_text()
        return ["ssh", "-i", str(self._image / "id"), "-p", port, *flags, "root@127.0.0.1"]

    def run(self, command: Sequence[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
        """To its end. Raises TimeoutExpired."""
        return subprocess.run(
            [*self.ssh, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def unpack(self, removed: Sequence[str]) -> None:
        """Put the payload where it belongs, in place of what is there of an earlier one."""
        script = (
            f"systemctl stop {JOB} 2>/dev/null; "
            f"date -s @{time.time():.0f} >/dev/null; blockdev --flushbufs {_PAYLOAD}; "
            f"rm -rf {' '.join(removed)}; tar -xf {_PAYLOAD} -C / --no-same-owner && ldconfig"
        )
        done = self.run([script], timeout=BOOT_SECONDS)
        if done.returncode != 0:
            raise Impossible(f"the payload cannot be unpacked: {done.stderr.strip()}")

    def start(self, folder: str, command: Sequence[str]) -> subprocess.Popen[str]:
        """Begin a command as a service; what it prints can be read as it comes."""
        options = [
            "--quiet",
            "--pipe",
            "--wait",
            "--collect",
            f"--unit={JOB}",
            "-p",
            "KillMode=mixed",
        ]
        return subprocess.Popen(
            [*self.ssh, "systemd-run", *options, f"--working-directory={folder}", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
