"""Each of the 43 faults is planted in files that were passed in silence, and named; or files cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from orchestrator.__main__ import main
from tests.faults.drafters import LAYOUTS
from tests.faults.edits import sglang
from tests.faults.form import By, Planted, of_layout
from tests.faults.run import Bench
from tests.faults.sound import DUMPS
from tests.faults.table import PLANTED, ROWS, UNSEEN


def cases(*, seen: bool) -> Iterator[object]:
    """Every planted fault in each layout that it can be planted in."""
    for row in ROWS:
        for planted in row.planted if seen else row.unseen:
            for layout in planted.layouts:
                words = planted.name or planted.by.value
                yield pytest.param(planted, layout, id=f"{row.number}-{words}-{layout}")


def test_the_table_has_all_rows_and_each_says_all_it_must() -> None:
    assert [row.number for row in ROWS] == list(range(1, 44))
    for row in ROWS:
        assert row.planted or row.cannot, row.number
        assert bool(row.cannot) == bool(row.instead), row.number
        assert not row.unseen or row.cannot, row.number


@pytest.mark.parametrize("planted", [*PLANTED, *UNSEEN], ids=lambda p: p.how[:40])
def test_a_fault_that_one_layout_cannot_have_says_why(planted: Planted) -> None:
    assert set(planted.layouts) <= {*LAYOUTS, *DUMPS}
    assert bool(planted.only) == bool(planted.left_out)
    assert bool(planted.reads) == (planted not in UNSEEN)


@pytest.mark.parametrize(("planted", "layout"), [*cases(seen=True)])
def test_a_planted_fault_is_named_and_the_sound_files_are_passed_in_silence(
    bench: Bench, planted: Planted, layout: str
) -> None:
    sound = bench.told_of_sound(planted, layout)
    assert sound.findings == ()
    assert sound.refused is None
    told = bench.told(planted, layout)
    expected = {planted.name, *of_layout(planted.also, layout)} - {""}
    assert told.names == expected
    for finding in told.findings:  # each says what it does, and what to write
        assert finding.where
        assert finding.effect
        assert finding.fix or finding.severity == "note"
    said = [f.what for f in told.findings if f.name == planted.name] or [told.refused or ""]
    assert any(planted.reads in what for what in said), said
    refused = of_layout(planted.refused, layout)
    assert (told.refused is None) == (refused is None), told.refused
    assert (refused or "") in (told.refused or "")
    # inspect_data ends where no sample's lengths agree, with the same words.
    assert (told.not_inspected is None) == (planted.by is not By.samples)
    assert planted.by is not By.samples or planted.reads in (told.not_inspected or "")


@pytest.mark.parametrize(("planted", "layout"), [*cases(seen=False)])
def test_what_files_cannot_show_is_not_guessed_at(
    bench: Bench, planted: Planted, layout: str
) -> None:
    told = bench.told(planted, layout)
    assert told.findings == ()
    assert told.refused is None


def test_one_release_reads_the_same_file_right_and_the_next_one_wrong(bench: Bench) -> None:
    told = bench.examined(
        bench.drafter("specforge", "plain"),
        bench.target.folder,
        bench.dump("specforge"),
        sglang("0.5.12", "kimi_k25"),
        None,
        "specforge",
    )
    assert told.findings == ()


def test_layers_tells_both_readings_of_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    (planted,) = [p for p in PLANTED if p.by is By.layers]
    states = {}
    for version in ("0.5.12", "0.5.13"):
        asked = ["engine=sglang", f"engine_version={version}", "engine_class=kimi_k25"]
        assert main(["layers", "[2,3,5]", *asked, "num_layers=8", "json=true"]) == 0
        states[version] = json.loads(capsys.readouterr().out)["states"]
    said = f"[2,3,5] is {states['0.5.12']} in 0.5.12 and {states['0.5.13']} in 0.5.13"
    assert said.replace(", ", ",") == planted.reads
