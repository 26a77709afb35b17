"""How a profile becomes a card in the driver's state, and what a card forgets."""

import uuid
from collections.abc import Sequence

from tests.fakes.nvml import layout, power
from tests.fakes.nvml.profiles import MigInstance, Profile

_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_EVENTS = 0x4 | 0x8 | 0x10  # P-state, XID, clock: assumed of every card
_ECC_EVENTS = 0x1 | 0x2


def describe(gpu: layout.Gpu, profile: Profile, slot: int, now_us: int) -> None:
    """Fill an empty slot with a card of this profile, idle, as the driver finds it."""
    _identify(gpu, profile, slot)
    _size(gpu, profile)
    _limit(gpu, profile, now_us)
    _connect(gpu, profile)
    lay_out_migs(gpu, gpu.uuid.decode(), profile.migs)
    gpu.present = 1


def forget_settings(gpu: layout.Gpu, now_us: int) -> None:
    """What the driver loses when it unloads from a card: limits, locks, modes, volatile counts."""
    power.set_limit_mw(gpu, now_us, gpu.power_default_mw)
    gpu.limit_from_us = now_us
    power.replan(gpu, now_us)
    for field in ("graphics_lock_min_mhz", "graphics_lock_max_mhz", "memory_lock_min_mhz"):
        setattr(gpu, field, 0)
    gpu.memory_lock_max_mhz = 0
    gpu.compute_mode = 0
    gpu.account_count = 0
    for uncorrected in (0, 1):
        for location in range(8):
            gpu.ecc[uncorrected][0][location] = 0
    gpu.ecc_current = gpu.ecc_pending
    gpu.mig_current = gpu.mig_pending


def _stable_uuid(*parts: object) -> uuid.UUID:
    """The same every time, so that what tests print can be compared."""
    return uuid.uuid5(uuid.NAMESPACE_URL, "/".join(map(str, parts)))


def _identify(gpu: layout.Gpu, profile: Profile, slot: int) -> None:
    gpu.name = profile.name.encode()
    gpu.uuid = f"GPU-{_stable_uuid('gpu', slot, profile.name)}".encode()
    gpu.serial = f"{1_650_000_000_000 + slot:013d}".encode() if profile.has_serial else b""
    gpu.vbios = profile.vbios.encode()
    gpu.board_part = profile.board_part.encode()
    gpu.minor = slot
    gpu.brand = profile.brand
    gpu.architecture = profile.architecture
    gpu.cuda_major, gpu.cuda_minor = profile.compute_capability
    gpu.virtualization = profile.virtualization
    gpu.pci_bus = profile.pci_bus + slot
    gpu.pci_device = profile.pci_device
    gpu.pci_device_id = profile.pci_device_id
    gpu.pci_subsystem_id = profile.pci_subsystem_id
    gpu.pci_subclass = profile.pci_subclass
    gpu.board_id = gpu.pci_bus << 8 | gpu.pci_device  # as in the captures: 0x9, 0x100
    gpu.numa_node_id = -1  # "GPU NUMA ID" is N/A in all captures
    for cpu in range(profile.cpus):
        gpu.cpu_affinity[cpu // 64] |= 1 << cpu % 64
    gpu.memory_affinity = 1  # NUMA node 0


def _size(gpu: layout.Gpu, profile: Profile) -> None:
    gpu.cores = profile.cores
    gpu.memory_bus_bits = profile.memory_bus_bits
    gpu.memory_total_bytes = profile.memory_total_bytes
    gpu.memory_reserved_bytes = profile.memory_reserved_bytes
    gpu.bar1_total_bytes = profile.bar1_total_bytes
    gpu.has_ecc = gpu.ecc_current = gpu.ecc_pending = profile.ecc
    gpu.has_remapping = profile.remap_banks > 0
    gpu.remap_histogram[0] = profile.remap_banks
    gpu.event_types = _EVENTS | (_ECC_EVENTS if profile.ecc else 0)
    gpu.persistence = profile.persistence
    gpu.accounting = profile.accounting
    gpu.accounting_buffer = profile.accounting_buffer
    gpu.display_attached = profile.display_attached
    gpu.display_active = profile.display_active


def _limit(gpu: layout.Gpu, profile: Profile, now_us: int) -> None:
    gpu.power_management = profile.power_management
    gpu.power_min_mw = round(profile.power_min_watts * 1e3)
    gpu.power_default_mw = round(profile.power_default_watts * 1e3)
    gpu.power_max_mw = round(profile.power_max_watts * 1e3)
    gpu.limit_mw = gpu.limit_before_mw = gpu.power_default_mw
    gpu.limit_from_us = now_us
    gpu.actuation_us = 100_000  # assumed: the real latency is not published
    gpu.violation_ns[0] = round(profile.software_power_cap_seconds * 1e9)
    gpu.has_memory_temperature = profile.has_memory_temperature
    gpu.uses_tlimit = profile.tells_tlimit
    for place, celsius in enumerate(profile.thresholds_celsius):
        gpu.thresholds[place] = celsius
    gpu.thresholds[5] = profile.target_celsius  # NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_CURR
    gpu.fans = profile.fans
    gpu.mig_capable = profile.mig_capable
    gpu.mig_max = 7 if profile.mig_capable else 0
    highest = (
        profile.graphics_clock_max_hertz,
        profile.graphics_clock_max_hertz,
        profile.memory_clock_max_hertz,
        profile.video_clock_max_hertz,
    )
    for clock, hertz in enumerate(highest):
        gpu.clock_max_mhz[clock] = round(hertz / 1e6)
    gpu.can_lock_clocks = profile.can_lock_clocks


def _connect(gpu: layout.Gpu, profile: Profile) -> None:
    gpu.pcie_gen_max = profile.pcie_generation_max
    gpu.pcie_width_max = profile.pcie_width_max
    gpu.link_count = profile.nvlinks
    for number in range(profile.nvlinks):
        link = gpu.links[number]
        link.active = 1
        link.version = profile.nvlink_version
        link.speed_mbps = round(profile.nvlink_bytes_per_second / 1e6)
        link.remote_type = _SWITCH  # an HGX board; the PCI ids of its switches are assumed
        link.remote_bus = 0x80 + number % 4
        link.remote_pci_device_id = 0x22A310DE


def lay_out_migs(gpu: layout.Gpu, parent: str, instances: Sequence[MigInstance]) -> None:
    """Partition a card whose UUID is ``parent``; with no instances MIG is off."""
    gpu.mig_current = gpu.mig_pending = bool(instances)
    for place in range(layout.MIGS):
        gpu.migs[place] = layout.Mig()
    for place, instance in enumerate(instances):
        gpu.migs[place] = layout.Mig(
            uuid=f"MIG-{_stable_uuid(parent, instance.gpu_instance, instance.compute_instance)}".encode(),
            profile=instance.profile.encode(),
            memory_total_bytes=instance.memory_total_bytes,
            bar1_total_bytes=instance.bar1_total_bytes,
            present=1,
            gpu_instance=instance.gpu_instance,
            compute_instance=instance.compute_instance,
            multiprocessors=instance.multiprocessors,
            copy_engines=instance.copy_engines,
            decoders=instance.decoders,
            encoders=instance.encoders,
            jpegs=instance.jpegs,
            ofas=instance.ofas,
            gpu_slices=instance.gpu_slices,
            compute_slices=instance.compute_slices,
        )
