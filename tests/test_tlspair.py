"""The certificate and the key of the network listener: every way in which they cannot be used."""

import os
from pathlib import Path

import pytest

from gpuagent.configfile import load
from gpuagent.errors import Refused
from gpuagent.tlspair import CERTIFICATE, KEY, context, doubts, problems, stamp
from tests.expose.certificates import make, needs_openssl

pytestmark = needs_openssl


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    certificate, key = make(tmp_path)
    return str(certificate), str(key)


def test_a_good_pair(pair: tuple[str, str]) -> None:
    assert problems(*pair) == ()
    assert doubts(pair[1]) == ()
    assert context(*pair).get_ca_certs() == []


def test_both_files_are_told_of_at_once() -> None:
    found = problems("/nowhere/a.crt", "/nowhere/a.key")
    assert [name for name, _ in found] == [CERTIFICATE, KEY]
    assert all("no such file" in text for _, text in found)
    with pytest.raises(Refused, match=r"api\.tls_certificate: .*; api\.tls_key: "):
        context("/nowhere/a.crt", "/nowhere/a.key")


def test_a_key_of_another_certificate(pair: tuple[str, str], tmp_path: Path) -> None:
    _, other = make(tmp_path, "two")
    [(name, text)] = problems(pair[0], str(other))
    assert name == KEY
    assert "is not the key of" in text


def test_a_key_with_a_passphrase_asks_nobody(tmp_path: Path) -> None:
    certificate, key = make(tmp_path, passphrase="hunter2hunter2")
    [(name, text)] = problems(str(certificate), str(key))
    assert (name, "passphrase" in text) == (KEY, True)


@pytest.mark.parametrize("held", [b"", b"junk", b"\xff\xfe", b"-----BEGIN RUBBISH-----"])
def test_what_is_no_pem(pair: tuple[str, str], held: bytes) -> None:
    for name, path in zip((CERTIFICATE, KEY), pair, strict=True):
        whole = Path(path).read_bytes()
        Path(path).write_bytes(held)
        [(found, text)] = problems(*pair)
        assert found == name
        assert "in PEM form" in text
        Path(path).write_bytes(whole)


def test_a_torn_certificate(pair: tuple[str, str]) -> None:
    whole = Path(pair[0]).read_bytes()
    Path(pair[0]).write_bytes(whole[: len(whole) // 2])
    [(_, text)] = problems(*pair)
    assert "OpenSSL does not take them" in text


def test_what_is_no_file_holds_up_nobody(pair: tuple[str, str], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (str(fifo), str(tmp_path)):
        [(name, text)] = problems(path, pair[1])
        assert (name, "no regular file" in text) == (CERTIFICATE, True)


def test_a_key_that_everybody_reads_is_a_warning(pair: tuple[str, str]) -> None:
    os.chmod(pair[1], 0o644)
    [text] = doubts(pair[1])
    assert "chmod o=" in text
    assert problems(*pair) == ()
    assert doubts("/nowhere") == ()


def test_a_stamp_changes_with_the_file(pair: tuple[str, str]) -> None:
    before = stamp(pair[0])
    assert before == stamp(pair[0])
    fresh = Path(pair[0] + ".new")
    fresh.write_bytes(Path(pair[0]).read_bytes())
    os.replace(fresh, pair[0])
    assert stamp(pair[0]) != before
    assert stamp("/nowhere") is None


def test_the_configuration_tells_of_them_with_their_lines(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "gpuagent.toml"
    text = '[api]\nnetwork_listen = "0.0.0.0:9486"\ntls_certificate = "{}"\ntls_key = "{}"\n'
    file.write_text(text.format(*pair))
    file.chmod(0o600)
    assert load(str(file)).troubles == ()
    os.chmod(pair[1], 0o644)
    assert "chmod o=" in load(str(file)).warnings[-1]
    file.write_text(text.format("/nowhere/a.crt", "/nowhere/a.key"))
    loaded = load(str(file))
    assert [line.removeprefix(str(file)) for line in loaded.troubles] == [
        ":3: api.tls_certificate: /nowhere/a.crt: no such file",
        ":4: api.tls_key: /nowhere/a.key: no such file",
    ]
    assert loaded.config.api.network_listen == "0.0.0.0:9486", "the agent runs without"
