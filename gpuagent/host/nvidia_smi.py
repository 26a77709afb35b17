"""The time slice of a card, which only nvidia-smi can set.

    nvidia-smi compute-policy -i UUID --list
    nvidia-smi compute-policy -i UUID --set-timeslice N     0 default, 1 short, 2 medium, 3 long

The options are as the tool's help shows them (NVIDIA/k8s-device-plugin#354) and NVIDIA's DRA driver
uses them. What `--list` prints is documented nowhere: here one card is asked for, so that exactly one
of the four words must come, however it is framed. The exit code says nothing: what is set is read back.
The driver keeps it until it is unloaded, and on a card without persistence mode until its last client
has left.
"""

import re

from gpuagent.errors import Gone, Refused, Unavailable, Unsupported
from gpuagent.host.tool import Ran, find, run

SLICES = ("default", "short", "medium", "long")
_SECONDS = 20.0
"""On a host with many cards without persistence mode each start of the tool takes seconds."""
_REMEDY = "it comes with the NVIDIA driver; set paths.nvidia_smi"
_WORD = re.compile(rf"\b({'|'.join(SLICES)})\b", re.IGNORECASE)
_TOLD = re.compile(r"time.?slice", re.IGNORECASE)
_UUID = re.compile(r"GPU-[0-9A-Za-z-]+")
_MEANINGS: tuple[tuple[re.Pattern[str], type[Gone | Refused | Unsupported]], ...] = (
    (
        re.compile(
            r"no devices? (were |was )?found|unable to determine the device handle", re.IGNORECASE
        ),
        Gone,
    ),
    (
        re.compile(r"not supported|unrecogni[sz]ed|invalid (option|argument)", re.IGNORECASE),
        Unsupported,
    ),
    (re.compile(r"permission", re.IGNORECASE), Refused),
)
"""What it may say instead of an answer."""


class ComputePolicy:
    """Implements `ports.TimeSlices`."""

    def __init__(self, program: str, *, seconds: float = _SECONDS) -> None:
        """`program` is a path, or a name to look for in PATH; `seconds` the longest a call may take."""
        self._program = program
        self._seconds = seconds

    async def get(self, uuid: str) -> int:
        """Raises Gone, Unsupported, Refused, Unavailable."""
        ran = await self._run(uuid, "--list")
        found = slice_in(ran.text)
        if found is None:
            raise _trouble(uuid, ran)
        return found

    async def set(self, uuid: str, slice_: int) -> None:
        """Raises as `get`; Refused also where the card keeps another."""
        if not 0 <= slice_ < len(SLICES):
            raise Refused(f"{uuid}: there is no time slice {slice_}")
        ran = await self._run(uuid, "--set-timeslice", str(slice_))
        real = await self.get(uuid)
        if real != slice_:
            raise Refused(
                f"{uuid}: the time slice stays {SLICES[real]}; nvidia-smi says: {ran.line}"
            )

    async def _run(self, uuid: str, *arguments: str) -> Ran:
        if not _UUID.fullmatch(uuid):
            raise Unsupported(f"{uuid} is no card that nvidia-smi knows")
        program = find(self._program, _REMEDY)
        ran = await run([program, "compute-policy", "-i", uuid, *arguments], seconds=self._seconds)
        if not ran.in_time:
            raise Unavailable(f"nvidia-smi did not answer within {self._seconds:g} s")
        return ran


def slice_in(text: str) -> int | None:
    """The one time slice that an answer about one card names; None where it does not say just one.

    Where a line speaks of the time slice, and a word follows, that counts; else any line.
    """
    after = [w for line in text.splitlines() for w in _after(line)]
    words = {w.lower() for w in after or _WORD.findall(text)}
    return SLICES.index(words.pop()) if len(words) == 1 else None


def _after(line: str) -> list[str]:
    told = _TOLD.search(line)
    return _WORD.findall(line[told.end() :]) if told else []


def _trouble(uuid: str, ran: Ran) -> Gone | Refused | Unsupported:
    for pattern, meaning in _MEANINGS:
        if pattern.search(ran.text):
            return meaning(f"{uuid}: nvidia-smi compute-policy: {ran.line}")
    return Unsupported(
        f"{uuid}: what nvidia-smi says of the time slice is not understood: {ran.line}"
    )
