"""What `check` finds, on hosts made of files."""

from pathlib import Path

from gpuagent.host import offers
from gpuagent.host.nvml_probe import NvmlOffer
from gpuagent.model.inventory import Gpu


def put(root: Path, path: str, text: str = "") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_nvml() -> None:
    assert offers.nvml(NvmlOffer(problem="no driver")).state == "missing"
    good = offers.nvml(NvmlOffer(driver="550", cards=(Gpu("a", 0, "H100"),)))
    assert (good.state, good.what) == ("ok", "driver 550, 1 cards")
    lost = offers.nvml(NvmlOffer(driver="550", cards=(Gpu("a", 3, "H100", blind="it is lost"),)))
    assert lost.state == "partial"
    assert "card 3 does not answer: it is lost" in lost.what
    old = offers.nvml(NvmlOffer(driver="550", missing=("nvmlDeviceGetTemperatureV",)))
    assert old.state == "ok"
    assert "nvmlDeviceGetTemperatureV" in old.what


def test_cgroups(tmp_path: Path) -> None:
    assert offers.cgroups(str(tmp_path)).state == "missing"
    put(tmp_path, "cgroup.controllers", "cpuset memory pids\n")
    half = offers.cgroups(str(tmp_path))
    assert half.state == "partial"
    assert "cpu and io" in half.what
    put(tmp_path, "cgroup.controllers", "cpuset cpu io memory pids\n")
    assert offers.cgroups(str(tmp_path)).state == "ok"


def test_a_slice_that_does_not_pass_the_cpu_controller_on(tmp_path: Path) -> None:
    put(tmp_path, "cgroup.controllers", "cpuset cpu io memory pids\n")
    passed_on = put(tmp_path, "system.slice/cgroup.subtree_control", "memory pids\n")
    found = offers.cgroups(str(tmp_path))
    assert found.state == "partial"
    assert "system.slice does not pass the cpu controller on" in found.what
    assert "systemctl set-property UNIT CPUWeight=100" in found.remedy
    passed_on.write_text("cpu memory pids\n")
    assert offers.cgroups(str(tmp_path)).state == "ok"


def test_pressure_and_systemd(tmp_path: Path) -> None:
    assert offers.pressure(str(tmp_path)).state == "missing"
    assert offers.systemd(str(tmp_path)).state == "missing"
    put(tmp_path, "proc/pressure/cpu", "some avg10=0.00\n")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert offers.pressure(str(tmp_path)).state == "ok"
    assert offers.systemd(str(tmp_path)).state == "ok"


def test_kernel_log(tmp_path: Path) -> None:
    missing = offers.kernel_log(str(tmp_path / "kmsg"))
    assert missing.state == "missing"
    assert "No such file" in missing.what
    assert offers.kernel_log(str(put(tmp_path, "kmsg"))).state == "ok"


def test_netlink_asks_the_kernel() -> None:
    offer = offers.netlink()
    assert offer.state in {"ok", "partial"}
    assert (offer.state == "ok") == (not offer.remedy)
