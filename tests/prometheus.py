"""A real Prometheus on loopback that scrapes a server of ours, and what can be asked of it."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
NONE_HERE = "prometheus and promtool (Debian: prometheus) are not installed"

_CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 250ms}}
rule_files: {rules}
scrape_configs:
  - job_name: gpuagent
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
    {how}
  - job_name: gpuagent-dcgm
    metrics_path: /metrics/dcgm
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
    {how}
"""
_SCRAPES = 2
"""Enough for a rate."""


class Prometheus:
    """One that runs."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def query(self, text: str) -> list[dict[str, Any]]:
        """The result of an instant query. Fails the test where the query is refused."""
        data = await self._get("query", {"query": text})
        assert data["resultType"] in {"vector", "matrix"}, (text, data)
        result: list[dict[str, Any]] = data["result"]
        return result

    async def label_values(self, metric: str, label: str) -> list[str]:
        """What Grafana's `label_values(metric, label)` asks."""
        found: list[str] = await self._get(f"label/{label}/values", {"match[]": metric})
        return found

    async def rules(self) -> list[dict[str, Any]]:
        groups = (await self._get("rules", {}))["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def until_scraped(self) -> None:
        """Wait until every target has been scraped often enough for a rate, and rules have run."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                counts = await self.query("sum_over_time(up[1m])")
                known = [float(c["value"][1]) for c in counts]
                ran = all(r["lastEvaluation"][0] != "0" for r in await self.rules())
                if len(known) == 2 and min(known) >= _SCRAPES and ran:
                    return
            await asyncio.sleep(0.2)
        raise AssertionError("Prometheus has not scraped the server within a minute")

    async def _get(self, what: str, values: dict[str, str]) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(values)}"

        def fetch() -> Any:
            try:
                with urllib.request.urlopen(url, timeout=10) as reply:
                    return json.load(reply)["data"]
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == 503:  # it listens before it is ready
                        raise ConnectionError("not ready") from None
                    raise AssertionError(f"{values}: {error.read().decode()}") from None

        return await asyncio.to_thread(fetch)


@contextlib.asynccontextmanager
async def watching(
    port: int, folder: Path, *rules: Path, how: str = "", program: str | None = PROMETHEUS
) -> AsyncIterator[Prometheus]:
    """Prometheus over the loopback server at `port`; its files are in `folder`.

    `how` has lines of a scrape configuration, such as its scheme and its credentials.
    """
    assert program is not None
    config = folder / "prometheus.yml"
    names = json.dumps([str(r) for r in rules])
    config.write_text(
        _CONFIG.format(rules=names, port=port, how=how.replace("\n", "\n    ")), encoding="utf-8"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
        env={**os.environ, "GOMAXPROCS": "1"},
    )
    try:
        watcher = Prometheus(address)
        await watcher.until_scraped()
        yield watcher
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'')
_LABELS = re.compile(
    r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"
)
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan", "by", "without", "on", "ignoring"}


def metrics_in(query: str) -> set[str]:
    """Names of the metrics that a PromQL query reads."""
    bare = _LABELS.sub(" ", _STRING.sub('""', query))
    found = re.findall(r"(?<![\w:$])[a-zA-Z_:][\w:]*(?![\w:])(?!\s*\()", bare)
    return {name for name in found if name.lower() not in _WORDS}
