"""Snapshots made by hand: an empty host, one tenant, hostile names, and a large host."""

import string

import msgspec

from gpuagent.model import vocab
from gpuagent.model.audit import Action
from gpuagent.model.declare import On, Signal
from gpuagent.model.inventory import (
    NODE,
    Gpu,
    Inventory,
    Level,
    Limits,
    MigInstance,
    Place,
    Process,
    Seat,
    Subject,
    Tenant,
    on_cgroup,
    on_gpu,
    on_mig,
    on_tenant,
    on_tenant_gpu,
)
from gpuagent.model.plan import (
    Blocked,
    Cause,
    Hold,
    LoopStats,
    Mode,
    Plan,
    Posture,
    Setting,
    Snapshot,
)
from gpuagent.model.state import Event, Health, Instant, NodeState, Outcome, Reading, Result

MONO = 5000.0
WALL = 1_800_000_000.0
NOW = Instant(MONO, WALL)
RUN = "0badcafe"

GPU0 = "GPU-00000000-0000-0000-0000-000000000000"
GPU1 = "GPU-11111111-1111-1111-1111-111111111111"
MIG1 = "MIG-11111111-aaaa-1111-1111-111111111111"

ENFORCING = Posture(
    mode="enforce", config_path="/etc/gpuagent/gpuagent.toml", config_loaded_wall=WALL
)
OBSERVING = Posture(mode="observe", config_loaded_wall=WALL)

# Names that strangers choose: terminal control, right-to-left override, markup, quotes, no UTF-8.
HOSTILE = (
    "esc\x1b[2J\x1b]0;owned\x07",
    "bidi\u202egpj.exe",
    "csi\x9b31m",
    "[red]markup[/red]",
    'quote"back\\slash\nnewline',
    "bytes\udcff\udc80",
    "../../etc/passwd",
    "a/b?c=d#e%2Ff",
    "<script>alert(1)</script>",
    "\u200bzero\u0000byte",
    "{name}",
    "a/explanation",
    "a+b %2F ;=",
    "\U0001f600 wide \u6f22\u5b57",
)


def empty(*, posture: Posture = OBSERVING) -> Snapshot:
    """A host that has been looked at and has no GPU and no tenant."""
    state = NodeState(
        NOW,
        inventory=Inventory(gpus=(), gpu_processes=(), tenants=()),
        readings=_by_key([Reading(vocab.NODE_CPU_COUNT, NODE, 8, MONO)]),
        health={"nvml": Health("nvml", up=False, why="no driver is loaded", failures=3)},
    )
    return Snapshot(state, posture)


def unread() -> Snapshot:
    """A host of which nothing could be read: unknown everywhere, which is not zero."""
    return Snapshot(NodeState(NOW), OBSERVING)


def _by_key(readings: list[Reading]) -> dict[tuple[Signal, Subject, tuple[str, ...]], Reading]:
    return {r.key: r for r in readings}


def process(pid: int, *, uid: int = 1000, cgroup: str = "/", name: str = "python3") -> Process:
    return Process(
        pid=pid,
        started=pid * 10,
        ppid=1,
        uid=uid,
        user=f"u{uid}",
        name=name,
        exe="/usr/bin/python3",
        cgroup=cgroup,
    )


TRAIN_PATH = "/system.slice/train.service"
TRAIN_SEAT = on_cgroup("train", TRAIN_PATH, 77)


def tenant(
    name: str,
    *,
    level: Level = Level.L3,
    path: str = TRAIN_PATH,
    pids: tuple[int, ...] = (4242,),
    uid: int = 1000,
    gpus: tuple[str, ...] = (GPU0,),
    refusal: str = "",
) -> Tenant:
    return Tenant(
        name=name,
        level=level,
        rule=name,
        enforce=True,
        limits=Limits(memory_limit_bytes=8 << 30),
        places=(Place(unit=path.rpartition("/")[2], home=path),),
        seats=(Seat(path=path, inode=77, refusal=refusal),),
        processes=tuple(process(p, uid=uid, cgroup=path) for p in pids),
        process_count=len(pids),
        gpus=gpus,
        users=(f"u{uid}",),
        since=MONO - 60,
    )


def _card(uuid: str, index: int) -> Gpu:
    return Gpu(
        uuid=uuid,
        index=index,
        name="NVIDIA H100 80GB HBM3",
        pci_bus_id=f"00000000:{index:02X}:00.0",
        memory_bytes=80 << 30,
        power_min_watts=200,
        power_max_watts=700,
        power_default_watts=700,
        driver="550.54.15",
    )


