"""Layouts of captured data: recognised by looking, read into one form, declared or by their rule."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
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
from tests.eagle3.odd import tensors as odd_tensors

WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "pt_shards": ("pt_shards", write_pt_shards),
    "speculators_v0": ("speculators_v0", write_speculators_v0),
    "speculators": ("speculators", write_speculators),
    "specforge": ("specforge", write_specforge),
    "specforge.gz": ("specforge", partial(write_specforge, zipped=True)),
}
NORMED = {"speculators_v0", "specforge"}
NOBODY = 65534
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


@pytest.mark.parametrize("writer", WRITERS)
def test_a_first_file_of_another_form_is_damage_like_any_other(writer: str, tmp_path: Path) -> None:
    layout, write = WRITERS[writer]
    texts = make_texts(5)
    # One aux state fewer than the others store, in the file that comes first.
    write(tmp_path, [replace(texts[0], aux=texts[0].aux[:2]), *texts[1:]])
    form = find(tmp_path, states=[*STATES, LAYERS])
    words = "8 wide, which 3 states do not" if layout in NORMED else "stores 3 states, but .* 4"
    with pytest.raises(BadInput, match=rf"{form.files[0].name}.* {words}.*\(1 of 5 files cannot"):
        read(form)
    left_out = LeftOut()
    assert len(read(form, damaged="skip", left_out=left_out)) == 4
    assert [skipped.path for skipped in left_out.skipped] == [form.files[0]]


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


@pytest.mark.parametrize("writer", WRITERS)
def test_links_to_folders_are_followed(writer: str, tmp_path: Path) -> None:
    WRITERS[writer][1](tmp_path / "elsewhere", make_texts(5))
    data = tmp_path / "data"
    data.mkdir()
    for path in (tmp_path / "elsewhere").iterdir():
        (data / path.name).symlink_to(path)
    samples = read(find(data))
    assert len(samples) == 5
    assert all(data in sample.path.parents for sample in samples)


def test_a_link_that_leads_upwards_ends_there(tmp_path: Path) -> None:
    write_pt_shards(tmp_path / "data", make_texts())
    (tmp_path / "data" / "rows_0-2" / "up").symlink_to(tmp_path)
    (tmp_path / "data" / "rows_0-2" / "round").symlink_to(tmp_path / "data" / "rows_0-2")
    assert len(find(tmp_path / "data").files) == 3


def test_a_folder_of_samples_that_two_ways_lead_to_is_refused(tmp_path: Path) -> None:
    write_pt_shards(tmp_path, make_texts())
    (tmp_path / "empty").mkdir()
    (tmp_path / "still_empty").symlink_to("empty")
    assert len(find(tmp_path).files) == 3
    (tmp_path / "latest").symlink_to("rows_2-4")
    with pytest.raises(BadInput, match=r"/latest and .*/rows_2-4 are the same folder, .* twice"):
        find(tmp_path)


@pytest.mark.parametrize("target", ["gone", "rows_4-6"])
def test_a_link_that_leads_nowhere_is_named(target: str, tmp_path: Path) -> None:
    write_pt_shards(tmp_path, make_texts())
    (tmp_path / "rows_4-6").symlink_to(target)
    with pytest.raises(BadInput, match="/rows_4-6 is a link that leads nowhere"):
        find(tmp_path)


@contextmanager
def somebody_else() -> Iterator[None]:
    """Within the block not root, who may list every folder."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_listed_is_named() -> None:
    with TemporaryDirectory() as name:  # pytest's own folders let nobody else in
        folder = Path(name)
        folder.chmod(0o755)
        write_pt_shards(folder, make_texts())
        (folder / "rows_2-4").chmod(0)
        words = "/rows_2-4 cannot be listed: Permission denied"
        with somebody_else(), pytest.raises(BadInput, match=words):
            find(folder)
        (folder / "rows_2-4").chmod(0o700)


def test_a_row_that_two_files_stand_for_is_not_counted_twice(tmp_path: Path) -> None:
    write_speculators(tmp_path, make_texts())
    states = tmp_path / "hidden_states"
    shutil.copy(states / "hs_1.safetensors", states / "hs_0001.safetensors")
    words = r"hs_(1|0001)\.safetensors and hs_(1|0001)\.safetensors both stand for row 1"
    with pytest.raises(BadInput, match=words):
        find(tmp_path)


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
    for listed in ({}, {"_data_files": []}, {"_data_files": ["data.arrow"]}):
        (tmp_path / "state.json").write_text(json.dumps(listed))
        with pytest.raises(BadInput, match=r"state\.json does not list the dataset's files"):
            find(tmp_path)
    (tmp_path / "state.json").unlink()
    with pytest.raises(BadInput, match=r"no dataset \(state\.json and \*\.arrow\) lies there"):
        find(tmp_path)


