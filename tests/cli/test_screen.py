"""The terminal of a live view: bytes to keys, frames, and that it is put back."""

import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.cli.screen import Keys, Line, Screen
from tests.cli.terminal import terminal, written

# -- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"qs/", ["q", "s", "/"]),
        (b"\r\n\x7f\x08", ["enter", "enter", "backspace", "backspace"]),
        (b"\x1b[A\x1bOB\x1b[H\x1b[F", ["up", "down", "home", "end"]),
        (b"\x1b[5~\x1b[6~\x1b[1~\x1b[4~", ["page up", "page down", "home", "end"]),
        (b"\x1b[1;5C\x1b[200~j", ["j"]),
        ("\u00e9\u6f22".encode(), ["\u00e9", "\u6f22"]),
        (b"\x1bq", ["escape", "q"]),
        (b"\x00\x01\t", []),
    ],
)
def test_bytes_become_keys(data: bytes, keys: list[str]) -> None:
    assert Keys().feed(data) == keys


def test_an_escape_alone_is_a_key_once_nothing_follows() -> None:
    keys = Keys()
    assert keys.feed(b"\x1b") == []
    waited = keys.pending
    assert keys.settle() == ["escape"]
    assert waited > keys.pending
    assert keys.feed(b"\x1b") + keys.feed(b"[A") == ["up"]


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=5),
            st.sampled_from([b"\x1b", b"\x1b[", b"A", b"\x1bO", b"\x1b[5~", "\u6f22".encode()]),
        ),
        max_size=12,
    )
)
def test_how_bytes_are_cut_up_does_not_matter(parts: list[bytes]) -> None:
    one, many = Keys(), Keys()
    whole = one.feed(b"".join(parts)) + one.settle()
    cut = [key for part in parts for key in many.feed(part)] + many.settle()
    assert cut == whole
    assert all(key.isprintable() for key in whole)


# -- the terminal ------------------------------------------------------------------------------------------


def fail_on(theirs: int) -> None:
    with Screen(keys=theirs, out=theirs, ansi=True, colour=True) as screen:
        assert not termios.tcgetattr(theirs)[3] & (termios.ICANON | termios.ECHO)
        assert termios.tcgetattr(theirs)[3] & termios.ISIG, "Ctrl-C still works"
        screen.show([Line("bad", "bad")])
        raise ZeroDivisionError


def test_the_screen_is_restored_after_an_error() -> None:
    with terminal() as (ours, theirs):
        before = termios.tcgetattr(theirs)
        with pytest.raises(ZeroDivisionError):
            fail_on(theirs)
        assert termios.tcgetattr(theirs) == before
        text = written(ours)
    assert b"\x1b[31mbad\x1b[0m" in text
    assert text.startswith(b"\x1b[?1049h")
    assert text.endswith(b"\x1b[?1049l")


def test_the_same_frame_is_drawn_once() -> None:
    with (
        terminal() as (ours, theirs),
        Screen(keys=theirs, out=theirs, ansi=True, colour=False) as screen,
    ):
        written(ours)
        screen.show([Line("a", "bad")])
        assert b"a" in written(ours)
        screen.show([Line("a", "bad")])
        assert written(ours) == b""
        screen.forget()
        screen.show([Line("a", "bad")])
        assert written(ours) == b"\x1b[H\x1b[Ka"
