"""Certificates for tests, made by openssl for the loopback address."""

import os
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

import pytest

from gpuagent.expose.network import Remote

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(
    OPENSSL is None, reason="openssl (Debian: openssl) is not installed"
)


_AUTHORITY = """
[ca]
default_ca = own
[own]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
copy_extensions = copy
[any]
commonName = supplied
"""
ALWAYS = ("20000101000000Z", "20991231235959Z")
"""Whatever the clock of a test says."""


def make(
    folder: Path, name: str = "one", *, passphrase: str = "", valid: tuple[str, str] = ALWAYS
) -> tuple[Path, Path]:
    """A certificate that vouches for itself, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    with tempfile.TemporaryDirectory(dir=folder) as desk:
        request, authority = f"{desk}/request", Path(desk, "authority")
        Path(desk, "index").touch()
        authority.write_text(_AUTHORITY.format(folder=desk))
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *(["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", request),
        )
        _openssl(
            *("ca", "-selfsign", "-batch", "-notext", "-config", str(authority)),
            *("-startdate", valid[0], "-enddate", valid[1]),
            *(["-passin", f"pass:{passphrase}"] if passphrase else []),
            *("-keyfile", str(key), "-in", request, "-out", str(certificate)),
        )
    key.chmod(0o600)
    return certificate, key


def _openssl(*words: str) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *words], check=True, capture_output=True)


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
