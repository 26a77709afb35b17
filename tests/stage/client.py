"""The API over its Unix socket, as a test asks it: the standard library and nothing of ours."""

import http.client
import json
import socket
from typing import Any
from urllib.parse import quote


class ApiError(Exception):
    """A problem document."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(f"{status}: {problem.get('detail') or problem}")
        self.status = status
        self.problem = problem


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """One request a connection."""

    def __init__(self, socket_path: str, *, timeout: float = 10.0) -> None:
        self._path = socket_path
        self._timeout = timeout

    def text(self, path: str, method: str = "GET", body: str = "") -> str:
        """`body` is JSON, or nothing."""
        connection = _Connection(self._path, self._timeout)
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            body = response.read().decode()
        finally:
            connection.close()
        if response.status >= 400:
            raise ApiError(response.status, json.loads(body))
        return body

    def get(self, path: str) -> Any:
        return json.loads(self.text(path))

    def post(self, path: str) -> Any:
        return json.loads(self.text(path, "POST"))

    def explain(self, tenant: str) -> Any:
        return self.get(f"/v1/tenants/{quote(tenant, safe='')}/explanation")
