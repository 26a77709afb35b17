"""Asks the agent over its Unix sockets: HTTP by the standard library, without an event loop."""

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from gpuagent.cli.exits import Exit, Failure
from gpuagent.expose.sockets import admin_path

_ANSWER_SECONDS = 40.0
"""Longer than the agent itself waits for a command (30 s)."""
_BUSY_SECONDS = 5.0
"""How long to try while others fill the queue of connections."""
_AGAIN_SECONDS = 0.005
_PAGE = 200

Document = dict[str, Any]

_EXIT_OF_STATUS = {
    403: Exit.FORBIDDEN,
    409: Exit.REFUSED,
    422: Exit.USAGE,
    501: Exit.REFUSED,
    503: Exit.UNREACHABLE,
}
"""Whatever is not named is a PROBLEM."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, patience: float) -> None:
        super().__init__("localhost", timeout=patience)
        self._path = path
        self._patience = patience

    def connect(self) -> None:
        """Raises BlockingIOError while the queue of connections stays full, or another OSError."""
        beside = admin_path(self._path)
        if os.access(beside, os.W_OK):
            # Whoever owned it may be gone, or of a version that had no such socket.
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError, PermissionError):
                return self._connect(beside)
        return self._connect(self._path)

    def _connect(self, path: str) -> None:
        until = time.monotonic() + min(_BUSY_SECONDS, self._patience)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._patience)
        try:
            while True:
                try:
                    return self.sock.connect(path)
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(_AGAIN_SECONDS)
        except OSError:
            self.sock.close()
            raise


class Client:
    """The agent behind a socket path. Each method raises Failure with the exit code that fits."""

    def __init__(self, path: str, *, patience: float = _ANSWER_SECONDS) -> None:
        """`patience` is how many seconds an answer may take."""
        self._path = path
        self._patience = patience

    def get(self, target: str) -> Document:
        return self._ask("GET", target)

    def post(self, target: str, body: object = None) -> Document:
        """`body` is sent as JSON; None sends none."""
        return self._ask("POST", target, body)

    def put(self, target: str, body: object = None) -> Document:
        return self._ask("PUT", target, body)

    def delete(self, target: str, body: object = None) -> Document:
        return self._ask("DELETE", target, body)

    def items(self, target: str) -> Iterator[Document]:
        """All items of a paged list."""
        after = ""
        while True:
            page = self.get(f"{target}?limit={_PAGE}{after}")
            yield from page["items"]
            if page["next"] is None:
                return
            after = f"&after={quote(page['next'], safe='')}"

    def tenant(self, name: str, part: str = "") -> Document:
        """One tenant's document. Raises Failure with UNKNOWN_TENANT."""
        status, document = self._send("GET", f"/v1/tenants/{quoted(name)}{part}")
        if status == 404:
            raise Failure(
                Exit.UNKNOWN_TENANT,
                f'there is no tenant "{name}"',
                "`gpuagent tenants` lists those there are",
            )
        return self._checked(status, document)

    def _ask(self, method: str, target: str, body: object = None) -> Document:
        return self._checked(*self._send(method, target, body))

    def _checked(self, status: int, document: Document) -> Document:
        if status < 400:
            return document
        problems = "".join(f"\n{p}" for p in document.get("problems", ()))
        detail = str(document.get("detail", f"the agent answered {status}"))
        raise Failure(
            _EXIT_OF_STATUS.get(status, Exit.PROBLEM),
            problems.lstrip("\n") if problems else detail,
            str(document.get("remedy", "")),
        )

    def _send(self, method: str, target: str, body: object = None) -> tuple[int, Document]:
        content = None if body is None else json.dumps(body).encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        connection = _UnixConnection(self._path, self._patience)
        try:
            connection.request(method, target, content, headers)
            response = connection.getresponse()
            return response.status, _document(response.read())
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise Failure(
                Exit.UNREACHABLE,
                f"the agent does not run: nobody listens on {self._path}",
                "start it with `systemctl start gpuagent`, or name its socket with --socket",
            ) from None
        except PermissionError:
            raise Failure(
                Exit.FORBIDDEN, f"you may not open {self._path}", "ask an administrator"
            ) from None
        except BlockingIOError:
            raise Failure(
                Exit.UNREACHABLE,
                f"the agent is busy: others fill the queue of {self._path}",
                "try again; root and the group in [api] have a socket of their own",
            ) from None
        except TimeoutError:
            raise Failure(
                Exit.UNREACHABLE,
                f"the agent has not answered within {self._patience:.0f} s",
                "its log says why: `journalctl -u gpuagent`",
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failure(
                Exit.UNREACHABLE,
                f"what answers on {self._path} is not the agent, or it has just stopped ({error})",
                "try again, or name its socket with --socket",
            ) from None
        finally:
            connection.close()


def _document(body: bytes) -> Document:
    """Raises ValueError or HTTPException for anything but a JSON object."""
    document = json.loads(body)
    if not isinstance(document, dict):
        raise http.client.HTTPException("no JSON object")
    return document


def quoted(name: str) -> str:
    """A name as one step of a path."""
    # A name of dots alone would be taken for a step in the path.
    text = quote(name.encode("utf-8", "backslashreplace"), safe="")
    return text if text.strip(".") else text.replace(".", "%2E")
