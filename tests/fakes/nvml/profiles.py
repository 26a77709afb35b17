"""Cards as they describe themselves, idle and loaded.

Values are those of the captures in ``shared/data/captures`` (nvidia-smi of real cards), named here
by file and section; what they do not tell is marked: *published* (vendor's data sheet), *derived*
(computed from the capture), *scaled* (from a sister card) or *assumed*.
"""

from dataclasses import dataclass, replace
from typing import TypedDict

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MEGAHERTZ = 1_000_000


class Dynamics(TypedDict, total=False):
    """What changes from moment to moment, in base units; the keywords of ``FakeGpu.set``."""

    utilization: float
    """Share of the last window in which a kernel ran, 0 to 1; so are the other utilisations."""
    memory_utilization: float
    encoder_utilization: float
    decoder_utilization: float
    encoder_sessions: int
    encoder_frames_per_second: int
    encoder_latency_seconds: float
    memory_used_bytes: int
    bar1_used_bytes: int
    mig_memory_used_bytes: tuple[int, ...]
    """One a MIG device, in their order."""
    demand_watts: float
    """What the work would draw without a limit."""
    temperature_celsius: int
    memory_temperature_celsius: int
    graphics_clock_hertz: int
    """Of the graphics and SM clocks, which every capture shows equal."""
    memory_clock_hertz: int
    video_clock_hertz: int
    performance_state: int
    fan_ratio: float
    pcie_tx_bytes_per_second: int
    pcie_rx_bytes_per_second: int
    pcie_replays: int
    pcie_generation: int
    pcie_width: int
    event_reasons: int
    """Clock event reasons beside those that follow from power, heat and load."""
    board_cap_watts: float
    """A limiter outside NVML's reach (BMC, power brake); 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    profile: str
    gpu_instance: int
    compute_instance: int
    memory_total_bytes: int
    bar1_total_bytes: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int = 0
    jpegs: int
    ofas: int = 0
    gpu_slices: int
    compute_slices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What does not change, and two moments of what does."""

    name: str
    brand: int
    """nvmlBrandType_t."""
    architecture: int
    """nvmlDeviceArchitecture_t."""
    compute_capability: tuple[int, int]
    cores: int
    memory_bus_bits: int
    vbios: str
    board_part: str = ""
    has_serial: bool = True
    virtualization: int = 0
    """nvmlGpuVirtualizationMode_t."""
    cpus: int
    """The CPUs of its affinity, from 0."""

    pci_bus: int
    pci_device: int
    pci_device_id: int
    pci_subsystem_id: int
    pci_subclass: int
    pcie_generation_max: int
    pcie_width_max: int = 16

    memory_total_bytes: int
    memory_reserved_bytes: int
    bar1_total_bytes: int

    power_min_watts: float
    power_default_watts: float
    power_max_watts: float
    power_management: bool = True
    software_power_cap_seconds: float = 0.0
    """On the counter of time spent at the limit, at the start."""

    graphics_clock_max_hertz: int
    memory_clock_max_hertz: int
    video_clock_max_hertz: int
    can_lock_clocks: bool = True

    thresholds_celsius: tuple[int, int, int, int]
    """Shutdown, slowdown, memory maximum, GPU maximum; 0 where the card tells none."""
    target_celsius: int = 0
    """The acoustic threshold, "GPU Target Temperature"; 0 where the card tells none."""
    tells_tlimit: bool = False
    has_memory_temperature: bool = False
    fans: int = 0

    ecc: bool = False
    remap_banks: int = 0
    """Banks with full remapping capacity; 0 where rows cannot be remapped."""
    persistence: bool = False
    accounting: bool = False
    accounting_buffer: int = 4000
    display_attached: bool = True
    display_active: bool = False

    nvlinks: int = 0
    nvlink_version: int = 0
    """nvmlNvLinkVersion."""
    nvlink_bytes_per_second: int = 0

    mig_capable: bool = False
    migs: tuple[MigInstance, ...] = ()

    idle: Dynamics
    loaded: Dynamics


