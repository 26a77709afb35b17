"""The driver's library as the NVML child uses it: each call announced first, each error understood.

Standard library and pynvml only.
"""

import ctypes
from typing import Any

import pynvml

from gpuagent.host.child import CallSlot

EVERY_CARD = -1
"""Target of a call that is about no card in particular."""


class NoValue(Exception):
    """No answer to this question now, and why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Never(NoValue):
    """This library or this card does not know the question."""


class CardLost(NoValue):
    """The card cannot be reached at all."""


class DriverGone(NoValue):
    """There is no driver, or not the one that this process has loaded the library of."""


_NEVER = frozenset(
    (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    )
)
_LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "the card has fallen off the bus (GPU is lost)",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the card needs a reset",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "the card has gone",
}
_GONE = {
    pynvml.NVML_ERROR_UNINITIALIZED: "the driver was unloaded or reloaded",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 cannot be loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver and library have different versions",
}


class Driver:
    """The library, one call at a time."""

    def __init__(self, slot: CallSlot, library: str) -> None:
        """Loads the library; raises DriverGone where that fails."""
        self._slot = slot
        self._functions: dict[str, tuple[Any, bytes]] = {}
        """Of pynvml, and their names as the slot takes them."""
        self._unknown: set[str] = set()
        """Kept for people only: under one name pynvml calls several symbols."""
        if library:
            # pynvml has no way to be told a path, but takes a library that is already there.
            try:
                pynvml.nvmlLib = ctypes.CDLL(library)
            except OSError as error:
                raise DriverGone(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, str(error)) from error
        # Without this flag a host whose last card was removed would count as one without driver.
        self.call(EVERY_CARD, "nvmlInitWithFlags", pynvml.NVML_INIT_FLAG_NO_GPUS)

    def call(self, card: int, name: str, *args: Any) -> Any:
        """What the pynvml function returns. Raises NoValue or one of its kinds.

        `card` is the index to blame if the call never returns.
        """
        found = self._functions.get(name)
        function, said = found if found is not None else self._find(name)
        self._slot.enter(card, said)
        try:
            return function(*args)
        except pynvml.NVMLError as error:
            raise self._meaning(name, error.value) from error
        except UnicodeDecodeError as error:
            raise NoValue(pynvml.NVML_ERROR_UNKNOWN, f"{name} answers no text") from error
        finally:
            self._slot.leave()

    def _find(self, name: str) -> tuple[Any, bytes]:
        function = getattr(pynvml, name, None)
        if function is None:
            self._unknown.add(name)
            raise Never(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, f"{name} is unknown")
        self._functions[name] = (function, name.encode())
        return self._functions[name]

    def _meaning(self, name: str, code: int) -> NoValue:
        if code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            self._unknown.add(name)
        if code in _NEVER:
            return Never(code, f"{name}: not supported")
        if code in _LOST:
            return CardLost(code, _LOST[code])
        if code in _GONE:
            return DriverGone(code, _GONE[code])
        text = pynvml.NVMLError._errcode_to_string.get(code, "")  # noqa: SLF001 - asking the library instead could hang
        return NoValue(code, f"{name}: {text or f'error {code}'}")

    @property
    def missing(self) -> tuple[str, ...]:
        """Functions that were asked for and that this library lacks, sorted."""
        return tuple(sorted(self._unknown))
