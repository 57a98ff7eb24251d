"""The golden file: what is taken for one, and how it is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import gate_file
from orchestrator.errors import InputError
from orchestrator.paths import CLONE
from tests.orchestrator.gated import MORE, Place

Output = pytest.CaptureFixture[str]


FOREIGN = {
    "text": ("a poem", "Expecting value"),
    "nothing": ("", "Expecting value"),
    "a list": ("[]", "it holds no entries"),
    "another's": ('{"name": "package"}', "it holds no entries"),
    "of tomorrow": ('{"format": 2, "entries": []}', "its format is 2, not 1"),
    "a merge": ("<<<<<<< HEAD\n{}", "Expecting value"),
    "no key": ('{"format": 1, "entries": [{"versions": {}}]}', "entry 1 has no key"),
    "no versions": ('{"format": 1, "entries": [{"key": {}}]}', "entry 1 has no versions"),
    "twice": ('{"format": 1, "format": 1, "entries": []}', "a name stands twice"),
    "no number": ('{"format": 1, "entries": [NaN]}', "NaN is no number"),
    "deep": ("[" * 100_000, "recursion"),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("more", [(), ("store=true",)])
def test_a_file_that_is_no_golden_file_stays_as_it_is(
    what: str, more: tuple[str, ...], place: Place, capsys: Output
) -> None:
    content, why = FOREIGN[what]
    place.golden.write_text(content)
    assert place.gate(place.run("first"), *more) == 2
    error = capsys.readouterr().err
    assert "is no golden file" in error
    assert why in error
    assert place.golden.read_text() == content
    assert [path.name for path in place.golden.parent.iterdir() if "golden" in path.name] == [
        "golden.json"
    ]


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "count": (lambda f: f.update(tokens=[1, *f["tokens"][1:]]), "numerator is not the sum"),
    "value": (lambda f: f.update(value=9.0), "value is not its numerator over"),
    "interval": (lambda f: f.update(low=3.5), "value is not within its interval"),
    "lists": (lambda f: f.update(tokens=[516], rounds=[180]), "no count for every prompt"),
    "negative": (lambda f: f.update(rounds=[-1] * 6), "counts that are none"),
    "passes": (lambda f: f.pop("passes"), "has no passes"),
    "no pass": (lambda f: f.update(passes=0), "no count for every prompt"),
    "true": (lambda f: f.update(passes=True), "has no passes"),
    "date": (lambda f: f.update(date=7), "has no date"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_figure_that_does_not_add_up_is_refused(what: str, place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    content = place.content()
    (entry,) = content["entries"]
    change, why = BROKEN[what]
    change(entry["versions"]["0.5.23"])
    place.golden.write_text(json.dumps(content))
    before = place.golden.read_bytes()
    assert place.gate("first", "store=true") == 2
    error = capsys.readouterr().err
    assert why in error
    assert "0.5.23 of entry 1" in error
    assert place.golden.read_bytes() == before


def test_two_entries_of_one_key_are_refused(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    content = place.content()
    place.golden.write_text(json.dumps({**content, "entries": content["entries"] * 2}))
    assert place.gate("first") == 2
    assert "two entries have the same key" in capsys.readouterr().err


def test_other_entries_and_what_a_person_added_stay(place: Place) -> None:
    place.store(place.run("first"))
    place.store(place.run("other", prompts=100))
    content = place.content()
    content["entries"][0]["remark"] = "before the upgrade"
    content["note"] = "  [ 1,  2 ]  "
    place.golden.write_text(json.dumps(content))
    place.store(place.run("second", "0.5.24", MORE))
    now = place.content()
    assert now["entries"][0]["versions"].pop("0.5.24")["run"] == "second"
    assert now == content


def test_a_person_can_read_it(place: Place) -> None:
    place.store(place.run("first"))
    assert '"rounds": [30, 30, 30, 30, 30, 30],\n' in place.golden.read_text()


def test_a_write_that_is_cut_short_leaves_the_old_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.store(place.run("first"))
    second, before = place.run("second", "0.5.24", MORE), place.golden.read_bytes()

    def cut(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", cut)  # as a kill there: all is written, nothing is renamed
    assert place.gate(second, "store=true") == 1
    assert place.golden.read_bytes() == before
    monkeypatch.undo()
    place.store(second)
    assert [p.name for p in place.golden.parent.iterdir() if p.is_file()] == ["golden.json"]


def waits_for_a_lock(process: subprocess.Popen[str]) -> bool:
    """Whether the kernel has it wait; a command that has ended did not."""
    assert process.poll() is None, process.communicate()
    waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(words[1] == "->" and words[5] == str(process.pid) for words in waiting)


@pytest.mark.runs
def test_of_two_commands_at_once_neither_loses_the_others_figure(place: Place) -> None:
    runs = [place.run("first"), place.run("second", "0.5.24")]
    gate = [sys.executable, "-m", "orchestrator", "gate", f"golden={place.golden}", "store=true"]
    commands = [
        subprocess.Popen(
            [*gate, f"run={run}", f"results={place.results}"],
            cwd=CLONE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for run in runs
    ]
    try:
        with gate_file.alone(place.golden):
            end = time.monotonic() + 60
            while not all(map(waits_for_a_lock, commands)):
                assert time.monotonic() < end
                time.sleep(0.01)
            assert not place.golden.exists()
        for command in commands:
            said, _ = command.communicate(timeout=60)
            assert command.returncode == 0, said
    finally:
        for command in commands:
            command.kill()
            command.communicate()
    (entry,) = place.content()["entries"]
    assert set(entry["versions"]) == {"0.5.23", "0.5.24"}


def test_a_link_to_the_file_stays_a_link(place: Place, tmp_path: Path) -> None:
    kept_at = tmp_path / "kept.json"
    place.golden.symlink_to(kept_at)
    place.store(place.run("first"))
    assert place.golden.is_symlink()
    assert json.loads(kept_at.read_bytes())["format"] == 1


def test_a_file_that_cannot_be_written_is_said(place: Place, capsys: Output) -> None:
    place.golden.mkdir()
    assert place.gate(place.run("first"), "store=true") == 2
    assert f"golden={place.golden} cannot be read" in capsys.readouterr().err
    place.golden.rmdir()
    place.golden.symlink_to("none/golden.json")
    assert place.gate("first", "store=true") == 2
    said = capsys.readouterr().err
    assert f"golden={place.golden}: its folder cannot be locked (No such file or directory)" in said
    with pytest.raises(InputError, match="cannot be written"):
        gate_file.write_golden(Path("/proc/golden.json"), {})