# nvidia-h100-80gb-hbm3__590.48.01.txt: "idle :: query (-q)" and, for .loaded, "load :: query (-q)"
# (gpu-burn and two memory hogs); topology and links from the capabilities sections.
H100_80GB = Profile(
    name="NVIDIA H100 80GB HBM3",
    brand=14,  # "NVIDIA"
    architecture=9,  # Hopper
    compute_capability=(9, 0),  # query-gpu, compute_cap
    cores=16_896,  # published
    memory_bus_bits=5_120,  # published
    vbios="96.00.A5.00.01",
    board_part="692-2G520-0200-000",
    virtualization=1,  # Pass-Through
    cpus=20,  # "topo -m": 0-19
    pci_bus=0x00,
    pci_device=0x09,
    pci_device_id=0x233010DE,
    pci_subsystem_id=0x16C110DE,
    pci_subclass=2,
    pcie_generation_max=5,
    memory_total_bytes=81_559 * MIB,
    memory_reserved_bytes=479 * MIB,
    bar1_total_bytes=131_072 * MIB,
    power_min_watts=200,
    power_default_watts=700,
    power_max_watts=700,
    graphics_clock_max_hertz=1_980 * MEGAHERTZ,
    memory_clock_max_hertz=2_619 * MEGAHERTZ,
    video_clock_max_hertz=1_545 * MEGAHERTZ,
    # Derived: idle at 41 C is 46 C from the limit, so the limit is 87; slowdown 2 and shutdown 8
    # above it. Memory maximum assumed: the capture tells only a margin of 0.
    thresholds_celsius=(95, 89, 95, 87),
    tells_tlimit=True,
    has_memory_temperature=True,
    ecc=True,
    remap_banks=2_560,
    persistence=True,
    nvlinks=18,  # "nvlink -s"
    nvlink_version=6,  # 4.0, published for Hopper
    nvlink_bytes_per_second=26_562_000_000,
    mig_capable=True,
    idle={
        "utilization": 0.0,
        "memory_utilization": 0.0,
        "encoder_utilization": 0.0,
        "decoder_utilization": 0.0,
        "memory_used_bytes": 0,
        "bar1_used_bytes": 1 * MIB,
        "demand_watts": 69.85,
        "temperature_celsius": 41,
        "memory_temperature_celsius": 48,
        "graphics_clock_hertz": 345 * MEGAHERTZ,
        "memory_clock_hertz": 2_619 * MEGAHERTZ,
        "video_clock_hertz": 765 * MEGAHERTZ,
        "performance_state": 0,
        "pcie_tx_bytes_per_second": 352 * KIB,
        "pcie_rx_bytes_per_second": 329 * KIB,
        "pcie_replays": 9,
        "pcie_generation": 5,
        "pcie_width": 16,
    },
    loaded={
        "utilization": 1.0,
        "memory_utilization": 0.11,
        "encoder_utilization": 0.0,
        "decoder_utilization": 0.0,
        "memory_used_bytes": 19_818 * MIB,
        "bar1_used_bytes": 19_819 * MIB,
        "demand_watts": 629.45,
        "temperature_celsius": 59,
        "memory_temperature_celsius": 55,
        "graphics_clock_hertz": 1_980 * MEGAHERTZ,
        "memory_clock_hertz": 2_619 * MEGAHERTZ,
        "video_clock_hertz": 1_545 * MEGAHERTZ,
        "performance_state": 0,
        "pcie_tx_bytes_per_second": 3_092 * KIB,
        "pcie_rx_bytes_per_second": 6_346 * KIB,
        "pcie_replays": 9,
        "pcie_generation": 5,
        "pcie_width": 16,
    },
)


def _mig(profile: str, gi: int, *, mib: int, bar1_mib: int, sms: int, slices: int) -> MigInstance:
    """One instance of the H100; engines follow the slices, as the capture shows."""
    engines = min(slices, 3)
    return MigInstance(
        profile=profile,
        gpu_instance=gi,
        compute_instance=0,
        memory_total_bytes=mib * MIB,
        bar1_total_bytes=bar1_mib * MIB,
        multiprocessors=sms,
        copy_engines=engines,
        decoders=engines,
        jpegs=engines,
        gpu_slices=slices,
        compute_slices=slices,
    )


# nvidia-h100-mig__590.48.01.txt: the same card; "list (-L)" and "MIG Device" of "idle :: query (-q)".
# Utilisation is N/A under MIG: the library hides it, so the values here are what it hides.
H100_MIG = replace(
    H100_80GB,
    migs=(
        _mig("3g.40gb", 2, mib=40_448, bar1_mib=24_739, sms=60, slices=3),
        _mig("2g.20gb", 3, mib=20_096, bar1_mib=12_369, sms=32, slices=2),
        _mig("1g.10gb", 9, mib=9_984, bar1_mib=6_184, sms=16, slices=1),
        _mig("1g.10gb", 10, mib=9_984, bar1_mib=6_184, sms=16, slices=1),
    ),
    idle={
        **H100_80GB.idle,
        "memory_used_bytes": 59 * MIB,
        "bar1_used_bytes": 81_081 * MIB,
        "mig_memory_used_bytes": (26 * MIB, 17 * MIB, 9 * MIB, 9 * MIB),
        "demand_watts": 71.27,
        "temperature_celsius": 42,
        "pcie_tx_bytes_per_second": 359 * KIB,
    },
    loaded={  # "load :: query (-q)": all work in the 3g.40gb instance
        **H100_80GB.loaded,
        "memory_used_bytes": 11_125 * MIB,
        "bar1_used_bytes": 81_081 * MIB,
        "mig_memory_used_bytes": (11_091 * MIB, 17 * MIB, 9 * MIB, 9 * MIB),
        "demand_watts": 432.21,
        "temperature_celsius": 53,
        "memory_temperature_celsius": 58,
        "pcie_tx_bytes_per_second": 9_139 * KIB,
        "pcie_rx_bytes_per_second": 19_191 * KIB,
    },
)

