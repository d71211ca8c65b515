"""A grammar in Lark's language becomes the regular expression that matches the same texts."""

from __future__ import annotations

import re

import pytest

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.lark_regex import lark_to_regex

PATCHES = """
// A patch of several files.
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF move? change?
move: "*** Move to: " filename LF

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (context | change_line)+ end_of_file?
context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
end_of_file: "*** End of File" LF

%import common.LF
"""
PATCH = """*** Begin Patch
*** Update File: a.py
@@ def f():
-    return 1
+    return 2
*** Add File: b.py
+x = 1
*** Delete File: c.py
*** End Patch
"""


def matches(grammar: str, text: str) -> bool:
    return re.fullmatch(lark_to_regex(grammar), text) is not None


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (PATCH, True),
        (PATCH.removesuffix("\n"), True),
        (PATCH.replace("*** Begin Patch\n", ""), False),
        (PATCH.replace("+x = 1", "x = 1"), False),
        ("*** Begin Patch\n*** End Patch\n", False),
    ],
)
def test_patches(text: str, is_right: bool) -> None:
    assert matches(PATCHES, text) is is_right


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a"~2..3 "." /b/i', ["aa.b", "aaa.B"], ["a.b", "aaaa.b", "aaxb"]),
        ('start: "a"~2', ["aa"], ["a", "aaa"]),
        ('start: ["+" | "-"] DIGIT+\n%import common.DIGIT', ["+12", "7"], ["", "+"]),
        ('start: N\nN: "1".."3"\n', ["2"], ["4", "1..3"]),
        ('?start: _x\n | "y"i\n_x.2: "\\u00e9\\n"', ["é\n", "Y"], ["x"]),
        ("start: W (C W)*\n%import common.WORD -> W\nC: /, ?/ # a comment", ["a, b,c"], ["a,", ""]),
        ('%import common (INT, WS_INLINE)\nstart: INT [WS_INLINE INT] ""', ["1", "1 22"], ["1 "]),
        ('start: /[/"]x\\/y/s "(a|b)*"', ['"x/y(a|b)*'], ["/x/ya"]),
        ('start: a | b -> c\na: "1"\nb: "2" |', ["1", "2", ""], ["12"]),
    ],
)
def test_what_a_grammar_may_hold(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not matches(grammar, text)] == []
    assert [text for text in wrong if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "no rule called start"),
        ("start: a", 'no rule or terminal called "a"'),
        ('start: "(" start ")" | "x"', "refers to itself"),
        ('start: a\na: b\nb: "x" a?', "refers to itself"),
        ('start: "a"\n%ignore " "', "%ignore is not supported"),
        ('start: "a"\n%import python.NAME', "supported from common alone"),
        ("start: A\n%import common.PI", 'has no terminal "PI"'),
        ('start: "a', "line 1 cannot be read"),
        ('start: ("a"', "bracket is not closed"),
        ('start: "a")', '")" is not expected'),
        ('start: "a"~x', "a number is expected"),
        ('start: "ab".."c"', "a range"),
        ('start: "\\q"', "an escape that is not known"),
        ("start: /a/x", "flags"),
        ('start "a"', "no colon"),
        ('start: "a"\nstart: "b"', 'two rules called "start"'),
        ("start: " + "(" * 500 + '"a"' + ")" * 500, "nested too deeply"),
        (
            "start: r0\n"
            + "".join(f"r{at}: r{at + 1} r{at + 1}\n" for at in range(40))
            + 'r40: "long enough to grow"',
            "more than 50000 characters",
        ),
    ],
)
def test_what_is_refused_says_why(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        lark_to_regex(grammar)
