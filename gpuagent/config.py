"""Every setting, its type, its default and its bounds. `configfile` reads them from TOML.

The comment of a key in `config/gpuagent.toml` is its docstring here, and its default there is the
default here: a test holds one against the other.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpuagent.model.inventory import Level

# A quantity is written with its unit ("200ms", "8GiB", "250W", "40%"), is never negative, and a
# ratio never above 1: `quantities` sees to that. Bounds beside it are the key's own.
Seconds = Annotated[float, Meta(extra={"quantity": "seconds"})]
Bytes = Annotated[int, Meta(extra={"quantity": "bytes"})]
Watts = Annotated[float, Meta(extra={"quantity": "watts"})]
Ratio = Annotated[float, Meta(extra={"quantity": "ratio"})]
Cores = Annotated[float, Meta(gt=0)]
Celsius = Annotated[float, Meta(ge=0, le=150)]
AbsolutePath = Annotated[str, Meta(pattern="^/", max_length=4095, extra={"quantity": "path"})]
MaybePath = Annotated[str, Meta(pattern="^(/|$)", max_length=4095, extra={"quantity": "path"})]
"""Empty for none."""
# No colon: names with one ("unit:foo.service") are those the agent gives to what it finds.
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/-]{0,62}$", extra={"quantity": "name"})
]
GroupName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/-]{0,62}$", extra={"quantity": "group"})
]
Pattern = Annotated[str, Meta(max_length=1024)]
"""Shell-style, compared with the whole text: `train-*.scope`."""
Sla = Annotated[Level, Meta(extra={"quantity": "sla"})]
"""Written "L1", "L2" or "L3"."""
Kind = Literal["", "training", "inference", "interactive", "idle"]
Family = Literal[
    "notice",
    "cpu_weight",
    "io_weight",
    "cpu_max",
    "mps",
    "freeze",
    "suspend",
    "terminate",
    "host_memory",
    "power_limit",
    "clock_limit",
    "card_mode",
]
"""A family of knobs: a rung of the ladder, or a kind of card setting."""
Lever = Literal[
    "notice", "cpu_weight", "io_weight", "cpu_max", "mps", "freeze", "suspend", "terminate"
]
"""A family that acts on one tenant."""
Hours = Annotated[str, Meta(max_length=64, extra={"quantity": "hours"})]
"""A span of local time: "23:00-06:00", "sat,sun 00:00-24:00", "mon-fri 18:00-08:00"."""
Signal = Annotated[
    Literal["", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM", "SIGWINCH"],
    Meta(extra={"quantity": "signal"}),
]
Word = Annotated[str, Meta(max_length=4095)]
LabelPair = Annotated[
    str, Meta(max_length=512, pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*=", extra={"quantity": "label"})
]
GpuName = Annotated[str, Meta(max_length=128, min_length=1)]
"""UUID of a card, or a shell-style pattern of UUIDs: "*" for all."""


class Paths(msgspec.Struct, frozen=True):
    """Where things are on this host. Read at start only."""

    state_dir: AbsolutePath = "/var/lib/gpuagent"
    """Ledger, audit log and crash dumps; created with mode 0700."""
    socket: AbsolutePath = "/run/gpuagent/gpuagent.sock"
    """Unix socket of the API; beside it NAME-admin.sock, for root and api.group only."""
    cgroup_root: AbsolutePath = "/sys/fs/cgroup"
    """Mount point of cgroup v2."""
    kernel_log: AbsolutePath = "/dev/kmsg"
    """Kernel log in which to look for XIDs that NVML never reports."""
    nvml_library: Annotated[str, Meta(max_length=4095)] = ""
    """libnvidia-ml.so.1 to load; empty for the one the dynamic linker finds."""

    nvidia_smi: Annotated[str, Meta(max_length=4095)] = "nvidia-smi"
    """For what only nvidia-smi can set, the time slice: a path, or a name to look for in PATH."""


class Api(msgspec.Struct, frozen=True):
    """Who may talk to the agent. Read at start only."""

    group: Annotated[str, Meta(max_length=32)] = "gpuagent"
    """Members of this group may do over the socket what root may; empty for root only."""
    metrics_listen: Annotated[str, Meta(extra={"quantity": "address"})] = "127.0.0.1:9485"
    """Loopback address: /metrics, /healthz and /readyz openly, all else by token; empty for none."""
    metrics_token: bool = False
    """Whether /metrics there needs a token too: it names every tenant to every local user."""
    network_listen: Annotated[str, Meta(extra={"quantity": "network"})] = ""
    """Any address, such as 0.0.0.0:9486, for /metrics and health by token over TLS; empty for none."""
    tls_certificate: MaybePath = ""
    """Certificate for it in PEM form, with those that vouch for it; read again when it changes."""
    tls_key: MaybePath = ""
    """Private key of that certificate, without a passphrase; read again when it changes."""


class Log(msgspec.Struct, frozen=True):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged: debug, info, warning or error."""
    format: Literal["auto", "json", "text"] = "auto"
    """json, text, or auto, which is text on a terminal and json elsewhere."""