# nvidia-l40s__595.80.txt: "idle :: query (-q)", and "load :: query (-q)" (two ffmpeg encoders) for
# .loaded. Its "idle" was taken the moment another job had ended (100 %, 183 W, 64 C), so that
# .idle has that section's clocks and memory, while load, power and heat are assumed.
L40S = Profile(
    name="NVIDIA L40S",
    brand=14,
    architecture=8,  # Ada Lovelace
    compute_capability=(8, 9),
    cores=18_176,  # published
    memory_bus_bits=384,  # published
    vbios="95.02.66.00.02",
    board_part="900-2G133-0080-000",
    virtualization=1,
    cpus=8,
    pci_bus=0x01,
    pci_device=0x00,
    pci_device_id=0x26B910DE,
    pci_subsystem_id=0x185110DE,
    pci_subclass=2,
    pcie_generation_max=4,
    memory_total_bytes=46_068 * MIB,
    memory_reserved_bytes=609 * MIB,
    bar1_total_bytes=65_536 * MIB,
    power_min_watts=100,
    power_default_watts=350,
    power_max_watts=350,
    software_power_cap_seconds=200.740215,
    graphics_clock_max_hertz=2_520 * MEGAHERTZ,
    memory_clock_max_hertz=9_001 * MEGAHERTZ,
    video_clock_max_hertz=1_965 * MEGAHERTZ,
    # Derived: 64 C is 24 C from the limit, so the limit is 88; slowdown 2 and shutdown 5 above it.
    thresholds_celsius=(93, 90, 0, 88),
    tells_tlimit=True,
    ecc=True,
    remap_banks=192,
    accounting=True,
    idle={
        "utilization": 0.0,
        "memory_utilization": 0.0,
        "encoder_utilization": 0.0,
        "decoder_utilization": 0.0,
        "encoder_sessions": 0,
        "encoder_frames_per_second": 0,
        "encoder_latency_seconds": 0.0,
        "memory_used_bytes": 0,
        "bar1_used_bytes": 0,
        "demand_watts": 80.0,  # assumed: P0 at full clocks
        "temperature_celsius": 50,  # assumed
        "graphics_clock_hertz": 2_520 * MEGAHERTZ,
        "memory_clock_hertz": 9_001 * MEGAHERTZ,
        "video_clock_hertz": 1_965 * MEGAHERTZ,
        "performance_state": 0,
        "pcie_tx_bytes_per_second": 585 * KIB,
        "pcie_rx_bytes_per_second": 244 * KIB,
        "pcie_replays": 0,
        "pcie_generation": 4,
        "pcie_width": 16,
    },
    loaded={
        "utilization": 0.09,
        "memory_utilization": 0.02,
        "encoder_utilization": 0.59,
        "decoder_utilization": 0.0,
        "encoder_sessions": 2,
        "encoder_frames_per_second": 243,
        "encoder_latency_seconds": 3.280335,
        "memory_used_bytes": 1_235 * MIB,
        "bar1_used_bytes": 1_235 * MIB,
        "demand_watts": 110.24,
        "temperature_celsius": 54,
        "graphics_clock_hertz": 2_520 * MEGAHERTZ,
        "memory_clock_hertz": 9_001 * MEGAHERTZ,
        "video_clock_hertz": 1_965 * MEGAHERTZ,
        "performance_state": 0,
        "pcie_tx_bytes_per_second": 259_423 * KIB,
        "pcie_rx_bytes_per_second": 2_012_109 * KIB,
        "pcie_replays": 0,
        "pcie_generation": 4,
        "pcie_width": 16,
    },
)

