"""A unified diff is applied exactly, or it is said where it does not fit."""

from __future__ import annotations

import difflib

import pytest

from eagle3.errors import BadInput
from jobs.engines.diffs import FileDiff, applied, parse

OLD = "".join(f"line {n}\n" for n in range(1, 31))


def diff_of(old: str, new: str, name: str = "a/pkg/mod.py", context: int = 3) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), name, name, n=context
    )
    return "".join(lines)


def patched(text: str, diff: str) -> str:
    (file,) = parse(diff)
    return applied(text, file.hunks)


def edited(text: str) -> str:
    """Two changes far apart, so that there are two hunks."""
    return text.replace("line 5\n", "five\nand more\n").replace("line 25\n", "")


@pytest.mark.parametrize("context", [0, 1, 3])
def test_what_was_made_of_two_texts_makes_the_one_of_the_other(context: int) -> None:
    assert patched(OLD, diff_of(OLD, edited(OLD), context=context)) == edited(OLD)


@pytest.mark.parametrize(
    ("old", "new"),
    [("", "a\nb\n"), ("a\n", ""), ("a\n\nb\n", "a\n\n\nb\n"), ("a\x0cb\n", "a\x0cc\n")],
)
def test_odd_texts_are_patched_as_well(old: str, new: str) -> None:
    if "\x0c" in old:  # difflib's lines would end there
        diff = f"--- a/pkg/mod.py\n+++ b/pkg/mod.py\n@@ -1 +1 @@\n-{old}+{new}"
    else:
        diff = diff_of(old, new)
    assert patched(old, diff) == new


def test_a_missing_newline_at_the_end_is_kept_and_can_be_added() -> None:
    head = "--- a/pkg/mod.py\n+++ b/pkg/mod.py\n"
    none = "\\ No newline at end of file\n"
    assert patched("a\nb", f"{head}@@ -1,2 +1,2 @@\n-a\n+A\n b\n{none}") == "A\nb"
    assert patched("a\nb", f"{head}@@ -2 +2 @@\n-b\n{none}+b\n") == "a\nb\n"


def test_a_moved_file_is_patched_where_the_lines_are_once() -> None:
    moved = "new first line\n" * 7 + OLD
    assert patched(moved, diff_of(OLD, edited(OLD))) == "new first line\n" * 7 + edited(OLD)


def test_a_later_hunk_is_looked_for_as_far_away_as_the_one_before_was() -> None:
    # The second hunk's lines are there twice; the right ones are those that have moved like the first.
    old = OLD + "same\n" * 3
    diff = diff_of(old, edited(OLD) + "same\n" * 2 + "other\n", context=0)
    moved = "new first line\n" * 2 + old
    assert patched(moved, diff).endswith("line 30\nsame\nsame\nother\n")


def test_lines_that_are_there_twice_elsewhere_are_no_place() -> None:
    diff = diff_of("a\nb\nc\n", "a\nB\nc\n")
    with pytest.raises(
        BadInput, match=r"^hunk 1 does not apply: its lines are there 2 times, and not at line 1$"
    ):
        patched("x\n" + "a\nb\nc\n" * 2, diff)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "line 4\n",
            "line four\n",
            "hunk 1 does not apply: at line 4 there is 'line four', not",
        ),
        (
            "line 25\n",
            "line 25 \n",
            "hunk 2 does not apply: at line 25 there is 'line 25 ', not",
        ),
        ("line 28\n", "", "hunk 2 does not apply: at line 28 there is 'line 29', not 'line 28'"),
        ("line 24\n", "line\t24\n", "hunk 2 does not apply: at line 24 there is"),
    ],
)
def test_context_that_differs_is_said_with_its_hunk_and_line(
    before: str, after: str, words: str
) -> None:
    with pytest.raises(BadInput, match=f"^{words}"):
        patched(OLD.replace(before, after), diff_of(OLD, edited(OLD)))


def test_a_file_that_ends_too_soon_is_said() -> None:
    with pytest.raises(BadInput, match=r"at line 3 the file has ended, not 'line 3'"):
        patched("line 1\nline 2\n", diff_of("line 1\nline 2\nline 3\n", "line 1\nline 2\n"))
    with pytest.raises(BadInput, match="it stands behind line 30, and the file has 2"):
        patched("line 1\nline 2\n", diff_of(OLD, OLD + "more\n", context=0))


def test_a_hunk_that_is_there_only_in_front_of_the_one_before_has_no_place() -> None:
    first, second = "@@ -3 +3 @@\n-line 3\n+three\n", "@@ -1 +1 @@\n-line 1\n+one\n"
    with pytest.raises(BadInput, match="hunk 2 does not apply: its lines at line 1 overlap"):
        patched(OLD, f"--- a/pkg/mod.py\n+++ b/pkg/mod.py\n{first}{second}")


def test_two_files_one_of_them_new_are_read_as_git_writes_them() -> None:
    text = (
        "From 0123 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] two\n---\n pkg/mod.py | 2 +-\n\n"
        "diff --git a/pkg/mod.py b/pkg/mod.py\nindex 01..02 100644\n"
        "--- a/pkg/mod.py\n+++ b/pkg/mod.py\n@@ -1,2 +1,2 @@ def f():\n-line 1\n+one\n line 2\n"
        "diff --git a/pkg/new.py b/pkg/new.py\nnew file mode 100644\nindex 00..01\n"
        "--- /dev/null\n+++ b/pkg/new.py\t2026-11-30\n@@ -0,0 +1,2 @@\n+a = 1\n+b = 2\n"
        "-- \n2.43.0\n\n"
    )
    changed, new = parse(text)
    assert (changed.path, changed.is_new) == ("b/pkg/mod.py", False)
    assert applied("line 1\nline 2\n", changed.hunks) == "one\nline 2\n"
    assert (new.path, new.is_new) == ("b/pkg/new.py", True)
    assert applied("", new.hunks) == "a = 1\nb = 2\n"
    assert isinstance(new, FileDiff)


def test_a_removed_line_that_looks_like_a_files_head_is_a_line() -> None:
    old = "-- x\n++ y\nz\n"
    assert patched(old, diff_of(old, "z\n")) == "z\n"


HEAD = "--- a/pkg/mod.py\n+++ b/pkg/mod.py\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is no unified diff"),
        ("def f():\n    pass\n", "it is no unified diff"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1 is a hunk without a file"),
        (HEAD, "b/pkg/mod.py has no hunk"),
        (
            HEAD + "@@ -1,3 +1,3 @@\n-a\n+b\n c\n",
            "hunk 1 of b/pkg/mod.py ends at line 7, behind 2 of 3",
        ),
        (HEAD + "@@ -1,2 +1,2 @@\n-a\n+b\ngarbage\n", "ends at line 6, behind 1 of 2 old"),
        (HEAD + "@@ -1 +1 @@\n-a\n+b\n+c\n", "says 1 old and 1 new lines, and there are others"),
        (
            HEAD + "@@ -1 +1,2 @@\n-a\n-b\n+c\n+d\n",
            "says 1 old and 2 new lines, and there are others",
        ),
        ("--- a/pkg/mod.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "line 2 deletes a/pkg/mod.py"),
        (
            "diff --git a/x b/y\nrename from x\nrename to y\n",
            "line 2 is 'rename from x': files are",
        ),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "line 2 is 'Binary files"),
    ],
)
def test_what_is_no_plain_diff_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(text)
    assert words in str(caught.value)