class Nvml(msgspec.Struct, frozen=True):
    """How the driver is read."""

    sample_interval: Annotated[Seconds, Meta(ge=0.05, le=2)] = 0.2
    """Between samples of the cheap fields: utilisation, memory, power, temperature."""
    process_interval: Annotated[Seconds, Meta(ge=0.5, le=5)] = 2.0
    """Between process lists, which cost milliseconds of the driver's lock each."""
    slow_interval: Annotated[Seconds, Meta(ge=1, le=30)] = 15.0
    """Between identity, ECC, remapped rows and counters of links, which change slowly."""
    call_deadline: Annotated[Seconds, Meta(ge=0.1, le=60)] = 2.0
    """A driver call past this counts as hung: the child is killed, the card is blind."""
    retry_max: Annotated[Seconds, Meta(ge=1, le=3600)] = 60.0
    """Longest pause between attempts to reach a driver or card that does not answer."""


class Enforce(msgspec.Struct, frozen=True):
    """What may be changed at all in mode enforce, so that an operator can begin with one family."""

    families: tuple[Family, ...] | None = None
    """Of all others it is only said what would be done, overrides included; leave out for all."""


class Found(msgspec.Struct, frozen=True):
    """GPU processes that no tenant below claims."""

    sla: Sla = Level.L3
    """Their service level."""
    hold_back: bool = False
    """Whether they may be held back at all; otherwise they are only observed."""
    table_interval: Annotated[Seconds, Meta(ge=1, le=60)] = 10.0
    """Between full readings of the process table; events report changes sooner."""


class Backpressure(msgspec.Struct, frozen=True):
    """When and how far the less important are held back."""

    memory_high: Ratio = 0.85
    """Share of a card's memory in use above which growth is a cause."""
    memory_clear: Ratio = 0.80
    """Share at which that cause ends."""
    memory_growth: Annotated[Bytes, Meta(gt=0)] = 32 * 1024**2
    """Growth within the last ten seconds that counts as growing; a steady card is no cause."""
    temperature_high: Celsius = 80.0
    """Die temperature in degrees Celsius that is a cause."""
    temperature_clear: Celsius = 75.0
    """Temperature at which that cause ends."""
    cpu_pressure_high: Ratio = 0.40
    """Share of time in which tasks wait for a CPU (PSI some avg10) that is a cause ..."""
    cpu_busy: Ratio = 0.90
    """... if the CPUs are this busy too; waiting for a quota is no shortage of CPUs."""
    cpu_pressure_clear: Ratio = 0.25
    """Share of waiting at which that cause ends."""
    latency_high: Ratio = 0.90
    """Share of its latency objective at which an L1 tenant's latency is a cause."""
    latency_clear: Ratio = 0.75
    """Share of the objective at which that cause ends."""
    hold: Seconds = 2.0
    """A condition must have held for this long ..."""
    within: Seconds = 3.0
    """... of this long before it is a cause."""
    control: Literal["aimd", "pi"] = "aimd"
    """aimd cuts fast and probes its way back; pi holds a cause midway between its two marks."""
    pi_gain: Annotated[float, Meta(gt=0, le=10)] = 0.3
    """pi: share taken for each 100 % that a value rises over that middle."""
    pi_time: Annotated[Seconds, Meta(ge=1)] = 15.0
    """pi: a value that stays over it takes as much again in this time (integral time)."""
    cut: Annotated[Ratio, Meta(gt=0, lt=1)] = 0.7
    """A share is multiplied by this at each cut."""
    dwell: Annotated[Seconds, Meta(ge=0.5)] = 5.0
    """Least time between two cuts of one tenant."""
    recover: Annotated[Ratio, Meta(gt=0)] = 0.2
    """How much share comes back per dwell once the cause has ended."""
    margin: Annotated[Ratio, Meta(gt=0, lt=1)] = 0.05
    """Recovery pauses this far under the share at which trouble began."""
    probe_min: Annotated[Seconds, Meta(ge=1)] = 30.0
    """First pause before that share is tried again ..."""
    probe_max: Annotated[Seconds, Meta(ge=1)] = 600.0
    """... which doubles up to this while trouble comes back."""
    time_box: Annotated[Seconds, Meta(ge=1)] = 30.0
    """A lever at its floor that has not eased the cause for this long is let go."""
    ineffective_for: Annotated[Seconds, Meta(ge=1)] = 600.0
    """It is then not used again for that tenant and cause for this long."""
    io_pressure_high: Ratio = 0.40
    """Share of time in which tasks wait for disks (PSI some) from which io.weight can help."""
    min_cores: Cores = 0.1
    """cpu.max is never set below this many cores."""
    cpu_period: Annotated[Seconds, Meta(ge=0.001, le=1)] = 0.02
    """Period of cpu.max: short, so that a held thread is not parked for long."""


