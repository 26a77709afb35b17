"""The certificate and the key of the network listener: whether they can be used, and why not.

Everything here reads files, which may take long: it is for the start and for threads.
"""

import os
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from gpuagent.errors import Refused

CERTIFICATE = "tls_certificate"
KEY = "tls_key"
"""Keys of the configuration, in section api."""
_MOST_BYTES = 1024 * 1024
_MARKS = {
    CERTIFICATE: (b"-----BEGIN CERTIFICATE-----", "certificate"),
    KEY: (b" PRIVATE KEY-----", "private key"),
}

# Tags of X.690 (DER), as RFC 5280, section 4.1, has them in a certificate.
_INTEGER, _SEQUENCE, _VERSION = 0x02, 0x30, 0xA0
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_END = b"-----END CERTIFICATE-----"

Problem = tuple[str, str]
"""CERTIFICATE or KEY, and what is wrong with it."""
Stamp = tuple[int, ...] | None


def context(certificate: str, key: str) -> ssl.SSLContext:
    """What a server needs to speak TLS with this pair. Raises Refused with all that is wrong."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could have the server sign again and again on one connection.
    made.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    made.set_alpn_protocols(["http/1.1"])
    found = [*_problems(certificate, key)] or [*_load(made, certificate, key)]
    if found:
        raise Refused("; ".join(f"api.{name}: {text}" for name, text in found))
    return made


def problems(certificate: str, key: str) -> tuple[Problem, ...]:
    """All that is wrong with the pair; nothing where it can be used."""
    found = tuple(_problems(certificate, key))
    return found or tuple(_load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key))


class Validity(msgspec.Struct, frozen=True):
    """From when until when a certificate is valid, in seconds since the epoch."""

    begins_wall: float
    ends_wall: float

    def why_not(self, wall: float) -> str:
        """Why clients refuse it at this time; empty while they do not."""
        if wall < self.begins_wall:
            return f"it is not valid before {_date(self.begins_wall)}; is the clock right?"
        if wall > self.ends_wall:
            return f"it has expired at {_date(self.ends_wall)}; put a new one in its place"
        return ""


def validity(certificate: str) -> Validity | None:
    """Of the first certificate in a file, which is the server's; None where it cannot be read."""
    try:
        text = _content(certificate)
        mark, _ = _MARKS[CERTIFICATE]
        begin = text.index(mark)
        pem = text[begin : text.index(_END, begin) + len(_END)]
        return _validity(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))
    except (OSError, ValueError, IndexError):
        return None


def doubts(certificate: str, key: str, *, wall: float) -> tuple[str, ...]:
    """What the operator should know of a pair that can be used, at this time of the wall clock."""
    found = []
    valid = validity(certificate)
    if valid is not None and (why := valid.why_not(wall)):
        found.append(f"api.{CERTIFICATE}: {certificate}: {why}")
    try:
        mode = os.stat(key).st_mode
    except OSError:
        return tuple(found)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        what = f"everybody on this host can read or write {key}; run chmod o= {key}"
        found.append(f"api.{KEY}: {what}")
    return tuple(found)


def stamp(path: str) -> Stamp:
    """What changes when the file does; None where it cannot be looked at."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _problems(certificate: str, key: str) -> Iterator[Problem]:
    """What is wrong with each file by itself."""
    for name, path in ((CERTIFICATE, certificate), (KEY, key)):
        mark, what = _MARKS[name]
        try:
            held = _content(path)
        except FileNotFoundError:
            yield name, f"{path}: no such file"
        except OSError as error:
            yield name, f"{path}: cannot be read: {error.strerror}"
        else:
            if mark not in held:
                yield name, f"{path}: holds no {what} in PEM form"
            elif name == KEY and (b"ENCRYPTED" in held):
                yield name, f"{path}: the key has a passphrase; write one without"


def _content(path: str) -> bytes:
    """Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is no regular file")
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _load(made: ssl.SSLContext, certificate: str, key: str) -> Iterator[Problem]:
    try:
        # Without a password of ours, OpenSSL would ask for one on the terminal.
        made.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            yield KEY, f"{key}: is not the key of {certificate}"
        else:
            why = (error.reason or "unknown").replace("_", " ").lower()
            yield CERTIFICATE, f"{certificate} and {key}: OpenSSL does not take them ({why})"
    except (OSError, ValueError) as error:
        yield CERTIFICATE, f"{certificate} and {key}: cannot be used: {error}"


# -- what a certificate says ------------------------------------------------------------------------------


def _validity(der: bytes) -> Validity:
    """Raises ValueError and IndexError for what is no certificate."""
    _, whole, _ = _element(der)
    _, fields, _ = _element(whole)
    if fields[0] == _VERSION:
        _, _, fields = _element(fields)
    for expected in (_INTEGER, _SEQUENCE, _SEQUENCE):  # serial number, algorithm, issuer
        tag, _, fields = _element(fields)
        if tag != expected:
            raise ValueError(f"tag {tag:#x} where {expected:#x} was expected")
    _, dates, _ = _element(fields)
    first, begins, dates = _element(dates)
    second, ends, _ = _element(dates)
    return Validity(_seconds(first, begins), _seconds(second, ends))


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first element, and what comes after it. Raises ValueError, IndexError."""
    tag, length, at = der[0], der[1], 2
    if length >= 0x80:  # so many more bytes hold the length
        at += length & 0x7F
        length = int.from_bytes(der[2:at])
    if at + length > len(der):
        raise ValueError("it ends early")
    return tag, der[at : at + length], der[at + length :]


def _seconds(tag: int, text: bytes) -> float:
    """A time of a certificate since the epoch. Raises ValueError."""
    if tag not in _TIMES:
        raise ValueError(f"tag {tag:#x} is no time")
    found = datetime.strptime(text.decode("ascii"), _TIMES[tag]).replace(tzinfo=UTC)
    # Two digits of a year are of 1950 to 2049 (RFC 5280, 4.1.2.5.1); strptime has it otherwise.
    if tag == 0x17 and found.year >= 2050:
        found = found.replace(year=found.year - 100)
    return found.timestamp()


def _date(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
