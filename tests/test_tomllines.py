"""The line of every key: held against tomli's reading and against documents of known lines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import tomli
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuagent.tomllines import DEEPEST, Path, line_of, locate

DOCUMENT = '''\
# [no] table = here
a = 1 # b = 2
"b.c" . 'd' = """x
[fake]
y""" # end
[ t . u ] # a header
  k = [1, # one
   2, {z=[3,
 ], w = 5}, \'\'\'
 q = 1
\'\'\'\'\'
]
when = 1979-05-27 07:32:00
[[x]]
[x.y]
v={a.b=1,c={}}
[[x]]
[[x.y]]
"\\u0041" = 'k'
[[x.y]]
[t]
w=true'''

LINES: dict[Path, int] = {
    ("a",): 2,
    ("b.c",): 3,
    ("b.c", "d"): 3,
    ("t",): 21,  # Its own header, not the one of the table below it.
    ("t", "u"): 6,
    ("t", "u", "k"): 7,
    ("t", "u", "k", 0): 7,
    ("t", "u", "k", 1): 8,
    ("t", "u", "k", 2): 8,
    ("t", "u", "k", 2, "z"): 8,
    ("t", "u", "k", 2, "z", 0): 8,
    ("t", "u", "k", 2, "w"): 9,
    ("t", "u", "k", 3): 9,
    ("t", "u", "when"): 13,
    ("x",): 14,
    ("x", 0): 14,
    ("x", 0, "y"): 15,
    ("x", 0, "y", "v"): 16,
    ("x", 0, "y", "v", "a"): 16,
    ("x", 0, "y", "v", "a", "b"): 16,
    ("x", 0, "y", "v", "c"): 16,
    ("x", 1): 17,
    ("x", 1, "y"): 18,
    ("x", 1, "y", 0): 18,
    ("x", 1, "y", 0, "A"): 19,
    ("x", 1, "y", 1): 20,
    ("t", "w"): 22,
}


def test_every_form_of_toml_is_located() -> None:
    assert locate(DOCUMENT) == LINES
    assert set(LINES) == paths_of(tomli.loads(DOCUMENT))


def test_line_ends_of_windows_count_the_same() -> None:
    assert locate(DOCUMENT.replace("\n", "\r\n")) == LINES


def test_a_path_that_is_not_written_has_the_line_of_the_table_it_belongs_to() -> None:
    assert line_of(LINES, ("x", 1, "y", 0, "missing")) == 18
    assert line_of(LINES, ("x", 0, "missing", "deeper")) == 14
    assert line_of(LINES, ("missing",)) == 1
    assert line_of(LINES, ()) == 1


def test_nesting_without_end_is_followed_without_recursion_and_forgotten_early() -> None:
    deep = 390
    lines = locate("a = " + "[" * deep + "\n" + "]" * deep + "\nb." + "c." * deep + "d = 1\nz = 1")
    assert max(len(path) for path in lines) == DEEPEST
    assert lines["z",] == 4


def paths_of(document: object) -> set[Path]:
    """Every path of what tomli has read, as far down as lines are recorded."""

    def walk(value: object, at: Path) -> Iterator[Path]:
        if at:
            yield at[:DEEPEST]
        if isinstance(value, dict):
            for key, below in value.items():
                yield from walk(below, (*at, key))
        elif isinstance(value, list):
            for index, below in enumerate(value):
                yield from walk(below, (*at, index))

    return set(walk(document, ()))


@dataclass
class Writer:
    """Writes a document and knows on which line everything is."""

    draw: Callable[[st.SearchStrategy[str]], str]
    text: str = ""
    lines: dict[Path, int] = field(default_factory=dict)
    keys: int = 0

    def mark(self, path: Path) -> None:
        self.lines.setdefault(path[:DEEPEST], 1 + self.text.count("\n"))

    def key(self) -> tuple[str, str]:
        """A new key and one of the ways to write it."""
        self.keys += 1
        name, written = self.draw(
            st.sampled_from(
                [
                    ("k%d", "k%d"),
                    ("%d", "%d"),
                    ("a-b_%d", "'a-b_%d'"),
                    ("a.b = [%d] # no", '"a.b = [%d] # no"'),
                    ('"\\%d', '"\\"\\\\%d"'),
                    ("é%d", '"\\u00e9%d"'),
                    ("é%d\n", '"\\xe9%d\\n"'),
                    ("'''%d", "\"'''%d\""),
                    ('"""%d', '\'"""%d\''),
                ]
            ).map("\x00".join)
        ).split("\x00")
        return name % self.keys, written % self.keys

    def dotted(self, table: Path, parts: int) -> Path:
        path = table
        for index in range(parts):
            name, written = self.key()
            path = (*path, name)
            if index:
                self.text += self.draw(st.sampled_from([".", " . ", "\t."]))
            self.mark(path)
            self.text += written
        return path

    def setting(self, table: Path, depth: int = 0) -> None:
        path = self.dotted(table, int(self.draw(st.sampled_from("1112"))))
        self.text += self.draw(st.sampled_from(["=", " = ", "\t=  "]))
        self.value(path, depth)

    def value(self, path: Path, depth: int) -> None:
        kind = self.draw(st.sampled_from(["scalar", "scalar", "array", "table"]))
        if kind == "scalar" or depth > 2:
            self.text += self.draw(st.sampled_from(SCALARS))
            return
        count = int(self.draw(st.sampled_from("0123")))
        self.text += "[" if kind == "array" else "{"
        for index in range(count):
            self.text += self.draw(st.sampled_from(GAPS))
            if kind == "array":
                self.mark((*path, index))
                self.value((*path, index), depth + 1)
            else:
                self.setting(path, depth + 1)
            self.text += self.draw(st.sampled_from(GAPS))
            last = index == count - 1
            self.text += self.draw(st.sampled_from(["", ","])) if last else ","
        self.text += self.draw(st.sampled_from(GAPS)) + ("]" if kind == "array" else "}")

    def settings(self, table: Path) -> None:
        for _ in range(int(self.draw(st.sampled_from("0123")))):
            self.noise()
            self.setting(table)
            self.text += self.draw(st.sampled_from(["\n", " # x = [\n", "\t\n"]))

    def noise(self) -> None:
        self.text += self.draw(
            st.sampled_from(["", "\n", "# [x]\n", "  # a = '''\n\n", "  ", "\t"])
        )

    def table(self, above: Path, written_above: str, depth: int = 0) -> None:
        """A table or an array of tables with what is below it."""
        name, written = self.key()
        header = written_above + written
        array = self.draw(st.sampled_from(["table", "array"])) == "array"
        elements = int(self.draw(st.sampled_from("123"))) if array else 1
        for index in range(elements):
            self.noise()
            path: Path = (*above, name)
            self.mark(path)
            if array:
                path = (*path, index)
                self.mark(path)
            self.text += f"[[ {header}]]" if array else f"[{header} ]"
            self.text += self.draw(st.sampled_from(["\n", "# [y]\n"]))
            self.settings(path)
            if depth < 2 and self.draw(st.sampled_from(["", "deeper"])):
                self.table(path, header + self.draw(st.sampled_from([".", " . "])), depth + 1)