class Power(msgspec.Struct, frozen=True):
    """Power budget of all GPUs together."""

    budget: Annotated[Watts, Meta(gt=0)] | None = None
    """Watts for all cards together; leave out for none."""
    panel: Annotated[Watts, Meta(gt=0)] | None = None
    """Rating of the rack panel, of which budget_fraction is the budget."""
    budget_fraction: Annotated[Ratio, Meta(gt=0)] | None = None
    """Share of panel that these GPUs may use."""
    dwell: Annotated[Seconds, Meta(ge=1)] = 10.0
    """Least time between two changes of one card's limit, safety cuts excepted."""
    headroom: Annotated[Ratio, Meta(lt=1)] = 0.10
    """A card asks for its demand and this much more."""
    keep_on_stop: bool = False
    """Whether limits that serve the budget stay when the agent is stopped."""

    @property
    def budget_watts(self) -> float | None:
        """The budget in force; None for none."""
        if self.budget is not None:
            return self.budget
        if self.panel is not None and self.budget_fraction is not None:
            return self.panel * self.budget_fraction
        return None


class Efficiency(msgspec.Struct, frozen=True):
    """Less energy for the same work, on cards with nothing but L2 and L3 training."""

    enabled: bool = False
    """Whether such a card's power limit is moved to where its work costs the least energy."""
    slowdown: Annotated[Ratio, Meta(gt=0, lt=1)] = 0.05
    """How much slower its work may become at most."""
    settle: Annotated[Seconds, Meta(ge=5)] = 60.0
    """How long each limit is measured before it is judged."""


class Freeze(msgspec.Struct, frozen=True):
    """Freezing in pulses (levers "freeze"): no memory comes free, and collectives may time out."""

    pulse: Annotated[Seconds, Meta(ge=0.01, le=2)] = 0.5
    """Longest time for which a tenant is frozen at a stretch."""


class Suspend(msgspec.Struct, frozen=True):
    """Suspending (lever "suspend"): connections of the tenant to others may break."""

    command: Annotated[str, Meta(max_length=4095)] = "cuda-checkpoint"
    """NVIDIA's cuda-checkpoint: a path, or a name to look for in PATH."""
    lock_timeout: Annotated[Seconds, Meta(ge=1, le=300)] = 10.0
    """How long a process may take to come to rest before it is left alone."""
    deadline: Annotated[Seconds, Meta(ge=1, le=3600)] = 60.0
    """How long one suspension or resumption may take in all."""


class Terminate(msgspec.Struct, frozen=True):
    """Ending processes (lever "terminate"): what they have not saved is lost."""

    grace: Annotated[Seconds, Meta(ge=0, le=3600)] = 30.0
    """Between SIGTERM and SIGKILL."""


class MpsGroup(msgspec.Struct, frozen=True):
    """A CUDA MPS control daemon: one that runs already, or one of the agent's own."""

    name: GroupName
    """Its name in API, metrics and logs."""
    pipe_directory: AbsolutePath = "/tmp/nvidia-mps"  # noqa: S108 - the daemon's own default
    """CUDA_MPS_PIPE_DIRECTORY of the daemon and its clients."""
    gpus: tuple[GpuName, ...] = ()
    """Its cards, by UUID: needed where the agent starts it. A client connects to one daemon only."""
    own: bool = False
    """Whether the agent starts it, in a unit of its own that outlives the agent; never ended under clients."""
    default_threads: Annotated[Ratio, Meta(gt=0)] | None = None
    """Ceiling on each client's multiprocessors; only where all its tenants are L2 or L3."""


class Mps(msgspec.Struct, frozen=True):
    """CUDA MPS: what limits a tenant's multiprocessors, from its next launch on."""

    control: Annotated[str, Meta(max_length=4095)] = "nvidia-cuda-mps-control"
    """The control program: a path, or a name to look for in PATH."""
    groups: tuple[MpsGroup, ...] = ()
    """The daemons to know. Each begins with its own [[mps.groups]] line."""


