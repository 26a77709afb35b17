"""The few errors the agent knows, translated at the border and caught by name."""

from collections.abc import Iterable


class AgentError(Exception):
    """Anything the agent raises on purpose. Its text is for the operator."""


class Gone(AgentError):
    """The target has ceased to exist (process exited, cgroup removed, card lost). Not a failure."""


class Unsupported(AgentError):
    """This host, driver or card cannot do it, and asking again will not help."""


class Refused(AgentError):
    """It could be done, but not by us or not now: permission, range, a read-only mount, a full disk."""


class Forbidden(AgentError):
    """Whoever asks may not have it."""


class Unavailable(AgentError):
    """No answer: the worker is down, the call is past its deadline. Asking again may help."""


class NoRoom(Unavailable):
    """It needs memory that others hold."""


class Corrupt(AgentError):
    """A file of ours cannot be trusted as it stands (state directory unreadable, wrong version)."""


class ConfigError(AgentError):
    """The configuration has problems: all of them, one a line, each with its file and line."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
