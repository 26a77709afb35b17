"""A child process with unmodified pynvml, which evaluates what a test sends it."""

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest

UNINITIALIZED, INVALID, UNSUPPORTED, NO_PERMISSION, NOT_FOUND, TOO_SMALL = 1, 2, 3, 4, 6, 7
NOT_LOADED, TIMEOUT, NO_FUNCTION, LOST, RESET, MISMATCH = 9, 10, 13, 15, 16, 18
IN_USE, DEPRECATED = 19, 26

SECOND = 1_000_000
START = 1_000 * SECOND
"""Where the tests' clock begins."""

_CHILD = '''
import ctypes, os, pickle, sys, threading, time
import pynvml as p

replies = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
gpu = p.nvmlDeviceGetHandleByIndex
mig = lambda i, j: p.nvmlDeviceGetMigDeviceHandleByIndex(gpu(i), j)
scope = dict(globals())

def plain(value):
    """What can be sent home of what pynvml gives."""
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, p.nvmlFriendlyObject):
        return {name: plain(entry) for name, entry in vars(value).items()}
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(entry) for entry in value]
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, ctypes.c_void_p).value
    return value.decode() if isinstance(value, bytes) else value

def evaluate(environment, code):
    os.environ.update(environment)
    *before, last = code.strip().splitlines()
    exec("\\n".join(before), scope)
    return plain(eval(last, scope))

while True:
    try:
        request = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        reply = (0, evaluate(*request))
    except p.NVMLError as error:
        reply = (error.value, str(error))
    except BaseException as error:
        reply = (-1, repr(error))
    pickle.dump(reply, replies)
    replies.flush()
'''


class NvmlError(Exception):
    """What pynvml raised in the child."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Client:
    """``client("p.nvmlDeviceGetName(gpu(0))")``; several lines are executed, the last evaluated.

    In scope: ``p`` (pynvml), ``gpu(index)`` and ``mig(index, number)`` (handles), and what earlier
    calls assigned. Raises NvmlError, and RuntimeError for anything else.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment},
            cwd=Path(__file__).parents[3],
        )
        self._update: dict[str, str] = {}

    def __call__(self, code: str) -> Any:
        self.send(code)
        return self.receive()

    def send(self, code: str) -> None:
        """Ask without waiting for the answer."""
        pickle.dump((self._update, code), self._pipe(self._child.stdin))
        self._pipe(self._child.stdin).flush()

    def receive(self) -> Any:
        code, value = pickle.load(self._pipe(self._child.stdout))
        if code > 0:
            raise NvmlError(code, value)
        if code < 0:
            raise RuntimeError(value)
        return value

    def use(self, environment: Mapping[str, str]) -> Self:
        """Shut the library down and initialise it anew with these variables changed."""
        self._update = {**environment}
        self("[p.nvmlShutdown() for _ in range(p._nvmlLib_refcount)] if p.nvmlLib else None")
        self("p.nvmlInit()")
        return self

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._child.kill()
        self._child.wait()

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


@contextlib.contextmanager
def answers(code: int) -> Iterator[None]:
    """Expect the NVML error with this code."""
    with pytest.raises(NvmlError) as caught:
        yield
    assert caught.value.code == code


def raw(function: str, *arguments: str) -> str:
    """A call without pynvml's wrapping, for the contract of the C function itself."""
    return f"p._nvmlGetFunctionPointer({function!r})({', '.join(arguments)})"
