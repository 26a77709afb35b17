r"""What a cgroup path says about who runs there: one table of the forms that exist.

The first form that fits the whole path wins, and within a path the outermost place: what a service
or a container makes below its own cgroup is its own affair, so a tenant cannot pass for another by
the names it gives to its inner cgroups. For the same reason pods and Slurm jobs are known only where
kubelet and Slurm put them.

Forms: systemd (systemd.special(7), and https://systemd.io/CGROUP_DELEGATION), runc's systemd driver
(`<runtime>-<id>.scope`), kubelet's systemd and cgroupfs drivers, Slurm's cgroup/v2 and /v1 plugins,
LXC's `lxc.payload.NAME`; FACTS 5 has one example of each.
"""

import re
from functools import lru_cache

from gpuagent.model.inventory import Place

_RUNTIME = {
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "crio",
    "docker": "docker",
    "libpod": "podman",
    "lxc": "lxc",
}
_PREFIX = r"(?P<runtime>cri-containerd|nerdctl|crio|docker|libpod)"
_ID = r"(?P<container>[0-9a-f]{12,64})"
_SLICES = r"(?:/[^/]+\.slice)*"
_BELOW = r"(?:/.*)?"
_USER = r"/user\.slice/user-(?P<uid>\d{1,10})\.slice"
_POD_SLICE = r"(?:[^/:]+-)?kubepods(?:-(?P<pod_qos>burstable|besteffort))?-pod(?P<pod>[0-9a-f_]{32,36})\.slice"
_POD_FOLDER = (
    r"(?:/kubelet)?/kubepods(?:/(?P<pod_qos>burstable|besteffort))?/pod(?P<pod>[0-9a-f-]{32,36})"
)
# Services that make cgroups for others below their own.
_RUNTIME_SERVICE = (
    r"(?:/system\.slice/(?:containerd|docker|crio|podman|kubelet|k3s|rke2-[a-z]+)\.service)"
)

_FORMS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(form, re.DOTALL | re.ASCII)
    for form in (
        # Slurm, cgroup/v2; several slurmd on one host put a node name in between or in front.
        r"(?P<home>/system\.slice/(?P<unit>(?:[^/]+_)?slurmstepd\.scope)(?:/(?!job_)[^/]+)?"
        r"/job_(?P<slurm_job>\d+))(?:/step_(?P<slurm_step>[^/]+))?" + _BELOW,
        # Slurm, cgroup/v1.
        r"(?P<home>/slurm(?:_[^/]+)?/uid_(?P<uid>\d{1,10})/job_(?P<slurm_job>\d+))"
        r"(?:/step_(?P<slurm_step>[^/]+))?" + _BELOW,
        # A container of a pod: systemd driver, cgroupfs driver, and containerd told apart wrongly,
        # which joins slice, prefix and id with colons. The pod level itself is no home.
        rf"(?P<home>{_SLICES}/{_POD_SLICE}/(?:{_PREFIX}-)?{_ID}(?:\.scope)?)" + _BELOW,
        rf"(?P<home>{_RUNTIME_SERVICE}?{_POD_FOLDER}/(?:{_PREFIX}-)?{_ID})" + _BELOW,
        rf"(?P<home>{_RUNTIME_SERVICE}?/{_POD_SLICE}:{_PREFIX}:{_ID})" + _BELOW,
        rf"{_SLICES}/{_POD_SLICE}{_BELOW}",
        rf"{_RUNTIME_SERVICE}?{_POD_FOLDER}{_BELOW}",
        r"(?:/kubelet)?/kubepods(?:/(?:burstable|besteffort))?",
        # A container without a pod: of the host, of a user, cgroupfs driver, LXC.
        rf"(?P<home>(?:{_USER})(?:/user@\d+\.service)?{_SLICES}/{_PREFIX}-{_ID}\.scope)" + _BELOW,
        rf"(?P<home>{_SLICES}/{_PREFIX}-{_ID}\.scope)" + _BELOW,
        rf"(?P<home>{_RUNTIME_SERVICE}?/(?P<runtime>docker)/{_ID})" + _BELOW,
        rf"(?P<home>/libpod_parent/(?P<runtime>libpod)-{_ID})" + _BELOW,
        r"(?P<home>/(?P<runtime>lxc)(?:\.payload[./]|/)(?P<container>[^/]+))" + _BELOW,
        r"/(?:docker|libpod_parent|lxc|lxc\.payload)",
        # A login, a service or scope of a user's own manager, and those of the system's.
        rf"(?P<home>{_USER}/(?P<unit>session-[^/]+\.scope))" + _BELOW,
        rf"(?P<home>{_USER}/user@\d+\.service{_SLICES}/(?P<unit>[^/]+\.(?:service|scope)))"
        + _BELOW,
        rf"{_USER}/user@\d+\.service{_SLICES}",
        rf"(?P<home>{_USER}{_SLICES}/(?P<unit>[^/]+\.(?:service|scope)))" + _BELOW,
        rf"(?P<home>{_SLICES}/(?P<unit>[^/]+\.(?:service|scope)))" + _BELOW,
        # A container in a folder that was given to its runtime as `--cgroup-parent`.
        rf"(?P<home>(?:/[^/]+)*?/(?:{_PREFIX}-)?(?P<container>[0-9a-f]{{64}}))" + _BELOW,
        # Slices and the root belong to nobody. Any other folder was made by hand for somebody.
        rf"{_SLICES}/?",
        r"(?P<home>(?:/[^/]+)*/(?![^/]*\.slice\Z)[^/]+)",
    )
)