# nvidia-geforce-rtx-4080-super__595.71.05.txt: "idle :: query (-q)" and "load :: query (-q)" (two
# ffmpeg encoders beside a desktop).
RTX_4080_SUPER = Profile(
    name="NVIDIA GeForce RTX 4080 SUPER",
    brand=5,  # "GeForce"
    architecture=8,
    compute_capability=(8, 9),
    cores=10_240,  # published
    memory_bus_bits=256,  # published
    vbios="95.03.44.00.B2",
    has_serial=False,
    cpus=16,
    pci_bus=0x01,
    pci_device=0x00,
    pci_device_id=0x270210DE,
    pci_subsystem_id=0x51101462,
    pci_subclass=0,
    pcie_generation_max=4,
    memory_total_bytes=16_376 * MIB,
    memory_reserved_bytes=434 * MIB,
    bar1_total_bytes=16_384 * MIB,
    power_min_watts=150,
    power_default_watts=320,
    power_max_watts=400,
    graphics_clock_max_hertz=3_165 * MEGAHERTZ,
    memory_clock_max_hertz=11_501 * MEGAHERTZ,
    video_clock_max_hertz=2_415 * MEGAHERTZ,
    thresholds_celsius=(101, 96, 0, 90),
    target_celsius=84,
    fans=2,  # assumed; the capture tells the speed only
    display_active=True,
    idle={
        "utilization": 0.0,
        "memory_utilization": 0.23,
        "encoder_utilization": 0.0,
        "decoder_utilization": 0.0,
        "encoder_sessions": 0,
        "encoder_frames_per_second": 0,
        "encoder_latency_seconds": 0.0,
        "memory_used_bytes": 596 * MIB,
        "bar1_used_bytes": 30 * MIB,
        "demand_watts": 25.92,
        "temperature_celsius": 43,
        "graphics_clock_hertz": 210 * MEGAHERTZ,
        "memory_clock_hertz": 405 * MEGAHERTZ,
        "video_clock_hertz": 1_185 * MEGAHERTZ,
        "performance_state": 8,
        "fan_ratio": 0.0,
        "pcie_tx_bytes_per_second": 488 * KIB,
        "pcie_rx_bytes_per_second": 537 * KIB,
        "pcie_replays": 0,
        "pcie_generation": 1,
        "pcie_width": 16,
    },
    loaded={
        "utilization": 0.07,
        "memory_utilization": 0.02,
        "encoder_utilization": 0.72,
        "decoder_utilization": 0.0,
        "encoder_sessions": 2,
        "encoder_frames_per_second": 184,
        "encoder_latency_seconds": 0.062844,
        "memory_used_bytes": 1_474 * MIB,
        "bar1_used_bytes": 35 * MIB,
        "demand_watts": 84.03,
        "temperature_celsius": 45,
        "graphics_clock_hertz": 2_805 * MEGAHERTZ,
        "memory_clock_hertz": 11_251 * MEGAHERTZ,
        "video_clock_hertz": 2_145 * MEGAHERTZ,
        "performance_state": 2,
        "fan_ratio": 0.0,
        "pcie_tx_bytes_per_second": 174_169 * KIB,
        "pcie_rx_bytes_per_second": 1_436_230 * KIB,
        "pcie_replays": 0,
        "pcie_generation": 4,
        "pcie_width": 16,
    },
)

# No capture of this one. Published: memory, cores, bus, default power, PCI id. Scaled from the RTX
# 4080 Super: the rest of what is fixed (power by 450/320), and .idle by the default power. .loaded
# is a compute load, scaled from the H100's under gpu-burn (its shares of power and memory).
RTX_4090 = replace(
    RTX_4080_SUPER,
    name="NVIDIA GeForce RTX 4090",
    cores=16_384,
    memory_bus_bits=384,
    vbios="95.02.18.80.01",  # assumed
    pci_device_id=0x268410DE,
    pci_subsystem_id=0x16F410DE,  # assumed
    memory_total_bytes=24_564 * MIB,
    memory_reserved_bytes=651 * MIB,  # scaled by memory
    bar1_total_bytes=32_768 * MIB,  # the next power of two, as on the sister card
    power_min_watts=150,
    power_default_watts=450,
    power_max_watts=562,  # scaled
    idle={
        **RTX_4080_SUPER.idle,
        "demand_watts": 36.45,  # scaled by default power
        "memory_used_bytes": 894 * MIB,  # scaled by memory
    },
    loaded={
        **RTX_4080_SUPER.loaded,
        "utilization": 1.0,
        "memory_utilization": 0.11,
        "encoder_utilization": 0.0,
        "encoder_sessions": 0,
        "encoder_frames_per_second": 0,
        "encoder_latency_seconds": 0.0,
        "memory_used_bytes": 5_969 * MIB,  # 24.3 %, the H100's share
        "demand_watts": 404.6,  # 89.9 % of the default limit, the H100's share
        "temperature_celsius": 61,  # 18 C above idle, as the H100
        "fan_ratio": 0.3,  # assumed
    },
)

PROFILES = {
    "H100_80GB": H100_80GB,
    "H100_MIG": H100_MIG,
    "L40S": L40S,
    "RTX_4080_SUPER": RTX_4080_SUPER,
    "RTX_4090": RTX_4090,
}
"""All profiles by name."""