class Card(msgspec.Struct, frozen=True):
    """Settings of a card that are kept as declared, and put back when the agent ends."""

    gpu: GpuName
    """UUID, or a pattern of UUIDs; the first [[cards]] that fits counts."""
    compute_mode: Literal["", "default", "exclusive_process", "prohibited"] = ""
    """Who may have a context; empty to leave it."""
    persistence_mode: bool | None = None
    """Whether the driver keeps the card initialised; leave out to leave it."""
    time_slice: Literal["", "default", "short", "medium", "long"] = ""
    """How long a process has the card, by nvidia-smi compute-policy; empty to leave it."""
    clock_unlocked: bool = False
    """Whether its clocks are known to be unlocked, so that they may be: no call reads a lock back."""


class Launch(msgspec.Struct, frozen=True):
    """Who may start tenants of which level with `gpuagent run`; root and api.group may any."""

    user: Annotated[str, Meta(max_length=64)] = ""
    """User name; empty for any that is in the group."""
    group: Annotated[str, Meta(max_length=64)] = ""
    """Group name; empty for any."""
    sla: tuple[Sla, ...] = (Level.L3,)
    """Levels that they may start."""


class Run(msgspec.Struct, frozen=True):
    """`gpuagent run`."""

    slice: Annotated[
        str,
        Meta(max_length=128, pattern=r"^[a-z][a-z0-9-]*\.slice$", extra={"quantity": "slice"}),
    ] = "gpuagent-tenants.slice"
    """Slice in which its scopes are."""
    devices: tuple[Word, ...] = ()
    """Device nodes they may open beside their cards: /dev/fuse, char-infiniband_verbs."""
    allow: tuple[Launch, ...] = ()
    """Others who may. Each begins with its own [[run.allow]] line."""


class LevelRule(msgspec.Struct, frozen=True):
    """What holds for every tenant of this level that does not say otherwise."""

    hours: tuple[Hours, ...] = ()
    """Local times in which it may use all it gets, such as "23:00-06:00"; [] for always."""
    off_hours_share: Ratio | None = None
    """The most it may have at other times; leave out for its floor."""
    memory_reserved: Annotated[Bytes, Meta(gt=0)] | None = None
    """Device memory on each card with such a tenant that lower levels must leave to them."""


class Levels(msgspec.Struct, frozen=True):
    """By service level."""

    L1: LevelRule = LevelRule()
    """L1, latency-critical."""
    L2: LevelRule = LevelRule()
    """L2, batch."""
    L3: LevelRule = LevelRule()
    """L3, best effort."""

    def of(self, level: Level) -> LevelRule:
        return {Level.L1: self.L1, Level.L2: self.L2, Level.L3: self.L3}[level]


