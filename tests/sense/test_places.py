"""Every form of cgroup path, inner cgroups, and names made to mislead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.model.inventory import Place
from gpuagent.sense.places import delegated_to, made_by_user, place_of, unescaped, walled

ID = "0123456789abcdef" * 4
POD = "8a1b2c3d-1111-2222-3333-444455556666"
POD_ = POD.replace("-", "_")
STATIC = "5d41402abc4b2a76b9719d911017c592"
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice"
BESTEFFORT = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{POD_}.slice"
KIND = f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{STATIC}.slice"
USER = "/user.slice/user-1000.slice"
MANAGER = f"{USER}/user@1000.service"

# (home, what the path says of it): the home itself and everything below it say the same.
HOMES: list[tuple[str, Place]] = [
    ("/system.slice/triton.service", Place(unit="triton.service")),
    (r"/system.slice/system-a\x2db.slice/a\x2db@1.service", Place(unit=r"a\x2db@1.service")),
    ("/batch.slice/batch-gpu.slice/train.service", Place(unit="train.service")),
    ("/init.scope", Place(unit="init.scope")),
    (r"/machine.slice/machine-qemu\x2d1.scope", Place(unit=r"machine-qemu\x2d1.scope")),
    (f"{USER}/session-3.scope", Place(unit="session-3.scope", session=True, uid=1000)),
    (f"{USER}/session-c12.scope", Place(unit="session-c12.scope", session=True, uid=1000)),
    (f"{MANAGER}/app.slice/X.service", Place(unit="X.service", uid=1000)),
    (f"{MANAGER}/app.slice/app-a.slice/run-u9.scope", Place(unit="run-u9.scope", uid=1000)),
    (f"{MANAGER}/init.scope", Place(unit="init.scope", uid=1000)),
    (f"/system.slice/docker-{ID}.scope", Place(container=ID, runtime="docker")),
    (f"/docker/{ID}", Place(container=ID, runtime="docker")),
    (f"/system.slice/nerdctl-{ID}.scope", Place(container=ID, runtime="containerd")),
    (
        f"{BURSTABLE}/cri-containerd-{ID}.scope",
        Place(container=ID, runtime="containerd", pod=POD, pod_qos="burstable"),
    ),
    (
        f"{BESTEFFORT}/crio-{ID}.scope",
        Place(container=ID, runtime="crio", pod=POD, pod_qos="besteffort"),
    ),
    (
        f"/kubepods.slice/kubepods-pod{POD_}.slice/docker-{ID}.scope",
        Place(container=ID, runtime="docker", pod=POD, pod_qos="guaranteed"),
    ),
    (
        f"{KIND}/cri-containerd-{ID}.scope",
        Place(container=ID, runtime="containerd", pod=STATIC, pod_qos="guaranteed"),
    ),
    (
        f"/kubepods/besteffort/pod{POD}/{ID}",
        Place(container=ID, pod=POD, pod_qos="besteffort"),
    ),
    (f"/kubepods/pod{POD}/{ID}", Place(container=ID, pod=POD, pod_qos="guaranteed")),
    (
        f"/kubepods/burstable/pod{POD}/crio-{ID}",
        Place(container=ID, runtime="crio", pod=POD, pod_qos="burstable"),
    ),
    (
        f"/system.slice/containerd.service/kubepods-burstable-pod{POD_}.slice:cri-containerd:{ID}",
        Place(container=ID, runtime="containerd", pod=POD, pod_qos="burstable"),
    ),
    (f"/machine.slice/libpod-{ID}.scope", Place(container=ID, runtime="podman")),
    (f"/libpod_parent/libpod-{ID}", Place(container=ID, runtime="podman")),
    (
        f"{MANAGER}/user.slice/libpod-{ID}.scope",
        Place(container=ID, runtime="podman", uid=1000),
    ),
    (f"/jobs/{ID}", Place(container=ID)),
    (f"/jobs/night/libpod-{ID}", Place(container=ID, runtime="podman")),
    ("/lxc.payload.web-1", Place(container="web-1", runtime="lxc")),
    ("/lxc/web-1", Place(container="web-1", runtime="lxc")),
    ("/slurm/uid_1000/job_123", Place(slurm_job="123", uid=1000)),
    ("/slurm_node1/uid_0/job_7", Place(slurm_job="7", uid=0)),
    (
        "/system.slice/slurmstepd.scope/job_123",
        Place(unit="slurmstepd.scope", slurm_job="123"),
    ),
    (
        "/system.slice/slurmstepd.scope/node1/job_123",
        Place(unit="slurmstepd.scope", slurm_job="123"),
    ),
    (
        "/system.slice/node1_slurmstepd.scope/job_123",
        Place(unit="node1_slurmstepd.scope", slurm_job="123"),
    ),
]


def at(place: Place, home: str) -> Place:
    return Place(
        **{f: getattr(place, f) for f in place.__struct_fields__ if f != "home"}, home=home
    )


@pytest.mark.parametrize(("home", "place"), HOMES)
def test_each_form_says_who_lives_there(home: str, place: Place) -> None:
    assert place_of(home) == at(place, home)


@pytest.mark.parametrize(("home", "place"), HOMES)
@pytest.mark.parametrize(
    "inner",
    [
        "/sub",
        "/system.slice/other.service",
        f"/docker/{ID[::-1]}",
        f"/kubepods.slice/kubepods-pod{STATIC[::-1]}.slice/crio-{ID[::-1]}.scope",
        "/with\nbreak",
        "/\x1b[31m",
    ],
)
def test_what_is_made_below_a_home_belongs_to_it(home: str, place: Place, inner: str) -> None:
    assert place_of(home + inner) == at(place, home)


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", "0"),
        ("/system.slice/slurmstepd.scope/node1/job_123/step_batch/user/task_0", "batch"),
        ("/slurm/uid_1000/job_123/step_extern/task_0", "extern"),
    ],
)
def test_steps_of_slurm_jobs(path: str, step: str) -> None:
    place = place_of(path)
    assert (place.slurm_job, place.slurm_step) == ("123", step)
    assert place.home.endswith("/job_123")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "relative/path",
        "/system.slice",
        "/user.slice",
        USER,
        MANAGER,
        f"{MANAGER}/app.slice",
        "/kubepods.slice",
        "/kubepods.slice/kubepods-burstable.slice",
        f"/kubepods.slice/kubepods-pod{POD_}.slice",
        "/kubepods",
        "/kubepods/besteffort",
        f"/kubepods/pod{POD}",
        "/docker",
        "/lxc.payload",
        "/..",
        "/../other/x.service",
        "/system.slice/../x.service",
        "/system.slice/caf\ufffd.service",
    ],
)
def test_what_is_shared_out_or_not_to_be_opened_is_no_home(path: str) -> None:
    assert place_of(path).home == ""


def test_a_pod_is_known_even_where_no_container_is() -> None:
    assert place_of(f"/kubepods/burstable/pod{POD}").pod == POD


def test_a_folder_made_by_hand_is_a_home() -> None:
    assert place_of("/tenants/train") == Place(home="/tenants/train")


def test_a_conmon_scope_is_no_container() -> None:
    assert place_of(f"/machine.slice/libpod-conmon-{ID}.scope").container == ""


@pytest.mark.parametrize(
    "forged",
    [
        f"{MANAGER}/kubepods.slice/kubepods-pod{POD_}.slice/crio-{ID}.scope",
        f"{MANAGER}/app.slice/kubepods-pod{POD_}.slice/x.service",
        f"{MANAGER}/app.slice/job_123",
        f"/system.slice/evil.service/kubepods/pod{POD}/{ID}",
        "/system.slice/evil.service/job_123/step_0",
    ],
)
def test_a_user_cannot_make_himself_a_pod_or_a_job(forged: str) -> None:
    place = place_of(forged)
    assert (place.pod, place.slurm_job) == ("", "")


def test_what_a_user_could_have_named() -> None:
    assert made_by_user(f"{MANAGER}/app.slice/triton.service")
    assert not made_by_user(f"{USER}/session-3.scope")
    assert not made_by_user("/system.slice/triton.service")


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"{MANAGER}/app.slice/triton.service", 1000),
        (MANAGER, 1000),
        (f"{USER}/session-3.scope", None),
        (f"{USER}/docker-{ID}.scope", None),
        (f"{USER}/user@1001.service/app.slice/x.service", None),
        (f"{USER}/user@1000.service.d/x.service", None),
        ("/system.slice/triton.service", None),
    ],
)
def test_who_rules_over_a_tree_of_his_own(path: str, uid: int | None) -> None:
    assert delegated_to(path) == uid


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        (f"/system.slice/docker-{ID}.scope", True),
        (f"/kubepods/pod{POD}", True),
        ("/system.slice/slurmstepd.scope/job_123", True),
        ("/machine.slice/machine-web.scope", True),
        ("/machine.slice/systemd-nspawn@web.service/payload/x.service", True),
        (f"{MANAGER}/app.slice/triton.service", True),
        (f"{USER}/session-3.scope", False),
        ("/system.slice/triton.service", False),
        ("/tenants/a", False),
        ("/", False),
        ("", False),
    ],
)
def test_where_processes_look_as_they_please(path: str, inside: bool) -> None:
    assert walled(path) is inside


def test_unit_names_are_unescaped_for_people() -> None:
    assert unescaped(r"machine-a\x2db.scope") == "machine-a-b.scope"
    assert unescaped(r"evil\x0a\x1b\xff.service") == r"evil\x0a\x1b\xff.service"


PARTS = st.sampled_from(
    [
        "/",
        "system.slice",
        "user.slice",
        "user-1000.slice",
        "user@1000.service",
        "x.service",
        "session-1.scope",
        "kubepods",
        "kubepods.slice",
        f"kubepods-pod{POD_}.slice",
        f"pod{POD}",
        f"docker-{ID}.scope",
        ID,
        "docker",
        "job_1",
        "slurmstepd.scope",
        "lxc.payload.a",
        "..",
        ".",
        "",
        "\n",
    ]
)


@given(st.one_of(st.text(), st.lists(st.one_of(PARTS, st.text(max_size=4))).map("/".join)))
def test_any_text_gives_a_place_whose_home_is_the_path_or_above(path: str) -> None:
    place = place_of(path)
    home = place.home
    if home:
        assert path == home or path.startswith(home + "/")
        assert not home.endswith((".slice", "/"))
        assert ".." not in home.split("/")
        inner = place_of(home)
        assert (inner.home, inner.container, inner.pod) == (home, place.container, place.pod)


@given(st.text(alphabet="a-._s/\\x2dlice", max_size=4000))
def test_long_paths_take_no_time(path: str) -> None:
    assert place_of("/" + path).home in {"", *_prefixes("/" + path)}


def _prefixes(path: str) -> set[str]:
    return {path[:i] for i, c in enumerate(path) if c == "/"} | {path}
