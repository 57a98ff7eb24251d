"""Samples: what is read, and every way a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data import find_data
from eagle3.data.form import DataForm
from eagle3.errors import BadInput
from eagle3.metrics import scored_rows
from eagle3.samples import LeftOut, Sample, read_sample, read_samples
from tests.eagle3.dumps import save_pt
from tests.eagle3.odd import KINDS, odd_values

STATES = (0, 3, 31, 59)


def content(length: int = 6, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "input_ids": torch.arange(length),
        "loss_mask": torch.tensor([0, 0] + [1] * (length - 2)),
        "hidden_states": [torch.full((length, 4), k + 1.0, dtype=torch.bfloat16) for k in STATES],
        "target_argmax": torch.arange(1, length + 1),
    }
    raw.update(changes)
    return {k: v for k, v in raw.items() if v is not None}


def form_of(folder: Path) -> DataForm:
    """The form of sound data, in which one file may then be wrong."""
    save_pt(content(), folder / "rows_0-2000" / "data_1.pt")
    return find_data(folder, states=STATES, hidden=4, num_layers=61)


def read_one(folder: Path, raw: Any) -> Sample:
    path = save_pt(raw, folder / "rows_0-2000" / "data_7.pt")
    return read_sample(path, form_of(folder), vocab=50, hidden=4)


def test_states_are_found_by_their_canonical_number(tmp_path: Path) -> None:
    sample = read_one(tmp_path, content())
    aux = sample.aux([31, 0, 59])
    assert aux.shape == (6, 12)
    assert aux.dtype == torch.float32
    assert aux[0].tolist() == [32.0] * 4 + [1.0] * 4 + [60.0] * 4
    assert sample.loss_mask.tolist() == [False, False, True, True, True, True]
    assert sample.teacher[0].tolist() == [60.0] * 4


def test_a_leading_batch_dimension_is_taken_off(tmp_path: Path) -> None:
    raw = content()
    for key in ("input_ids", "loss_mask", "target_argmax"):
        raw[key] = raw[key][None]
    raw["hidden_states"] = [h[None] for h in raw["hidden_states"]]
    sample = read_one(tmp_path, raw)
    assert sample.aux([3]).shape == (6, 4)
    assert sample.input_ids.shape == sample.loss_mask.shape == (6,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.uint32])
@pytest.mark.parametrize(
    "mask", [torch.bool, torch.float32, torch.int8, torch.bfloat16, torch.uint16]
)
def test_ids_of_any_whole_type_and_masks_of_any_type_are_taken(
    dtype: torch.dtype, mask: torch.dtype, tmp_path: Path
) -> None:
    raw = content()
    raw["input_ids"], raw["loss_mask"] = raw["input_ids"].to(dtype), raw["loss_mask"].to(mask)
    sample = read_one(tmp_path, raw)
    assert sample.input_ids.dtype is torch.int64
    assert sample.loss_mask.tolist() == [False, False, True, True, True, True]


def test_a_state_that_is_not_stored_is_named_with_those_that_are(tmp_path: Path) -> None:
    sample = read_one(tmp_path, content())
    with pytest.raises(
        BadInput, match=r"asks for state 2, 30, but the data stores only 0, 3, 31, 59"
    ):
        sample.aux([0, 2, 30])


# torch's own, while it loads quantised and sparse tensors
TORCHS_OWN = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated:UserWarning",
)

HALF = torch.tensor([1.0] * 5 + [7e4], dtype=torch.float16)[:, None].expand(6, 4).clone()
NAN = torch.tensor([1.0] * 4 + [torch.nan, 1.0])[:, None].expand(6, 4).clone()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": None}, "lacks loss_mask; it has input_ids"),
        ({"loss_mask": torch.zeros(6, dtype=torch.long)}, "loss_mask is empty"),
        ({"loss_mask": torch.tensor([0, 0, 0, 0, 0, 1])}, "loss_mask has no two neighbouring pos"),
        ({"loss_mask": torch.tensor([1, 0, 1, 0, 1, 0])}, "loss_mask has no two neighbouring pos"),
        ({"loss_mask": torch.tensor([1, 1, 0, 0, 0, 1])}, "loss_mask has no two neighbouring pos"),
        ({"loss_mask": torch.ones(6, dtype=torch.complex64)}, "must be zeros and ones, not torch.comp"),
        ({"loss_mask": torch.ones(5, dtype=torch.long)}, "lengths differ"),
        ({"loss_mask": torch.tensor([0, 0, 1, 2, 1, 1])}, "other values than 0 and 1, such as 2"),
        ({"loss_mask": torch.tensor([0, 0, 1, 0.5, 1, 1])}, "other values than 0 and 1, .* 0.5"),
        ({"loss_mask": [0, 0, 1, 1, 1, 1]}, "loss_mask is no tensor but list"),
        ({"input_ids": torch.tensor([0, 1, 2, 3, 4, 50])}, "reach from 0 to 50.*has 50 ids"),
        ({"input_ids": torch.tensor([0, -1, 2, 3, 4, 5])}, "reach from -1 to 5"),
        ({"input_ids": torch.rand(6)}, "input_ids must be whole numbers"),
        ({"input_ids": torch.ones(6, dtype=torch.bool)}, "must be whole numbers .* torch.bool"),
        ({"input_ids": torch.tensor(3)}, r"input_ids must have the shape \[T\], .*not \[\]"),
        ({"input_ids": torch.ones(2, 6, dtype=torch.long)}, r"shape \[T\], .*not \[2, 6\]"),
        ({"hidden_states": [torch.ones(6, 4)] * 3}, "stores 3 states, but the data's other files 4"),
        ({"hidden_states": [torch.ones(5, 4)] * 4}, "lengths differ"),
        ({"hidden_states": torch.ones(4, 6, 4)}, "no list of tensors"),
        ({"hidden_states": [torch.ones(2, 6, 4)] * 4}, r"shape \[T, H\], .*not \[2, 6, 4\]"),
        ({"hidden_states": [torch.ones(6, 4).long()] * 4}, r"\[0\] is stored as torch.int64"),
        ({"hidden_states": [torch.ones(6, 5)] * 4}, "are 5 wide, but the target's hidden size is 4"),
        ({"hidden_states": [torch.full((6, 4), torch.inf)] * 4}, r"\[0\] holds NaN .* in 6 of 6 rows"),
        ({"hidden_states": [torch.ones(6, 4)] * 3 + [NAN]}, r"\[3\] holds NaN .* 1 of 6 .* row 4"),
        ({"hidden_states": [torch.ones(6, 4)] * 3 + [HALF]}, "float16 ends at 65504.* in bfloat16"),
        ({"hidden_states": [torch.full((6, 4), 1e300, dtype=torch.float64)] * 4}, "ends at 3.4e38"),
        ({"target_argmax": torch.ones(3, dtype=torch.long)}, "target_argmax has 3 positions, not 6"),
        ({"target_argmax": torch.full((6,), 50)}, "target_argmax reach from 50 to 50"),
    ],
)  # fmt: skip
def test_a_wrong_sample_is_named_with_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=rf"data_7\.pt.*{words}"):
        read_one(tmp_path, content(**changes))


@TORCHS_OWN
@pytest.mark.parametrize("key", ["input_ids", "loss_mask", "hidden_states", "target_argmax"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_an_odd_kind_is_named(key: str, kind: str, tmp_path: Path) -> None:
    raw, make = content(), KINDS[kind]
    raw[key] = [make(h) for h in raw[key]] if key == "hidden_states" else make(raw[key])
    words = rf"data_7\.pt: {key}(\[0\])? (is a {kind} tensor; store it|.*complex)"
    with pytest.raises(BadInput, match=words):
        read_one(tmp_path, raw)


def test_a_saved_parameter_asks_for_no_gradients_any_more(tmp_path: Path) -> None:
    raw = content()
    raw["hidden_states"] = [torch.nn.Parameter(h) for h in raw["hidden_states"]]
    sample = read_one(tmp_path, raw)
    assert not sample.aux([0, 59]).requires_grad
    assert not any(h.requires_grad for h in (*sample.stored, sample.teacher))


def test_states_that_float32_holds_are_finite_in_every_type(tmp_path: Path) -> None:
    for dtype, most in ((torch.float64, 1e38), (torch.bfloat16, 3e38)):
        raw = content(hidden_states=[torch.full((6, 4), -most, dtype=dtype)] * 4)
        assert read_one(tmp_path, raw).aux([0]).isfinite().all()


def test_a_sample_that_cannot_be_scored_is_damage_that_can_be_skipped(tmp_path: Path) -> None:
    form_of(tmp_path)
    for i, places in enumerate(([5], [2, 4], [0, 1])):
        raw = content(loss_mask=torch.zeros(6).index_fill(0, torch.tensor(places), 1))
        save_pt(raw, tmp_path / "rows_0-2000" / f"data_{i + 2}.pt")
    form = find_data(tmp_path, states=STATES, hidden=4, num_layers=61)
    with pytest.raises(BadInput, match=r"data_2\.pt: loss_mask has no two .*3 of 4 files cannot"):
        list(read_samples(form, vocab=50, hidden=4))
    left_out = LeftOut()
    samples = list(
        read_samples(form, vocab=50, hidden=4, damaged="skip", left_out=left_out, max_samples=2)
    )
    assert [sample.path.name for sample in samples] == ["data_1.pt"]
    assert [skipped.path.name for skipped in left_out.skipped] == [
        f"data_{i}.pt" for i in (2, 3, 4)
    ]


def check_sound(sample: Sample) -> None:
    """What a job relies on in every sample that is read."""
    length = len(sample.input_ids)
    assert sample.input_ids.dtype is torch.int64
    assert sample.loss_mask.dtype is torch.bool
    assert len(scored_rows(sample.loss_mask)) > 0
    assert {h.shape for h in sample.stored} == {(length, 4)}
    for h in (sample.teacher, *sample.states.values()):
        assert (h.shape, h.dtype) == ((length, 4), torch.float32)
        assert h.isfinite().all()
        assert not h.requires_grad
    if sample.target_argmax is not None:
        assert sample.target_argmax.shape == (length,)


@st.composite
def odd_dicts(draw: st.DrawFn, sound: dict[str, Any]) -> dict[str, Any]:
    """A sample's dict in which up to three entries are anything else, or not there."""
    raw = dict(sound)
    for key in draw(st.lists(st.sampled_from(sorted(sound)), min_size=1, max_size=3, unique=True)):
        if key == "hidden_states" and draw(st.booleans()):
            raw[key] = [*raw[key][1:], draw(odd_values())]
        elif draw(st.integers(0, 9)):
            raw[key] = draw(odd_values())
        else:
            del raw[key]
    return raw


DICTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pt_shards": ("data_1.pt", content()),
    "speculators_v0": (
        "data_1.pt",
        {
            **content(hidden_states=None),
            "hidden_state": torch.ones(6, 12),
            "target": torch.ones(6, 4),
        },
    ),
    "specforge": (
        "data_1.ckpt",
        {
            **content(hidden_states=None),
            "aux_hidden_state": torch.ones(1, 6, 12),
            "hidden_state": torch.ones(1, 6, 4),
        },
    ),
}


@TORCHS_OWN
@pytest.mark.parametrize("layout", DICTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_a_dict_holds_is_a_sample_or_a_bad_input(layout: str, data: st.DataObject) -> None:
    name, sound = DICTS[layout]
    with TemporaryDirectory() as folder:
        path = save_pt(sound, Path(folder, "sound", name))
        form = find_data(path.parent, layout=layout, hidden=4, num_layers=61)
        check_sound(read_sample(path, form, vocab=50, hidden=4))
        path = save_pt(data.draw(odd_dicts(sound)), Path(folder, "odd", name))
        for told_by in (folder, path.parent):  # once beside the sound file's form, once its own
            fault = path.name
            try:
                if told_by == path.parent:
                    form = find_data(path.parent, layout=layout, hidden=4, num_layers=61)
                check_sound(read_sample(path, form, vocab=50, hidden=4))
            except BadInput as error:
                fault = str(error)
            assert path.name in fault


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_text_too_short_to_score_is_named(length: int, tmp_path: Path) -> None:
    raw = content(length=6)
    cut = {k: v[:length] for k, v in raw.items() if k != "hidden_states"}
    states = [h[:length] for h in raw["hidden_states"]]
    with pytest.raises(BadInput, match=r"data_7\.pt (holds no|has only \d) tokens"):
        read_one(tmp_path, {**cut, "hidden_states": states})


def padded(rows: int, mask: list[int], front: bool = False) -> dict[str, Any]:
    """A sample with rows of zeros behind (or in front of) 6 real ones."""
    raw, zeros = content(), torch.zeros(rows, 4, dtype=torch.bfloat16)
    ids = torch.zeros(rows, dtype=torch.long)

    def pad(tensor: torch.Tensor, fill: torch.Tensor) -> torch.Tensor:
        return torch.cat([fill, tensor] if front else [tensor, fill])

    return {
        "input_ids": pad(raw["input_ids"], ids - 100),
        "loss_mask": torch.tensor(mask),
        "hidden_states": [pad(h, zeros) for h in raw["hidden_states"]],
        "target_argmax": pad(raw["target_argmax"], ids),
    }


def test_padding_behind_a_text_is_cut_off_and_said(tmp_path: Path) -> None:
    sample = read_one(tmp_path, padded(3, [0, 0, 1, 1, 1, 1, 0, 0, 0]))
    assert sample.padding == 3
    assert len(sample.input_ids) == len(sample.loss_mask) == len(sample.stored[2]) == 6
    assert sample.target_argmax is not None
    assert len(sample.target_argmax) == 6
    left_out = LeftOut()
    form = find_data(tmp_path, states=STATES, hidden=4, num_layers=61)
    assert len(list(read_samples(form, vocab=50, hidden=4, left_out=left_out))) == 2
    (note,) = left_out.notes()
    assert note.startswith(
        "3 rows of padding (zero in every state) were cut off the ends of 1 samples"
    )


def test_padding_that_is_scored_or_stands_in_front_is_damage(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"last 3 rows are zero .* loss_mask scores 2 of them"):
        read_one(tmp_path, padded(3, [0, 0, 1, 1, 1, 1, 1, 1, 0]))
    with pytest.raises(BadInput, match="row 0 is zero in every state"):
        read_one(tmp_path, padded(2, [0, 0, 0, 0, 1, 1, 1, 1], front=True))


def test_a_row_that_is_zero_in_one_state_only_is_a_row(tmp_path: Path) -> None:
    raw = content()
    raw["hidden_states"][0][-1] = 0  # a token whose embedding is zero
    assert read_one(tmp_path, raw).padding == 0


@pytest.mark.parametrize("keep", [0, 10, 600])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = save_pt(content(), tmp_path / "rows_0-2000" / "data_7.pt")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"data_7\.pt is damaged or truncated"):
        read_sample(path, form_of(tmp_path), vocab=50, hidden=4)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is only a Git LFS pointer",
        ),
        (b"hello, this is no torch file", "is damaged or no torch file: it starts with b'hello, t"),
        (bytes(3000), "is damaged or no torch file"),
        (b"\x80\x02" + b"\xef" * 3000, "is damaged"),
    ],
)
def test_a_file_that_is_something_else_is_not_taken_for_code(
    start: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows_0-2000" / "data_7.pt"
    form = form_of(tmp_path)
    path.write_bytes(start)
    with pytest.raises(BadInput, match=rf"data_7\.pt {words}"):
        read_sample(path, form, vocab=50, hidden=4)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_any_flipped_bit_in_a_files_pickle_is_a_bad_input_or_harmless(tmp_path: Path) -> None:
    form = form_of(tmp_path)
    path = save_pt(content(), tmp_path / "rows_0-2000" / "data_7.pt")
    sound = path.read_bytes()
    start = sound.index(b"\x80\x02}")
    refused = 0
    for place in range(start, start + 400):
        broken = bytearray(sound)
        broken[place] ^= 1 << (place % 8)
        path.write_bytes(broken)
        try:
            read_sample(path, form, vocab=50, hidden=4)
        except BadInput:
            refused += 1
    assert refused > 100
