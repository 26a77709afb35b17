"""The certificate and the key of the network listener: every way in which they cannot be used."""

import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.configfile import load
from gpuagent.errors import Refused
from gpuagent.tlspair import CERTIFICATE, KEY, Validity, context, doubts, problems, stamp, validity
from tests.expose.certificates import make, needs_openssl

pytestmark = needs_openssl

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC).timestamp()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    certificate, key = make(tmp_path)
    return str(certificate), str(key)


def test_a_good_pair(pair: tuple[str, str]) -> None:
    assert problems(*pair) == ()
    assert doubts(*pair, wall=NOON) == ()
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
    [text] = doubts(*pair, wall=NOON)
    assert "chmod o=" in text
    assert problems(*pair) == ()
    assert doubts("/nowhere", "/nowhere", wall=NOON) == ()


@pytest.mark.parametrize(
    ("begins", "ends", "why"),
    [
        ("20000101000000Z", "20991231235959Z", ""),
        ("19990101000000Z", "20300101115959Z", "it has expired at 2030-01-01 11:59:59 UTC"),
        ("20300101120001Z", "20491231235959Z", "it is not valid before 2030-01-01 12:00:01 UTC"),
        ("20600101000000Z", "20991231235959Z", "it is not valid before 2060-01-01"),
    ],
)
def test_a_certificate_out_of_its_time_is_said(
    tmp_path: Path, begins: str, ends: str, why: str
) -> None:
    certificate, key = make(tmp_path, valid=(begins, ends))
    valid = validity(str(certificate))
    assert valid == Validity(*(_wall(text) for text in (begins, ends)))
    assert valid.why_not(NOON).startswith(why)
    assert bool(valid.why_not(NOON)) == bool(why)
    said = doubts(str(certificate), str(key), wall=NOON)
    assert [text.startswith(f"api.tls_certificate: {certificate}: {why}") for text in said] == (
        [True] if why else []
    )
    assert problems(str(certificate), str(key)) == (), "it is served all the same"


def _wall(text: str) -> float:
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def test_the_first_of_a_chain_counts(tmp_path: Path) -> None:
    first, _ = make(tmp_path, valid=("20000101000000Z", "20310101000000Z"))
    above, _ = make(tmp_path, "above", valid=("20000101000000Z", "20010101000000Z"))
    chain = tmp_path / "chain.crt"
    chain.write_bytes(first.read_bytes() + above.read_bytes())
    assert validity(str(chain)) == validity(str(first))


@given(st.binary(max_size=400))
def test_of_what_is_no_certificate_nothing_is_known(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.crt"
    for held in (raw, ssl.DER_cert_to_PEM_cert(raw).encode(), b"-----BEGIN CERTIFICATE-----"):
        file.write_bytes(held)
        assert validity(str(file)) is None
    assert validity("/nowhere") is None


def test_a_torn_certificate_has_no_time(pair: tuple[str, str]) -> None:
    der = ssl.PEM_cert_to_DER_cert(Path(pair[0]).read_text())
    for length in range(0, len(der), 7):
        Path(pair[0]).write_text(ssl.DER_cert_to_PEM_cert(der[:length]))
        assert validity(pair[0]) is None


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
