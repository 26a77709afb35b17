"""The certificate and the key of the network listener: whether they can be used, and why not.

Everything here reads files, which may take long: it is for the start and for threads.
"""

import os
import ssl
import stat
from collections.abc import Iterator

from gpuagent.errors import Refused

CERTIFICATE = "tls_certificate"
KEY = "tls_key"
"""Keys of the configuration, in section api."""
_MOST_BYTES = 1024 * 1024
_MARKS = {
    CERTIFICATE: (b"-----BEGIN CERTIFICATE-----", "certificate"),
    KEY: (b" PRIVATE KEY-----", "private key"),
}

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


def doubts(key: str) -> tuple[str, ...]:
    """What the operator should know of a key that can be used."""
    try:
        mode = os.stat(key).st_mode
    except OSError:
        return ()
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return (f"api.{KEY}: everybody on this host can read or write {key}; run chmod o= {key}",)
    return ()


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