_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_MADE_BY_USER = re.compile(rf"{_USER}/(?!session-)", re.ASCII)
_OWN_SYSTEMD = re.compile(rf"{_USER}/user@(?P=uid)\.service(?:/|\Z)", re.ASCII)
_MACHINES = "/machine.slice/"
"""systemd-nspawn and virtual machines: who is root in there is not root on the host."""


@lru_cache(maxsize=8192)
def place_of(path: str) -> Place:
    """The place that a cgroup v2 path names; an empty one for what fits no form. Any text will do.

    `home` is the cgroup of the service, scope, container or job as a whole: never a slice, a pod's
    or a QoS class's folder, or the root, and never a name that cannot be opened as it is written.
    """
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or "." in parts:
        return Place()
    found = next((m for form in _FORMS if (m := form.fullmatch(path))), None)
    if found is None:
        return Place()
    said = {key: text for key, text in found.groupdict().items() if text is not None}
    pod = said.get("pod", "").replace("_", "-")
    unit = said.get("unit", "")
    uid = said.get("uid")
    home = said.get("home", "")
    return Place(
        unit=unit,
        session=unit.startswith("session-") and home.startswith("/user.slice/"),
        container=said.get("container", ""),
        runtime=_RUNTIME.get(said.get("runtime", ""), ""),
        pod=pod,
        pod_qos=said.get("pod_qos", "guaranteed" if pod else ""),
        slurm_job=said.get("slurm_job", ""),
        slurm_step=said.get("slurm_step", ""),
        uid=int(uid) if uid is not None else None,
        home="" if "\ufffd" in home or "//" in home else home,
    )


def made_by_user(path: str) -> bool:
    """Whether the owner of a login could have chosen this cgroup's name himself.

    A user's own systemd makes units and containers of any name below his slice.
    """
    return _MADE_BY_USER.match(path) is not None


def delegated_to(path: str) -> int | None:
    """The user whose own systemd rules over this cgroup; None where the system's does.

    Nobody but this user and root can put a process there.
    """
    found = _OWN_SYSTEMD.match(path)
    return int(found["uid"]) if found is not None else None


def contained(path: str) -> bool:
    """Whether this is in a container, pod, machine or Slurm job, where root is not the host's."""
    place = place_of(path)
    return bool(place.container or place.pod or place.slurm_job) or place.home.startswith(_MACHINES)


@lru_cache(maxsize=8192)
def walled(path: str) -> bool:
    """Whether those who live here decide by themselves what their processes look like.

    In a container, pod or machine they choose the path of an executable and become any user; in a
    Slurm job and below a user's own systemd it is one user who chooses what runs.
    """
    return contained(path) or made_by_user(path)


def unescaped(unit: str) -> str:
    r"""A unit's name as people wrote it: `\x2d` is a dash (systemd.unit(5)). For display only."""
    return _ESCAPE.sub(lambda code: _shown(int(code[1], 16)), unit)


def _shown(code: int) -> str:
    # Bytes above 0x7f are parts of UTF-8 sequences and stay as they are; so does what is invisible.
    character = chr(code)
    return character if code < 0x80 and character.isprintable() else f"\\x{code:02x}"
