"""The running agent reads a tenant's latency from a page of its own, and says when it cannot."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sense.pages import vllm
from tests.stage import until
from tests.whole.conftest import Host


class Service:
    """What the tenant publishes, as the test wants it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.status = 200
        self.asked = 0
        service = self

        class Page(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                service.asked += 1
                body = vllm(service.seconds).encode()
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"


@pytest.fixture
def service() -> Iterator[Service]:
    one = Service()
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


def source(service: Service) -> str:
    return f"""latency_slo = "1s"
[tenants.latency_from]
url = "{service.url}"
metric = "vllm:e2e_request_latency_seconds"
interval = "500ms"
window = "10s"
"""


def test_it_is_read_told_and_no_longer_read_after_a_reload(host: Host, service: Service) -> None:
    host.stage.configure(host.serve_rule + source(service) + host.stage.rule("train", "L3"))
    daemon = host.run()

    def explained() -> Any:
        host.work()
        return daemon.client.explain("serve")

    def read() -> Any:
        service.seconds.append(0.4)
        return explained()["row"]["latency_seconds"]

    assert 0.3 < until("its latency is read", read, seconds=30) <= 0.5
    told = explained()
    assert told["latency_source"]["up"] is True
    assert told["latency_source"]["url"] == service.url
    [estimated] = [r for r in told["readings"] if r["name"] == "tenant_latency_seconds"]
    assert estimated["estimated"]

    def missed() -> bool:
        service.seconds += [2.2] * 5
        causes = explained()["causes"]
        return any(c["kind"] == "latency" for c in causes)

    until("a latency over its objective is a cause", missed, seconds=30)

    service.status = 503
    until("the source is down", lambda: explained()["latency_source"]["up"] is False, seconds=30)
    assert explained()["latency_source"]["why"] == "answers 503"
    assert daemon.client.get("/v1/health")["latency_sources_down"] == 1

    host.stage.configure(host.rules)
    daemon.client.post("/v1/reload")
    until("no source is left", lambda: explained()["latency_source"] is None, seconds=30)
    assert daemon.client.get("/v1/health")["latency_sources"] == 0
    asked = service.asked
    host.idle(1.5)
    assert service.asked == asked
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
