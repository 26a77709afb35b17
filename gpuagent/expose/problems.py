"""Problem documents (RFC 9457), and the one table from the agent's errors to HTTP status."""

import http
from typing import NoReturn

import msgspec

from gpuagent.errors import (
    AgentError,
    ConfigError,
    Corrupt,
    Forbidden,
    Gone,
    Refused,
    Unavailable,
    Unsupported,
)

MEDIA_TYPE = "application/problem+json"

STATUS: tuple[tuple[type[AgentError], int], ...] = (
    (Gone, 404),
    (Forbidden, 403),
    (Refused, 409),
    (ConfigError, 422),
    (Corrupt, 500),
    (Unsupported, 501),
    (Unavailable, 503),
)
"""First match counts; any other error of ours is a fault of the agent (500)."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """What went wrong, for people and programs. `type` is about:blank: the status says the kind."""

    title: str
    status: int
    detail: str
    remedy: str = ""
    """What to do about it."""
    problems: tuple[str, ...] = ()
    """All problems of a configuration, each with its file and line."""


class Trouble(AgentError):
    """A request that cannot be answered as asked."""

    def __init__(self, status: int, detail: str, remedy: str = "", retry_after: int = 0) -> None:
        self.status = status
        self.detail = detail
        self.remedy = remedy
        self.retry_after = retry_after
        """Seconds for the Retry-After header; 0 for none."""
        super().__init__(detail)

    def problem(self) -> Problem:
        return Problem(title(self.status), self.status, self.detail, self.remedy)


def title(status: int) -> str:
    """The standard phrase of a status code, as about:blank wants it."""
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def of(error: AgentError) -> Problem:
    """The problem document of an error of ours."""
    if isinstance(error, Trouble):
        return error.problem()
    status = next((s for kind, s in STATUS if isinstance(error, kind)), 500)
    problems = error.problems if isinstance(error, ConfigError) else ()
    return Problem(title(status), status, str(error), problems=problems)


def not_found(what: str, remedy: str) -> NoReturn:
    raise Trouble(404, what, remedy)