CELLS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=2)
    | st.binary(max_size=2)
    | st.decimals(allow_nan=False, places=2, min_value=0, max_value=9)
    | st.datetimes(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_a_dump_and_its_dataset_hold_is_a_sample_or_a_bad_input(
    data: st.DataObject,
) -> None:
    texts = make_texts(1)
    with TemporaryDirectory() as name:
        write_speculators(Path(name, "sound"), texts, shards=1)
        sound = find(Path(name, "sound"))
        folder = Path(name, "odd")
        write_speculators(folder, texts, shards=1)
        path = folder / sound.files[0].relative_to(sound.folder)
        row: dict[str, Any] = {
            "input_ids": texts[0].ids.tolist(),
            "loss_mask": texts[0].mask.tolist(),
            "seq_len": len(texts[0].ids),
        }
        for column in data.draw(st.sets(st.sampled_from(sorted(row)), max_size=2)):
            row[column] = data.draw(CELLS)
        write_table(folder, {column: [value] for column, value in row.items()})
        tensors = load_file(path)
        keys = st.sampled_from([*tensors, "hidden_states_scales"])
        for key in data.draw(st.sets(keys, max_size=2)):
            tensors[key] = data.draw(odd_tensors(plain=True))
        save_file(tensors, path)
        for of_its_own in (False, True):  # read by the form of sound data, and by its own
            fault = path.name
            try:
                read(find(folder) if of_its_own else replace(sound, files=(path,)))
            except BadInput as error:
                fault = str(error)
            assert path.name in fault


def write_table(folder: Path, columns: dict[str, list[Any]]) -> None:
    """The only shard of a dataset anew, of whatever types the values are."""
    try:
        table = pa.table(columns)
    except (pa.ArrowException, OverflowError):
        assume(False)  # values of which arrow makes no column
    path = folder / "data-00000-of-00001.arrow"
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"input_ids": [3]}, r"input_ids must have the shape \[T\], .*not \[\]"),
        ({"input_ids": [[]]}, "the dataset's row 0 has 0 input_ids, but its seq_len says 9"),
        ({"input_ids": [None]}, "input_ids of the dataset's row 0 holds something else than num"),
        ({"input_ids": [["a"]]}, "input_ids of the dataset's row 0 holds something else than num"),
        ({"loss_mask": [[{"a": 1}]]}, "loss_mask of the dataset's row 0 holds something else than"),
        ({"loss_mask": [[1.0, 0.5]]}, "loss_mask holds other values than 0 and 1, such as 0.5"),
        ({"seq_len": [8]}, "the dataset's row 0 has 9 input_ids, but its seq_len says 8"),
        ({"seq_len": [[9]]}, r"the dataset's row 0 has 9 input_ids, but its seq_len says \[9\]"),
        ({"seq_len": [None]}, "seq_len of the dataset's row 0 holds something else than numbers"),
    ],
)
def test_a_row_of_the_dataset_that_is_no_text_is_damage(
    columns: dict[str, list[Any]], words: str, tmp_path: Path
) -> None:
    (text,) = make_texts(1)
    write_speculators(tmp_path, [text], shards=1)
    sound = {"input_ids": [text.ids.tolist()], "loss_mask": [text.mask.tolist()], "seq_len": [9]}
    write_table(tmp_path, sound | columns)
    form = find(tmp_path)
    with pytest.raises(BadInput, match=rf"hs_0\.safetensors: {words}"):
        read(form)
    with pytest.raises(BadInput, match="none of the 1 files"):
        read(form, damaged="skip", left_out=LeftOut())


def test_shards_of_different_columns_are_refused(tmp_path: Path) -> None:
    write_speculators(tmp_path, make_texts())
    write_table(tmp_path, {"text": ["a"]})
    (tmp_path / "data-00000-of-00001.arrow").rename(tmp_path / "data-00000-of-00002.arrow")
    with pytest.raises(BadInput, match=r"the files of the dataset .* do not have the same columns"):
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
            "stores 3 states, but the data's other files 4",
        ),
        (
            {"hidden_states": torch.ones(10, 4 * HIDDEN)},
            r"floats of shape \[T, L, H\], not .*\[10, 16\]",
        ),
        ({"hidden_states": torch.ones(10, 4, HIDDEN).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"hidden_states": torch.ones(10, 0, HIDDEN)}, r"shape \[T, L, H\], not .*\[10, 0, 4\]"),
        (
            {"hidden_states_scales": torch.ones(5, 1, 1)},
            r"scales must be .*\[10, 1, 1\].*\[5, 1, 1\]",
        ),
        ({"hidden_states_scales": torch.ones(10)}, r"scales must be .*, not torch.float32 \[10\]"),
        (
            {"hidden_states_scales": torch.ones(HIDDEN)},
            r"scales must be .*, not torch.float32 \[4\]",
        ),
        ({"hidden_states_scales": torch.ones(10, 1, 1).cfloat()}, "not torch.complex64"),
        ({"token_ids": torch.ones(10, dtype=torch.complex64)}, "token_ids must be whole numbers"),
        ({"token_ids": torch.tensor(3)}, r"token_ids must have the shape \[T\]"),
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
