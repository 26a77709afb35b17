"""What the running agent tells as it happens, what it is told, and what it remembers of before."""

import json
import time
from collections.abc import Iterator
from typing import Any

from tests.expose.certificates import make, needs_openssl
from tests.stage.client import _Connection
from tests.whole.conftest import Host


class Stream:
    """Events of a running agent, as `curl -N` would get them."""

    def __init__(self, host: Host, last: str = "") -> None:
        self._connection = _Connection(str(host.stage.folder / "agent.sock"), 20)
        headers = {"Last-Event-ID": last} if last else {}
        self._connection.request("GET", "/v1/events/stream", headers=headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self.last = last

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        kind = ""
        for line in self._response:
            field, _, value = line.decode("ascii").rstrip("\n").partition(": ")
            if field == "id":
                self.last = value
            elif field == "event":
                kind = value
            elif field == "data":
                yield kind, json.loads(value)

    def until(self, wanted: str) -> Any:
        """The data of the next event of a kind."""
        return next(data for kind, data in self if kind == wanted)

    def close(self) -> None:
        self._connection.close()


def push(host: Host, seconds: float) -> int:
    connection = _Connection(str(host.stage.folder / "agent.sock"), 10)
    try:
        body = json.dumps({"quantile": 0.99, "seconds": seconds})
        connection.request("PUT", "/v1/tenants/serve/latency", body)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_tenant_is_told_what_it_is_left_and_the_audit_log_outlives_the_run(host: Host) -> None:
    daemon = host.run()
    stream = Stream(host)
    host.press()
    cut = stream.until("share-cut")
    assert cut["tenant"] == "train"
    assert 0 < cut["numbers"]["share_ratio"] < 1
    assert "usual activity" in cut["text"]

    begun = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - begun < 10, "an open stream does not hold up the end"
    assert list(stream)[-1] == ("end", {"why": "the agent stops"})
    stream.close()

    again = host.stage.daemon().ready()
    resumed = Stream(host, last=stream.last)
    assert next(iter(resumed)) == ("missed", {"events": None})
    resumed.close()
    did = [a["did"] for a in again.client.get("/v1/audit")["items"] if a["tenant"] == "train"]
    assert did[0] == "put back", "newest first"
    assert "set" in did


def test_a_latency_that_is_pushed_is_in_the_metrics(host: Host) -> None:
    daemon = host.run()
    assert push(host, 0.087) == 202
    host.idle(1.2)
    line = next(
        x
        for x in daemon.client.text("/metrics").splitlines()
        if x.startswith("gpuagent_tenant_latency_seconds{")
    )
    assert line.endswith(" 0.087")
    assert 'tenant="serve"' in line


@needs_openssl
def test_a_reload_says_what_the_network_listener_lacks(host: Host) -> None:
    certificate, key = make(host.stage.folder)
    text = host.stage.config.read_text()
    pair = f'tls_certificate = "{certificate}"\ntls_key = "{key}"\n'
    host.stage.config.write_text(
        text.replace("[api]\n", f'[api]\nnetwork_listen = "127.0.0.1:0"\n{pair}')
    )
    host.stage.daemon().ready()
    well = host.stage.command("reload")
    assert (well.returncode, "network" in well.stdout) == (0, False), well.stdout
    certificate.write_text("garbage")
    said = " ".join(host.stage.command("reload").stdout.split())
    assert "is in force; but the network listener: its certificate cannot be used" in said


def test_run_gives_a_command_what_the_agent_says(host: Host) -> None:
    daemon = host.run()
    done = host.stage.command("run", "--tenant", "serve", "--", "env")
    assert "CUDA_MPS_CLIENT_PRIORITY=0\n" in done.stdout
    assert f"GPUAGENT_SOCKET={host.stage.folder / 'agent.sock'}\n" in done.stdout
    assert done.stderr == ""
    assert daemon.stop() == 0
    done = host.stage.command("run", "--tenant", "serve", "--", "echo", "here")
    assert (done.returncode, done.stdout) == (0, "here\n")
    assert "warning" in done.stderr
