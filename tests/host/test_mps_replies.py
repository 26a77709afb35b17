"""What a control daemon's answers mean: strictly, and whatever else it may answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.errors import AgentError, Gone, Refused, Unavailable, Unsupported
from gpuagent.host import mps_replies as replies

GIB = 1024**3
MIB = 1024**2


def test_what_the_real_ones_answer() -> None:
    assert replies.percentage("100.0\n") == 1.0
    assert replies.percentage("33.3\n") == pytest.approx(0.333)
    assert replies.pids("") == ()
    assert replies.pids("17572\n") == (17572,)
    assert replies.pids("20\n3\n") == (3, 20)
    assert replies.state("INITIALIZING\n") == "INITIALIZING"
    assert replies.size("") is None
    assert replies.size("2G\n") == 2 * GIB
    assert replies.size("512M\n") == 512 * MIB


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ('Unknown command "get_server_status"\n', Unsupported),
        ("Server 1 not found\n", Gone),
        ("Server not found\n", Gone),
        ("Server 1 not found\nServer 1 not found!\n1\n", Gone),
        ("Insufficient privileges for UID 1000. Only the root user may ...\n", Refused),
        ("Invalid priority value - must be 0 or 1!\n", Refused),
        ("A user id (UID) is required to start a new server\n", Refused),
        ("\n", Unavailable),
        ("100.0\n100.0\n", Unavailable),
        ("101.0\n", Unavailable),
        ("0.0\n", Unavailable),
        ("-1\n", Unavailable),
        ("1 2\n", Unavailable),
        ("0\n", Unavailable),
        ("Server 4 is <busy>\n", Unavailable),
    ],
)
def test_what_is_no_answer_says_what_it_is(reply: str, kind: type[AgentError]) -> None:
    for read in (replies.percentage, replies.pids, replies.state, replies.size):
        with pytest.raises(kind):
            read(reply)


@given(st.text(max_size=200) | st.from_regex(r"[0-9. GM\n]{0,40}"))
def test_nothing_that_a_daemon_says_is_taken_for_what_it_is_not(reply: str) -> None:
    def read(what: object) -> object:
        assert callable(what)
        try:
            return what(reply)
        except (Gone, Refused, Unavailable, Unsupported) as error:
            return error

    ratio = read(replies.percentage)
    if isinstance(ratio, float):
        assert 0 < ratio <= 1
        assert float(reply) == pytest.approx(ratio * 100)
    listed = read(replies.pids)
    if isinstance(listed, tuple):
        assert all(0 < pid < 10**10 for pid in listed)
        assert set(listed) == {int(line) for line in reply.splitlines()}
    size = read(replies.size)
    assert size is None or isinstance(size, AgentError | int)
    read(replies.state)


@given(st.floats(min_value=0.0011, max_value=1.0))
def test_a_ratio_is_rounded_down_to_what_reads_back(ratio: float) -> None:
    text = replies.percent_text(ratio)
    kept = replies.percentage(f"{text}\n")
    assert ratio - 0.001 < kept <= ratio + 1e-9
    assert replies.percent_text(kept) == text


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.1, 0.0004, float("nan"), float("inf")])
def test_what_is_no_share_is_refused(ratio: float) -> None:
    with pytest.raises(Refused):
        replies.percent_text(ratio)


@pytest.mark.parametrize(
    ("limit", "ordinal", "text"),
    [
        (2 * GIB, 0, "0 2G"),
        (2048 * MIB, 31, "31 2G"),
        (512 * MIB, 1, "1 512M"),
        (1536 * MIB, 0, None),
        (5, 0, None),
        (0, 0, None),
        (GIB, 32, None),
        (GIB, -1, None),
    ],
)
def test_only_a_size_that_reads_back_as_it_is_set_is_set(
    limit: int, ordinal: int, text: str | None
) -> None:
    if text is None:
        with pytest.raises(Refused):
            replies.size_text(limit, ordinal)
    else:
        assert replies.size_text(limit, ordinal) == text
