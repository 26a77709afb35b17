"""A fake NVIDIA driver: a ``libnvidia-ml.so.1`` in C, and the state behind it in a mapped file.

Unmodified pynvml, nvitop and gpustat load the library in as many processes as a test likes, while
the test changes what they see::

    fake = FakeNvml.create(tmp_path, [H100_80GB, L40S])
    subprocess.run([sys.executable, "-m", "nvitop", "-1"], env=os.environ | fake.env)
    gpu = fake.gpus[0]
    gpu.load()                                   # the profile's loaded values
    gpu.set(utilization=0.9, demand_watts=650, memory_used_bytes=70 * GIB)
    gpu.power_limit_watts = 300                  # somebody ran nvidia-smi -pl 300
    gpu.add_process(pid, kind="compute", memory_bytes=2 * GIB)
    gpu.xid(79); gpu.lose(); gpu.recover()
    fake.hang("nvmlDeviceGetPowerUsage", gpu=0)
    fake.fail("nvmlDeviceGetUtilizationRates", 999)
    assert fake.calls("nvmlDeviceGetPowerUsage") < 10
    assert fake.holders == []                    # nobody has the library initialised

In a child process ``fake.env`` is all that is needed; ``client.Client`` is such a child that
evaluates pynvml expressions. To use the library in the test's own process, load
``ctypes.CDLL(str(fake.library))`` and set the environment before ``pynvml.nvmlInit()``; it then
stays the process's NVML.

Read on in ``driver.py`` (the whole), ``gpu.py`` (a card), ``profiles.py`` (which cards there are),
``fake.h`` and ``state.h`` (how the library works).
"""

from tests.fakes.nvml.driver import TOPOLOGY, FakeNvml
from tests.fakes.nvml.gpu import FakeGpu
from tests.fakes.nvml.profiles import (
    GIB,
    H100_80GB,
    H100_MIG,
    L40S,
    MIB,
    PROFILES,
    RTX_4080_SUPER,
    RTX_4090,
    Dynamics,
    MigInstance,
    Profile,
)

__all__ = [
    "GIB",
    "H100_80GB",
    "H100_MIG",
    "L40S",
    "MIB",
    "PROFILES",
    "RTX_4080_SUPER",
    "RTX_4090",
    "TOPOLOGY",
    "Dynamics",
    "FakeGpu",
    "FakeNvml",
    "MigInstance",
    "Profile",
]