SCALARS = [
    *("1", "-1.5e3", "true", "inf", "0x1F", "1979-05-27 07:32:00", "07:32:00.5"),
    *('""', "''", '""""""', "''''''", '"a # [b] = {c}, \\" \\\\"', "'x = \"[ \\'"),
    *('"""m\n# no\n[fake]\nkey = 1"""', '""""two""\n"""""', '"""\\""" \\\n  x"""', '"""a\\\\"""'),
    *("'''\n'\n''two\n'''", "''''q'''''", "'''\\'''"),
]
GAPS = ["", " ", "\n", "\t# , ] }\n", "\n\n"]


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[Path, int]]:
    writer = Writer(draw)
    writer.settings(())
    for _ in range(draw(st.integers(0, 3))):
        writer.table((), "")
    return writer.text, writer.lines


@settings(deadline=None, max_examples=300)
@given(documents())
def test_documents_of_known_lines_are_located(written: tuple[str, dict[Path, int]]) -> None:
    text, lines = written
    assert paths_of(tomli.loads(text)) == set(lines)
    assert locate(text) == lines


_FRAGMENTS = [
    *SCALARS,
    *GAPS,
    *("a", "b.c", "'a'", "=", " = ", "[", "]", "[[", "]]", "{", "}", ",", ".", "\r\n"),
    *("[a]\n", "[[a]]\n", "[a.b]\n", "[[a.b]]\n", "a = 1\n", "b = {a.b = 1}\n", "a.b = [\n1]\n"),
]


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from(_FRAGMENTS), max_size=12).map("".join))
@example("[[a]]\n[[a.b]]\n[[a]]\n[[a.b]]\n[[a.b]]\na=1")
def test_whatever_tomli_reads_has_its_paths_located(text: str) -> None:
    try:
        expected = paths_of(tomli.loads(text))
    except tomli.TOMLDecodeError:
        return
    found = locate(text)
    assert set(found) == expected
    assert all(1 <= line <= text.count("\n") + 1 for line in found.values())


@pytest.mark.parametrize("junk", ["", "\n\n", "# only a comment", "\r\n"])
def test_a_document_without_keys_has_no_lines(junk: str) -> None:
    assert locate(junk) == {}
