"""Certificates for tests, made by openssl for the loopback address."""

import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from gpuagent.expose.network import Remote

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(
    OPENSSL is None, reason="openssl (Debian: openssl) is not installed"
)


def make(folder: Path, name: str = "one", *, passphrase: str = "") -> tuple[Path, Path]:
    """A certificate that vouches for itself, and its key."""
    assert OPENSSL is not None
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *(OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *(["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]),
            *("-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    return certificate, key


def remote(pair: tuple[Path, Path], listen: str = "127.0.0.1:0") -> Remote:
    return Remote(listen, str(pair[0]), str(pair[1]))


def put(pair: tuple[Path, Path], over: tuple[Path, Path]) -> None:
    """Replace the files of a pair by those of another, each at once."""
    for new, old in zip(pair, over, strict=True):
        fresh = old.with_suffix(".new")
        shutil.copy(new, fresh)
        os.replace(fresh, old)


def trusting(certificate: Path) -> ssl.SSLContext:
    """What a client needs to trust this one certificate."""
    return ssl.create_default_context(cafile=str(certificate))
