"""Which tools a configuration asks for, and who is found sharing an MPS server with an L1 tenant."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from gpuagent.cli.tools import mixed, needs
from gpuagent.config import Card, Config, Match, Mps, MpsGroup, TenantRule
from gpuagent.host import tools
from gpuagent.model.inventory import Level, MpsClient, MpsDaemon, MpsServer
from tests.cli.stage import run

BASE = TenantRule("a", Level.L3, Match(user="a"))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (Config(), set()),
        (Config(tenants=(BASE,)), set()),
        (
            Config(tenants=(TenantRule("a", Level.L3, Match(user="a"), levers=("suspend",)),)),
            {tools.CHECKPOINT},
        ),
        (
            Config(tenants=(TenantRule("a", Level.L3, Match(user="a"), levers=("freeze",)),)),
            {tools.FREEZER},
        ),
        (Config(cards=(Card("*", time_slice="long"),)), {tools.NVIDIA_SMI}),
        (Config(cards=(Card("*", persistence_mode=True),)), set()),
        (Config(mps=Mps(groups=(MpsGroup("g"),))), {tools.MPS, "MPS group g"}),
        (Config(mps=Mps(groups=(MpsGroup("g", own=True, gpus=("GPU-1",)),))), {tools.MPS}),
    ],
)
def test_what_is_asked_for(config: Config, wanted: set[str]) -> None:
    assert needs(config) == wanted


def test_check_tells_of_a_tool_that_a_rule_needs(tmp_path: Path) -> None:
    file = tmp_path / "gpuagent.toml"
    file.write_text(
        f'[paths]\nnvml_library = "{tmp_path}/none.so"\n'
        f'[suspend]\ncommand = "{tmp_path}/cuda-checkpoint"\n'
        '[[tenants]]\nname = "a"\nsla = "L3"\nmatch = { user = "a" }\nlevers = ["suspend"]\n'
        f'[[mps.groups]]\nname = "g"\npipe_directory = "{tmp_path}/p"\n'
    )
    found = {
        o["name"]: o
        for o in json.loads(run("check", "--json", "--config", str(file)).stdout)["offers"]
    }
    assert found["cuda-checkpoint"]["needed"] is True
    assert found["cuda-checkpoint"]["state"] == "missing"
    assert "NVIDIA/cuda-checkpoint" in found["cuda-checkpoint"]["remedy"]
    assert found["MPS group g"]["needed"] is True
    assert found["MPS group g"]["state"] == "missing"
    assert found["nvidia-smi"]["needed"] is False
    # Whether or not a rule asks for it, the words fit.
    assert found["cuda-checkpoint"]["what"].endswith('; needed only for the lever "suspend"')
    assert found["cgroup.freeze"]["what"].endswith('the lever "freeze"')
    assert "no MPS control daemon runs" in found["MPS group g"]["what"] or (
        found["MPS control"]["what"].endswith("; needed only for daemons in [[mps.groups]]")
    )


def test_check_tells_how_a_daemon_of_our_own_comes_up(tmp_path: Path) -> None:
    file = tmp_path / "gpuagent.toml"
    group = f'[[mps.groups]]\nname = "g"\npipe_directory = "{tmp_path}/p"\nown = true\ngpus = ["GPU-1"]\n'
    remedies = []
    for mode in ("observe", "enforce"):
        file.write_text(
            f'mode = "{mode}"\npaths.nvml_library = "{tmp_path}/none.so"\n{group}',
        )
        offers = json.loads(run("check", "--json", "--config", str(file)).stdout)["offers"]
        [offer] = [o for o in offers if o["name"] == "MPS group g"]
        assert (offer["state"], offer["needed"]) == ("partial", False)
        assert offer["what"] == f"no MPS control daemon runs in {tmp_path}/p"
        remedies.append(offer["remedy"].partition(":")[0])
    assert remedies == ['set mode = "enforce"', "start the agent"]


def test_an_l1_that_shares_a_server_is_told() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        own = os.path.realpath("/proc/self/exe")
        sleeper = os.path.realpath(f"/proc/{other.pid}/exe")
        config = Config(
            tenants=(
                TenantRule("serve", Level.L1, Match(exe=own)),
                TenantRule("train", Level.L3, Match(exe=sleeper)),
            )
        )
        clients = (MpsClient(os.getpid(), 7), MpsClient(other.pid, 7), MpsClient(1 << 22, 8))
        servers = (MpsServer(7), MpsServer(8))
        together = MpsDaemon("g", up=True, servers=servers, clients=clients)
        apart = MpsDaemon("g", up=True, servers=servers, clients=clients[::2])
        try:
            assert list(mixed(config, together)) == ["serve (L1) shares server 7 with train (L3)"]
            assert list(mixed(config, apart)) == []
        finally:
            other.kill()
