"""`gpuagent check` asks the metrics that latencies are to be read from."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.stage import run
from tests.sense.pages import vllm

TENANT = """
[[tenants]]
name = "{name}"
sla = "L1"
match = {{ unit = "{name}.service" }}
latency_from = {{ url = "{url}", metric = "{metric}" }}
"""


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = vllm([0.4]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()
        thread.join()


def test_each_source_is_tried_and_its_trouble_told(tmp_path: Path, url: str) -> None:
    file = tmp_path / "gpuagent.toml"
    tenants = (
        ("chat", url, "vllm:e2e_request_latency_seconds"),
        ("wrong", url, "vllm:num_requests_running"),
        ("gone", "http://127.0.0.1:1/metrics", "x"),
    )
    file.write_text(
        f'[paths]\nnvml_library = "{tmp_path}/none.so"\n'
        + "".join(TENANT.format(name=n, url=u, metric=m) for n, u, m in tenants)
    )
    document = json.loads(run("check", "--json", "--config", str(file)).stdout)
    found = {o["name"]: o for o in document["offers"]}
    assert found["latency of chat"]["state"] == "ok"
    assert found["latency of wrong"]["state"] == "missing"
    assert "vllm:num_requests_running is a gauge" in found["latency of wrong"]["what"]
    assert "cannot be reached" in found["latency of gone"]["what"]
    assert "latency_from of gone" in found["latency of gone"]["remedy"]
    assert not found["latency of gone"]["needed"]
