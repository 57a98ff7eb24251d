"""Layouts of captured data: recognised by looking, read into one form, declared or by their rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.data import find_data
from eagle3.data.form import DataForm
from eagle3.errors import BadInput
from eagle3.samples import LeftOut, Sample, check_stored, read_samples
from tests.eagle3.dumps import (
    HIDDEN,
    LAYERS,
    STATES,
    VOCAB,
    make_texts,
    save_pt,
    write_pt_shards,
    write_specforge,
    write_speculators,
    write_speculators_v0,
)

WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "pt_shards": ("pt_shards", write_pt_shards),
    "speculators_v0": ("speculators_v0", write_speculators_v0),
    "speculators": ("speculators", write_speculators),
    "specforge": ("specforge", write_specforge),
    "specforge.gz": ("specforge", partial(write_specforge, zipped=True)),
}
NORMED = {"speculators_v0", "specforge"}
find = partial(find_data, hidden=HIDDEN, num_layers=LAYERS)


def read(form: DataForm, **more: Any) -> list[Sample]:
    return list(read_samples(form, vocab=VOCAB, hidden=HIDDEN, **more))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("writer", WRITERS)
def test_every_layout_gives_the_same_rows(writer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    layout, write = WRITERS[writer]
    texts = make_texts(dtype=dtype)
    write(tmp_path, texts)
    form = find(tmp_path, states=[*STATES, LAYERS])
    assert (form.layout, len(form.files), form.teacher) == (layout, 3, 3)
    assert [slot.state for slot in form.slots] == [*STATES, LAYERS]
    assert [slot.role for slot in form.slots] == ["aux", "aux", "aux", "last"]
    assert {slot.origin for slot in form.slots} == {"data.states"}
    for sample, text in zip(read(form), texts, strict=True):
        end = text.normed if layout in NORMED else text.end
        assert torch.equal(sample.input_ids, text.ids)
        assert torch.equal(sample.loss_mask, text.mask.bool())
        assert all(map(torch.equal, sample.stored, (*text.aux, end)))
        assert {h.dtype for h in sample.stored} == {dtype}
        assert torch.equal(sample.aux([31, 0]), torch.cat([text.aux[2], text.aux[0]], -1).float())
        assert sample.teacher is not None
        assert torch.equal(sample.teacher, end.float())
        assert sample.teacher_normed == (layout in NORMED)
        # Behind the norm it is no state that a drafter could be fed.
        assert (LAYERS in sample.states) == (layout not in NORMED)


@pytest.mark.parametrize(
    ("writer", "why", "names", "last"),
    [
        ("pt_shards", "data_0.pt holds hidden_states, a list of 4", "hidden_states[0]", None),
        ("speculators_v0", "data_0.pt holds hidden_state and target", "hidden_state[0:4]", LAYERS),
        ("speculators", "3 files are called hs_*.safetensors", "hidden_states[:, 0]", LAYERS),
        (
            "specforge",
            "data_0.ckpt holds aux_hidden_state and hidden_state",
            "aux_hidden_state[0:4]",
            LAYERS,
        ),
    ],
)
def test_without_a_declaration_only_a_layouts_rule_names_states(
    writer: str, why: str, names: str, last: int | None, tmp_path: Path
) -> None:
    WRITERS[writer][1](tmp_path, make_texts())
    form = find(tmp_path)
    assert form.why.endswith(why)
    assert form.slots[0].name == names
    assert [slot.state for slot in form.slots] == [None, None, None, last]
    assert [slot.origin for slot in form.slots[:3]] == ["not declared"] * 3
    assert form.slots[3].origin.startswith("not declared" if last is None else "rule of ")
    sample = read(form)[0]
    assert list(sample.states) == ([LAYERS] if writer == "speculators" else [])
    with pytest.raises(BadInput, match=r"asks for state 3, but (nobody says|the data stores only)"):
        sample.aux([3])
    with pytest.raises(BadInput, match=r"asks for state 3, but (nobody says|the data stores only)"):
        check_stored(form, [3])


@pytest.mark.parametrize("writer", ["speculators_v0", "speculators", "specforge"])
def test_the_last_state_may_be_left_to_the_layouts_rule(writer: str, tmp_path: Path) -> None:
    WRITERS[writer][1](tmp_path, make_texts())
    slots = find(tmp_path, states=STATES).slots
    assert [slot.state for slot in slots] == [*STATES, LAYERS]
    assert [slot.origin for slot in slots[:3]] == ["data.states"] * 3
    assert slots[3].origin.startswith("rule of ")


def test_a_state_behind_the_norm_is_not_fed_to_a_drafter(tmp_path: Path) -> None:
    write_specforge(tmp_path, make_texts())
    form = find(tmp_path, states=STATES)
    with pytest.raises(BadInput, match=rf"state {LAYERS}, but .* behind the target's final norm"):
        check_stored(form, [0, LAYERS])
    check_stored(form, [31, 0])


def test_a_last_slot_that_is_not_the_targets_end_is_said_aloud(tmp_path: Path) -> None:
    write_speculators(tmp_path, make_texts())
    form = find(tmp_path, states=[*STATES, 59])
    assert form.slots[3].state == 59
    assert "taken for the target's end (state 61)" in form.notes[-1]
    assert "data.states says it is state 59" in form.notes[-1]
    assert list(read(form)[0].states) == [*STATES, 59]


@pytest.mark.parametrize(
    ("writer", "states", "words"),
    [
        ("pt_shards", [0, 3, 31], r"lists 3 states .* store 4 \(hidden_states\[0\],"),
        ("pt_shards", [0, 3, 31, 59, 61], "lists 5 states"),
        ("specforge", [0, 3], "list the canonical 3 aux states, and the last if you like"),
        ("specforge", [0, 3, 31, 59], "hidden_state is state 59, but in this layout .* state 61"),
        ("speculators_v0", [0, 3, 31, 59], "target is state 59, but in this layout"),
        ("pt_shards", [0, 3, 31, 62], "lists state 62, but the target has 61 decoder layers"),
        ("pt_shards", [-1, 3, 31, 59], "lists state -1"),
        ("pt_shards", [0, 3, 3, 59], "lists state 3 twice"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(
    writer: str, states: list[int], words: str, tmp_path: Path
) -> None:
    WRITERS[writer][1](tmp_path, make_texts())
    with pytest.raises(BadInput, match=rf"data\.states .*{words}"):
        find(tmp_path, states=states)


@pytest.mark.parametrize("writer", WRITERS)
def test_capture_json_declares_in_every_layout_and_must_agree(writer: str, tmp_path: Path) -> None:
    WRITERS[writer][1](tmp_path, make_texts())
    listed = [*STATES, LAYERS]
    (tmp_path / "capture.json").write_text(json.dumps({"states": listed}))
    assert {slot.origin for slot in find(tmp_path).slots} == {"capture.json"}
    assert [slot.state for slot in find(tmp_path, states=listed).slots] == listed
    with pytest.raises(
        BadInput, match=r"data\.states says \[0, 3, 31\], but .*json says \[0, 3, 31, 61\]"
    ):
        find(tmp_path, states=STATES)
    (tmp_path / "capture.json").write_text(json.dumps({"states": 3}))
    with pytest.raises(BadInput, match="does not list the stored states"):
        find(tmp_path)


def test_two_layouts_in_one_folder_are_an_error_that_names_both(tmp_path: Path) -> None:
    write_pt_shards(tmp_path, make_texts())
    write_specforge(tmp_path, make_texts())
    with pytest.raises(BadInput, match=r"2 layouts: pt_shards \(.*\); specforge \(.*data\.layout"):
        find(tmp_path)
    assert len(find(tmp_path, layout="specforge").files) == 3
    assert find(tmp_path, layout="pt_shards").why == "data.layout says so"


def test_two_layouts_of_one_ending_are_told_apart(tmp_path: Path) -> None:
    write_pt_shards(tmp_path / "a", make_texts())
    write_speculators_v0(tmp_path / "b", make_texts())
    with pytest.raises(BadInput, match=r"2 layouts: pt_shards .*; speculators_v0 "):
        find(tmp_path)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("specforge", "holds no files of the layout specforge"),
        ("speculators", "holds no files of the layout speculators"),
        ("speculators_v0", r"data_0\.pt lacks hidden_state; it has input_ids, hidden_states"),
        ("modelopt", "data.layout=modelopt is none of pt_shards, specforge, speculators"),
    ],
)
def test_a_layout_that_is_forced_must_fit(layout: str, words: str, tmp_path: Path) -> None:
    write_pt_shards(tmp_path, make_texts())
    with pytest.raises(BadInput, match=words):
        find(tmp_path, layout=layout)


def test_what_is_in_no_layout_is_described(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        find(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"in no layout that is known .*: it holds no files"):
        find(tmp_path)
    (tmp_path / "a.npy").touch()
    with pytest.raises(BadInput, match=r"it holds 1 × \.npy"):
        find(tmp_path)
    save_pt({"input_ids": 1, "aux_hidden_states": 2}, tmp_path / "x" / "7.pt")
    with pytest.raises(BadInput, match=r"7\.pt holds input_ids, aux_hidden_states"):
        find(tmp_path)
    (tmp_path / "x" / "7.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(
        BadInput, match=r"no layout .*7\.pt is damaged or truncated: .* not a ZIP archive$"
    ):
        find(tmp_path)


@pytest.mark.parametrize("writer", ["speculators_v0", "specforge"])
def test_a_width_that_is_no_multiple_of_the_targets_is_refused(writer: str, tmp_path: Path) -> None:
    WRITERS[writer][1](tmp_path, make_texts())
    with pytest.raises(BadInput, match=r"is 12 wide, which is no multiple of .* hidden size 5"):
        find_data(tmp_path, hidden=5, num_layers=LAYERS)
    # A divisor is a multiple too; the last state's width then gives it away.
    form = find_data(tmp_path, hidden=6, num_layers=LAYERS)
    with pytest.raises(BadInput, match="are 4, 6 wide, but the target's hidden size is 6"):
        next(read_samples(form, vocab=VOCAB, hidden=6))


def test_any_number_of_aux_states_is_read(tmp_path: Path) -> None:
    (text,) = make_texts(1)
    wide = torch.cat([*text.aux, *text.aux], -1)
    content = {"input_ids": text.ids, "loss_mask": text.mask, "hidden_state": text.normed}
    save_pt({**content, "aux_hidden_state": wide}, tmp_path / "data_0.ckpt")
    save_pt({**content, "aux_hidden_state": wide[:, :-HIDDEN]}, tmp_path / "data_1.ckpt")
    form = find(tmp_path, states=[0, 3, 31, 40, 50, 59])
    with pytest.raises(
        BadInput, match=r"data_1\.ckpt: aux_hidden_state is 20 wide, which 6 states"
    ):
        read(form)
    assert len(read(form, max_samples=1)[0].states) == 6


def test_files_come_in_numeric_order_and_trainers_side_files_are_left_out(tmp_path: Path) -> None:
    texts = make_texts()
    for name, text in zip(("b/data_2000", "a/data_10", "a/data_9"), texts, strict=True):
        content = {"input_ids": text.ids, "loss_mask": text.mask, "hidden_states": [*text.aux]}
        save_pt(content, tmp_path / f"{name}.pt")
    save_pt({"d2t": 1}, tmp_path / "vocab_mapping" / "vocab_mapping.pt")
    form = find(tmp_path)
    assert [path.stem for path in form.files] == ["data_9", "data_10", "data_2000"]
    assert form.notes == ("not taken for samples: vocab_mapping/vocab_mapping.pt",)


def test_a_sample_that_lies_there_plain_and_zipped_is_not_counted_twice(tmp_path: Path) -> None:
    write_specforge(tmp_path, make_texts())
    write_specforge(tmp_path, make_texts(1), zipped=True)
    with pytest.raises(BadInput, match=r"data_0\.ckpt lies there plain and as data_0\.ckpt\.gz"):
        find(tmp_path)


def test_a_file_of_states_belongs_to_its_row_of_the_dataset(tmp_path: Path) -> None:
    texts = make_texts(12)
    write_speculators(tmp_path, texts, indices=[10, 2, 9], shards=5)
    form = find(tmp_path)
    assert form.notes == (f"9 of 12 rows of the dataset of {tmp_path} have no states",)
    assert [path.name for path in form.files] == [f"hs_{i}.safetensors" for i in (2, 9, 10)]
    for sample, i in zip(read(form), (2, 9, 10), strict=True):
        assert torch.equal(sample.input_ids, texts[i].ids)
        assert torch.equal(sample.stored[1], texts[i].aux[1])


def test_states_may_lie_beside_the_dataset_or_be_named_themselves(tmp_path: Path) -> None:
    texts = make_texts()
    write_speculators(tmp_path, texts)
    assert len(read(find(tmp_path / "hidden_states"))) == 3
    for path in find(tmp_path).files:
        path.rename(tmp_path / path.name)
    assert len(read(find(tmp_path))) == 3
    write_speculators(tmp_path, texts)
    with pytest.raises(BadInput, match="both beside and in hidden_states/"):
        find(tmp_path)


def test_states_without_their_dataset_are_refused(tmp_path: Path) -> None:
    write_speculators(tmp_path, make_texts())
    arrow = tmp_path / "data-00001-of-00002.arrow"
    arrow.write_bytes(arrow.read_bytes()[:300])
    with pytest.raises(BadInput, match=r"00001-of-00002\.arrow is damaged or truncated"):
        find(tmp_path)
    arrow.unlink()
    with pytest.raises(BadInput, match=r"00001-of-00002\.arrow is damaged or truncated"):
        find(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(BadInput, match=r"state\.json does not list the dataset's files"):
        find(tmp_path)
    (tmp_path / "state.json").unlink()
    with pytest.raises(BadInput, match=r"no dataset \(state\.json and \*\.arrow\) lies there"):
        find(tmp_path)


def test_a_host_without_pyarrow_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_speculators(tmp_path, make_texts())
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as the interpreter marks what is not there
    with pytest.raises(BadInput, match="install pyarrow on the host"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"token_ids": torch.full((10,), 7)},
            "token_ids differ at position .* of the dataset's row 1",
        ),
        ({"token_ids": torch.arange(9)}, r"token_ids \(9 tokens\) are not the 10 input_ids"),
        ({"hidden_states": torch.ones(9, 4, HIDDEN)}, "lengths differ: input_ids 10"),
        (
            {"hidden_states": torch.ones(10, 3, HIDDEN)},
            "stores 3 states, but the data's first file 4",
        ),
        (
            {"hidden_states": torch.ones(10, 4 * HIDDEN)},
            r"floats of shape \[T, L, H\], not .*\[10, 16\]",
        ),
        ({"hidden_states": torch.ones(10, 4, HIDDEN).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"token_ids": None}, "lacks token_ids; it has hidden_states"),
    ],
)
def test_states_that_are_not_of_their_row_are_damaged(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    texts = make_texts()
    write_speculators(tmp_path, texts)
    path = tmp_path / "hidden_states" / "hs_1.safetensors"
    tensors = {k: v for k, v in (load_file(path) | changes).items() if v is not None}
    save_file(tensors, path)
    form = find(tmp_path)
    with pytest.raises(BadInput, match=rf"hs_1\.safetensors.*{words}"):
        read(form)
    left_out = LeftOut()
    assert len(read(form, damaged="skip", left_out=left_out)) == 2
    assert [skipped.path for skipped in left_out.skipped] == [path]


def test_a_file_beyond_the_datasets_rows_is_damaged(tmp_path: Path) -> None:
    write_speculators(tmp_path, make_texts())
    states = tmp_path / "hidden_states"
    (states / "hs_0.safetensors").rename(states / "hs_3.safetensors")
    with pytest.raises(BadInput, match="stands for row 3, but the dataset has only 3 rows"):
        read(find(tmp_path))


def test_float8_states_are_read_as_their_trainer_reads_them(tmp_path: Path) -> None:
    (text,) = make_texts(1)
    write_speculators(tmp_path, [text], shards=1)
    path = tmp_path / "hidden_states" / "hs_0.safetensors"
    states = load_file(path)["hidden_states"].float()
    scales = states.abs().amax((1, 2), keepdim=True) / 448
    eighths = (states / scales).to(torch.float8_e4m3fn)
    tensors = {"token_ids": text.ids, "hidden_states": eighths, "hidden_states_scales": scales}
    save_file(tensors, path)
    (sample,) = read(find(tmp_path, states=STATES))
    expected = eighths.bfloat16() * scales.bfloat16()
    assert torch.equal(sample.states[3], expected[:, 1].float())


class Payload:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("writer", ["pt_shards", "speculators_v0", "specforge"])
def test_a_file_that_contains_code_is_refused_and_not_run(writer: str, tmp_path: Path) -> None:
    WRITERS[writer][1](tmp_path, make_texts())
    path = find(tmp_path).files[1]
    save_pt({"input_ids": Payload(tmp_path / "ran")}, path)
    with pytest.raises(BadInput, match=r"data_1\.\w+ contains pickled code.*not loaded"):
        read(find(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("writer", WRITERS)
def test_damaged_files_are_named_and_counted_and_skipped_only_when_asked(
    writer: str, tmp_path: Path
) -> None:
    texts = make_texts(5)
    WRITERS[writer][1](tmp_path, texts)
    files = find(tmp_path).files
    for i in (0, 3):
        files[i].write_bytes(files[i].read_bytes()[:-40])
    form = find(tmp_path, states=[*STATES, LAYERS])
    with pytest.raises(
        BadInput, match=rf"{files[0].name} is damaged.*\(2 of 5 files cannot be used"
    ):
        read(form)
    with pytest.raises(BadInput, match=r"\(1 of 3 files cannot be used; data\.damaged=skip"):
        read(form, max_samples=3)
    left_out = LeftOut()
    samples = read(form, damaged="skip", left_out=left_out, max_samples=2)
    assert [s.path for s in samples] == [files[1], files[2]]
    left_out = LeftOut()
    samples = read(form, damaged="skip", left_out=left_out)
    assert [s.path for s in samples] == [files[1], files[2], files[4]]
    assert [skipped.path for skipped in left_out.skipped] == [files[0], files[3]]
    (note,) = left_out.notes()
    assert note.startswith("2 damaged files were left out (data.damaged=skip): ")
    assert str(files[3]) in note


def test_data_of_which_nothing_is_left_is_an_error_even_with_skip(tmp_path: Path) -> None:
    write_specforge(tmp_path, make_texts(), zipped=True)
    form = find(tmp_path)
    for path in form.files:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(
        BadInput, match=r"none of the 3 files of .* can be used; the first: .*data_0"
    ):
        read(form, damaged="skip", left_out=LeftOut())
    with pytest.raises(
        BadInput, match=r"none of the 3 files of .* can be read; the first: .*data_0"
    ):
        find(tmp_path, layout="specforge")
    with pytest.raises(ValueError, match="skip with left_out"):
        read(form, damaged="skip")


MEASURE = """
import resource, sys
from pathlib import Path
from eagle3.data import find_data
from eagle3.samples import read_samples

form = find_data(Path(sys.argv[1]), hidden=256, num_layers=61)
for count, sample in enumerate(read_samples(form, vocab=50, hidden=256), start=1):
    del sample
    if count in (5, len(form.files)):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("layout", ["pt_shards", "speculators", "specforge.gz"])
def test_memory_stays_flat_over_many_files(layout: str, tmp_path: Path) -> None:
    length, count = 2048, 40
    ids = torch.zeros(length, dtype=torch.long)
    # 4 states of 1 MiB a file: if they stayed, 35 files more would take 140 MiB more.
    states = torch.ones(length, 4, 256, dtype=torch.bfloat16)
    (text,) = make_texts(1)
    big = type(text)(
        ids=ids, mask=ids + 1, aux=states.unbind(1)[:3], end=states[:, 3], normed=states[:, 3]
    )
    WRITERS[layout][1](tmp_path, [big] * count)
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    early, late = map(int, answer.stdout.split())
    assert late - early < 30 * 1024, f"{early} KiB after 5 files, {late} KiB after {count}"