class LatencySource(msgspec.Struct, frozen=True):
    """A Prometheus endpoint of the tenant's own."""

    url: Annotated[str, Meta(max_length=2048, extra={"quantity": "url"})]
    """Address of its metrics: http://127.0.0.1:8000/metrics."""
    metric: Annotated[
        str,
        Meta(max_length=256, pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$", extra={"quantity": "metric"}),
    ]
    """A histogram or a summary: vllm:e2e_request_latency_seconds."""
    labels: tuple[LabelPair, ...] = ()
    """Only series with these labels, each as name=value: "model_name=llama"."""
    unit: Literal["seconds", "milliseconds", "microseconds"] = "seconds"
    """What the metric counts in."""
    window: Annotated[Seconds, Meta(ge=2, le=600)] = 30.0
    """Over how long a histogram's requests are counted."""
    interval: Annotated[Seconds, Meta(ge=0.5, le=10)] = 2.0
    """Between two scrapes, each of which may take as long; not more than window."""


class Match(msgspec.Struct, frozen=True):
    """What a process must show: all that is given. Shell-style patterns."""

    unit: Pattern = ""
    """systemd service or scope: triton.service, train-*.scope."""
    cgroup: Pattern = ""
    """cgroup path: /system.slice/batch-*."""
    container: Pattern = ""
    """Container id, whole or a pattern."""
    pod: Pattern = ""
    """Pod UID."""
    slurm_job: Pattern = ""
    """Slurm job id."""
    user: Pattern = ""
    """User name or number; inside containers, pods and jobs only beside a match of these."""
    exe: Pattern = ""
    """Path of the executable; inside containers, pods and jobs only beside a match of these."""


class TenantRule(msgspec.Struct, frozen=True):
    """A tenant. Rules that name a place come before those with only user or exe; then the first."""

    name: Name
    """Its name in API, metrics and logs."""
    sla: Sla
    """L1 latency-critical, L2 batch, L3 best effort."""
    match: Match
    """Which processes are its own."""
    kind: Kind = ""
    """training, inference, interactive or idle, where it is known."""
    hold_back: bool = True
    """Whether it may be held back (never for L1)."""
    min_share: Annotated[Ratio, Meta(ge=0.05)] = 0.2
    """It is never held back below this share."""
    memory_limit: Annotated[Bytes, Meta(gt=0)] | None = None
    """Device memory it may use on one card: reported, and of its level the first held back above it."""
    latency_slo: Annotated[Seconds, Meta(gt=0)] | None = None
    """Objective for the latency it reports itself; it is protected for L1, else only shown."""
    latency_quantile: Annotated[Ratio, Meta(gt=0, lt=1)] = 0.99
    """Quantile of that latency: 0.99 for p99."""
    latency_from: LatencySource | None = None
    """Where to read that latency; where the tenant reports it too, the newer counts."""
    observe: bool = False
    """Whether it is only said what would be done to this tenant."""
    levers: tuple[Lever, ...] = ("notice", "cpu_weight", "io_weight", "cpu_max", "mps")
    """What may be used to hold it back; freeze, suspend and terminate only if named here."""
    notice_signal: Signal = ""
    """Sent to each of its processes that catches it when it begins to be held back."""
    notice_command: tuple[Word, ...] = ()
    """Run as the tenant's user then, for ten seconds at most: ["/opt/job/checkpoint", "--now"].

    It has the sandbox of the agent's unit: nothing that compiles at run time (MemoryDenyWriteExecute), gains
    rights (sudo) or opens other than UNIX, IP and netlink sockets, unless a drop-in relaxes it.
    """
    hours: tuple[Hours, ...] | None = None
    """Local times in which it may use all it gets; leave out for those of its level."""
    off_hours_share: Ratio | None = None
    """The most it may have at other times; leave out for its floor."""
    memory_reserved: Annotated[Bytes, Meta(gt=0)] | None = None
    """Device memory on each of its cards that lower levels must leave to it."""
    compute_share: Annotated[Ratio, Meta(gt=0)] | None = None
    """Part of a card's multiprocessors its next MPS client may use at most."""
    mps_contexts: Annotated[int, Meta(ge=1, le=60)] | None = None
    """MPS client contexts it may have on one card: reported."""
    power_cap: Annotated[Watts, Meta(gt=0)] | None = None
    """Power limit of each card that it has to itself."""
    host_memory_high: Annotated[Bytes, Meta(ge=1024**2)] | None = None
    """memory.high, where it has one control group and that to itself: above it the tenant is slowed."""
    host_memory_max: Annotated[Bytes, Meta(ge=1024**2)] | None = None
    """memory.max there: beyond it the kernel ends a process; not set below what is in use."""


class Config(msgspec.Struct, frozen=True):
    """The whole file."""

    mode: Literal["observe", "enforce"] = "observe"
    """observe changes nothing and says what it would do; enforce does it."""
    tick: Annotated[Seconds, Meta(ge=0.1, le=2)] = 1.0
    """Between two passes of the control loop; events make one come sooner."""
    paths: Paths = Paths()
    api: Api = Api()
    log: Log = Log()
    nvml: Nvml = Nvml()
    enforce: Enforce = Enforce()
    found: Found = Found()
    levels: Levels = Levels()
    backpressure: Backpressure = Backpressure()
    power: Power = Power()
    efficiency: Efficiency = Efficiency()
    freeze: Freeze = Freeze()
    suspend: Suspend = Suspend()
    terminate: Terminate = Terminate()
    mps: Mps = Mps()
    cards: tuple[Card, ...] = ()
    run: Run = Run()
    tenants: tuple[TenantRule, ...] = ()

    def card(self, uuid: str) -> Card | None:
        """What is declared of a card: the first entry that fits; None for nothing."""
        return next((c for c in self.cards if fnmatchcase(uuid, c.gpu)), None)

    def clock_unlocked(self, uuid: str) -> bool:
        """Whether the clocks of a card are declared unlocked."""
        card = self.card(uuid)
        return card is not None and card.clock_unlocked

    def level(self, tenant: str) -> Level:
        """Service level of a tenant by its name: its rule's, or that of those without a rule."""
        rule = next((t for t in self.tenants if t.name == tenant), None)
        return self.found.sla if rule is None else rule.sla