def _card_readings(uuid: str) -> list[Reading]:
    card = on_gpu(uuid)
    return [
        Reading(vocab.GPU_UTILIZATION_RATIO, card, 0.75, MONO),
        Reading(vocab.GPU_MEMORY_USED_BYTES, card, 70 << 30, MONO),
        Reading(vocab.GPU_MEMORY_TOTAL_BYTES, card, 80 << 30, MONO),
        Reading(vocab.GPU_POWER_WATTS, card, 510, MONO),
        Reading(vocab.GPU_POWER_LIMIT_WATTS, card, 700, MONO),
        Reading(vocab.GPU_TEMPERATURE_CELSIUS, card, 71, MONO),
        Reading(vocab.GPU_ENERGY_JOULES, card, 123456.5, MONO),
        Reading(vocab.GPU_XID_ERRORS, card, 2, MONO - 900, dims=("79",)),
        Reading(vocab.GPU_THROTTLED, card, 0, MONO, dims=("sw_thermal",)),
    ]


def holding(
    name: str, seat: Subject, effect: Result | None, *, why: str, share: float = 0.5
) -> Hold:
    """A decision to hold this tenant back through cpu.max, and what became of it."""
    return Hold(
        on_tenant(name),
        share,
        "cpu_max",
        "memory",
        why,
        settings=((vocab.CPU_MAX, seat),),
        effect=effect,
    )


def limited_card(effect: Result | None) -> Hold:
    """A decision to hold the whole first card back."""
    card = on_gpu(GPU0)
    key = (vocab.POWER_LIMIT, card)
    return Hold(card, 0.8, "power_limit", "temperature", "83 C", settings=(key,), effect=effect)


def became(effect: Result | None, hindrance: str = "") -> Snapshot:
    """The busy host, with that as what became of the decision on its tenant `train`."""
    snapshot = busy()
    key = (vocab.CPU_MAX, TRAIN_SEAT)
    outcomes = dict(snapshot.outcomes)
    if effect is None:
        del outcomes[key]
    else:
        outcomes[key] = msgspec.structs.replace(outcomes[key], result=effect, why=hindrance)
    holds = tuple(h.with_effect(outcomes) for h in snapshot.holds)
    return msgspec.structs.replace(snapshot, outcomes=outcomes, holds=holds)


def busy(*, posture: Posture = ENFORCING) -> Snapshot:
    """Two cards (one of them with MIG), an L1 tenant, and a best-effort one that is held back.

    While the agent only observes, it would be.
    """
    mig = MigInstance(MIG1, GPU1, 1, 0, "1g.10gb", 10 << 30)
    cards = (_card(GPU0, 0), Gpu(GPU1, 1, "NVIDIA H100", mig_enabled=True, mig=(mig,)))
    serve = tenant(
        "serve", level=Level.L1, path="/system.slice/serve.service", pids=(31,), uid=1001
    )
    train = tenant("train", pids=(4242, 4243))
    card = on_gpu(GPU0)
    why = "memory of card 0 is at 87 % and grew by 900 MB in 10 s"
    numbers = (("memory_used_ratio", 0.875),)
    settings = (
        Setting(vocab.CPU_MAX, TRAIN_SEAT, 2.1, why, "backpressure/memory", numbers),
        Setting(
            vocab.CPU_WEIGHT,
            TRAIN_SEAT,
            25,
            why,
            "backpressure/memory",
            numbers,
            Blocked("ineffective", "no sibling competes with it"),
        ),
    )
    outcome = Outcome(
        vocab.CPU_MAX,
        TRAIN_SEAT,
        2.1,
        2.1 if posture.acts else float("inf"),
        float("inf") if posture.acts else None,
        "applied" if posture.acts else "would",
        "",
        MONO - 2,
    )
    state = NodeState(
        NOW,
        inventory=Inventory(gpus=cards, gpu_processes=(), tenants=(train, serve)),
        readings=_by_key(
            [
                *_card_readings(GPU0),
                Reading(vocab.GPU_MEMORY_USED_BYTES, on_mig(MIG1), 1 << 30, MONO),
                Reading(vocab.NODE_POWER_WATTS, NODE, 510, MONO, exact=False),
                Reading(vocab.NODE_CPU_COUNT, NODE, 64, MONO - 30),
                Reading(
                    vocab.TENANT_GPU_MEMORY_BYTES, on_tenant_gpu("train", GPU0), 60 << 30, MONO
                ),
                Reading(
                    vocab.TENANT_GPU_UTILIZATION_RATIO,
                    on_tenant_gpu("train", GPU0),
                    0.6,
                    MONO - 1,
                    exact=False,
                ),
                Reading(vocab.TENANT_CPU_CORES, on_tenant("train"), 1.5, MONO),
                Reading(vocab.CGROUP_CPU_MAX_CORES, TRAIN_SEAT, float("inf"), MONO - 3),
                Reading(vocab.CGROUP_CPU_WEIGHT, TRAIN_SEAT, 100, MONO),
                # Expired: must not be told any more.
                Reading(vocab.GPU_CLOCK_HERTZ, card, 1.98e9, MONO - 100, dims=("sm",)),
            ]
        ),
        health={
            "nvml": Health("nvml", up=True, last_success=MONO - 0.2, seconds=0.01),
            "netlink": Health("netlink", up=None),
        },
    )
    return Snapshot(
        state,
        posture,
        plan=Plan(settings),
        outcomes={(vocab.CPU_MAX, TRAIN_SEAT): outcome},
        holds=(holding("train", TRAIN_SEAT, outcome.result, why="cut twice", share=0.49),),
        causes=(Cause("memory", card, MONO - 12, why, numbers),),
        actions={("cgroup_cpu_max", "applied"): 4, ("cgroup_cpu_max", "left alone"): 1},
        outside_changes={"gpu_power_limit": 2},
        events=(
            Event("start", MONO - 60, "the agent has started", number=1),
            Event("xid", MONO - 30, "XID 79 on card 0", card, (("xid", 79),), number=2),
        ),
        run=RUN,
        audit=(
            Action(
                wall=WALL - 2,
                knob=vocab.CPU_MAX.name,
                subject=TRAIN_SEAT,
                did="set",
                result="applied",
                why=why,
                rule="backpressure/memory",
                before="max 100000",
                wrote="42000 20000",
                after="42000 20000",
                original="max 100000",
                numbers=numbers,
                number=1,
            ),
        ),
        stats=LoopStats(ticks=60, tick_seconds=0.002, lag_seconds=0.001),
    )


def hostile(names: tuple[str, ...] = HOSTILE) -> Snapshot:
    """Tenants, cards, cgroups and texts with names that their owners chose against us."""
    tenants = []
    readings = []
    holds = []
    outcomes = {}
    for i, name in enumerate(names):
        path = f"/system.slice/{name}.service"
        tenants.append(tenant(name, path=path, pids=(100 + i,)))
        seat = on_cgroup(name, path, 77)
        readings += [
            Reading(vocab.TENANT_GPU_MEMORY_BYTES, on_tenant_gpu(name, GPU0), 1 << 30, MONO),
            Reading(vocab.CGROUP_CPU_WEIGHT, seat, 100, MONO),
        ]
        holds.append(holding(name, seat, "contested", why=f"because {name} grew"))
        outcomes[vocab.CPU_MAX, seat] = Outcome(
            vocab.CPU_MAX, seat, 1, 1, 4, "contested", f"{name} fights back", MONO
        )
    first = names[0] if names else ""
    state = NodeState(
        NOW,
        inventory=Inventory(
            gpus=(Gpu(GPU0, 0, f"card {first}", blind=first),),
            gpu_processes=(),
            tenants=tuple(tenants),
        ),
        readings=_by_key(readings),
        health={"nvml": Health("nvml", up=False, why=f"broke on {first}", failures=1)},
    )
    return Snapshot(
        state,
        Posture(mode="enforce", config_error=f"gpuagent.toml:1: {first}: unknown key"),
        outcomes=outcomes,
        holds=tuple(holds),
        causes=(Cause("memory", on_gpu(GPU0), MONO, f"because of {first}"),),
        events=(Event("note", MONO, f"seen: {first}", on_tenant(first), number=1),),
        run=RUN,
        audit=(
            Action(
                WALL,
                "cgroup_cpu_max",
                on_cgroup(first, f"/{first}", 7),
                "set",
                first,
                first,
                number=1,
            ),
        ),
    )


def large(cards: int = 16, tenants: int = 200, mode: Mode = "enforce") -> Snapshot:
    """Sixteen cards, 200 tenants on all of them, about 10,000 series."""
    uuids = [f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(cards)]
    readings = [r for u in uuids for r in _card_readings(u)]
    people = []
    for i in range(tenants):
        name = f"tenant-{string.ascii_lowercase[i % 26]}{i}"
        path = f"/system.slice/{name}.service"
        on = tuple(uuids[(i + k) % cards] for k in range(12))
        people.append(tenant(name, path=path, pids=(1000 + i,), gpus=on))
        for uuid in on:
            both = on_tenant_gpu(name, uuid)
            readings += [
                Reading(vocab.TENANT_GPU_MEMORY_BYTES, both, 1 << 30, MONO),
                Reading(vocab.TENANT_GPU_UTILIZATION_RATIO, both, 0.1, MONO),
                Reading(vocab.TENANT_GPU_PROCESSES, both, 1, MONO),
            ]
        seat = on_cgroup(name, path, 77)
        readings += [
            Reading(s, on_tenant(name), 1, MONO) for s in vocab.SIGNALS if s.on == (On.TENANT,)
        ]
        readings += [Reading(s, seat, 100, MONO) for s in vocab.SIGNALS if s.on == (On.CGROUP,)]
    state = NodeState(
        NOW,
        inventory=Inventory(
            gpus=tuple(_card(u, i) for i, u in enumerate(uuids)),
            gpu_processes=(),
            tenants=tuple(people),
        ),
        readings=_by_key(readings),
    )
    return Snapshot(state, Posture(mode=mode))


def tenants_of(uid: int, pid: int) -> Snapshot:
    """A host on which process `pid` is a tenant's, found by its real start time."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    who = Process(pid, started, 1, uid, "me", "python3", "", "/")
    one = Tenant("mine", Level.L3, processes=(who,), process_count=1)
    return Snapshot(NodeState(NOW, inventory=Inventory(gpus=(), tenants=(one,))), OBSERVING)
