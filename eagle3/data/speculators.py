"""speculators' dump since 0.5: states in safetensors, text and mask in an arrow dataset beside them.

    FOLDER/state.json, dataset_info.json, *.arrow   the dataset: input_ids, loss_mask, seq_len a row
    FOLDER/hidden_states/hs_{i}.safetensors         the states of row i:
        token_ids      [T]         the text again, as the engine saw it
        hidden_states  [T, L, H]   before any norm; the last of the L is the target's end

The files may lie somewhere else than in hidden_states/; then FOLDER is the one with the files, and
the dataset is looked for there and one above. Float8 files carry hidden_states_scales [T, 1, 1] and
are read as speculators reads them. The trainer leaves a row out whose token_ids are not its
input_ids; here such a file is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.data import look
from eagle3.data.form import DataForm, RawSample, Slot
from eagle3.errors import BadInput
from eagle3.files import first_line, read_json

NAME = "speculators"
LAST_APART = False  # it is one entry of the same tensor, whatever the capture put there

STATES = "hidden_states"
SCALES = "hidden_states_scales"
STATE = "state.json"
FILE = re.compile(r"hs_(\d+)\.safetensors")
SCALED = (*look.FLOATS, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # with scales beside


def files(folder: Path) -> tuple[Path, ...]:
    """The sample files in the order of the dataset's rows, one a row."""
    places = [p for p in (folder / STATES, folder) if p.is_dir()]
    found = {place: sorted(filter(is_sample, place.iterdir()), key=row_of) for place in places}
    if all(found.values()) and len(found) > 1:
        raise BadInput(f"{folder} holds hs_*.safetensors files both beside and in {STATES}/")
    paths = tuple(path for paths in found.values() for path in paths)
    for one, other in pairwise(paths):
        if row_of(one) == row_of(other):
            raise BadInput(
                f"{one} and {other.name} both stand for row {row_of(one)}, so it would count twice; "
                "keep one of the two"
            )
    return paths


def is_sample(path: Path) -> bool:
    """Whether a file is called as speculators calls samples."""
    return FILE.fullmatch(path.name) is not None


def row_of(path: Path) -> int:
    """The dataset's row of a sample file."""
    match = FILE.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def recognise(folder: Path, files: Sequence[Path]) -> str | None:
    """Why a folder is in this layout, or None."""
    del folder
    return f"{len(files)} files are called hs_*.safetensors" if files else None


def slots(folder: Path, files: Sequence[Path], hidden: int, num_layers: int) -> tuple[Slot, ...]:
    """One slot an entry; by the layout's rule the last is the target's end."""
    del hidden
    _, count = look.told_by_most(files, lambda path: load(path)[1].shape[1], folder)
    aux = [
        Slot(name=name_of(i), role="aux", state=None, normed=False, origin="not declared")
        for i in range(count - 1)
    ]
    last = Slot(
        name=name_of(count - 1),
        role="last",
        state=num_layers,
        normed=False,
        origin="rule of speculators' dump",
    )
    return (*aux, last)


def name_of(i: int) -> str:
    """The name of entry i."""
    return f"{STATES}[:, {i}]"


def notes(folder: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """How many rows of the dataset have no states."""
    rows = open_dataset(files[0]).num_rows
    without = rows - len({row_of(path) for path in files if row_of(path) < rows})
    if not without:
        return ()
    return (f"{without} of {rows} rows of the dataset of {folder} have no states",)


def read(path: Path, form: DataForm) -> RawSample:
    """One sample: its states, and its row of the dataset."""
    tokens, states = load(path)
    look.check_count(path, states.shape[1], len(form.slots))
    ids, mask = row(path)
    if not torch.equal(tokens, ids):
        raise BadInput(
            f"{path}: token_ids {differ(tokens, ids)} input_ids of the dataset's row {row_of(path)}, "
            "so the states belong to another text"
        )
    return RawSample(
        path=path,
        input_ids=ids,
        loss_mask=mask,
        slots=states.unbind(1),
        target_argmax=None,
    )


def differ(tokens: Tensor, ids: Tensor) -> str:
    """In what token ids differ from a dataset's."""
    if len(tokens) != len(ids):
        return f"({len(tokens)} tokens) are not the {len(ids)}"
    return f"differ at position {int((tokens != ids).nonzero()[0])} from the"


def load(path: Path) -> tuple[Tensor, Tensor]:
    """token_ids [T] and hidden_states [T, L, H] of a file, memory-mapped."""
    try:
        with safe_open(path, framework="pt") as file:
            raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path} is damaged or truncated: {first_line(error)}") from error
    tokens, states = look.taken(raw, ("token_ids", STATES), path)
    scales = raw.get(SCALES)
    kinds = look.FLOATS if scales is None else SCALED
    if states.dim() != 3 or not states.shape[1] or states.dtype not in kinds:
        raise BadInput(
            f"{path}: {STATES} must be floats of shape [T, L, H], not {states.dtype} "
            f"{list(states.shape)}"
        )
    if scales is not None:
        states = scaled(states, scales, path)
    return look.vector(tokens, path, "token_ids"), states


def scaled(states: Tensor, scales: Tensor, path: Path) -> Tensor:
    """States [T, L, H] times their scales [T, 1, 1]; any of the scales' sizes may be 1."""
    fits = scales.dim() == 3 and all(
        size in (1, whole) for size, whole in zip(scales.shape, states.shape, strict=True)
    )
    if not fits or scales.dtype not in look.FLOATS:
        raise BadInput(
            f"{path}: {SCALES} must be floats of shape [{len(states)}, 1, 1] beside {STATES} "
            f"{list(states.shape)}, not {scales.dtype} {list(scales.shape)}"
        )
    # In bfloat16, as the trainer computes it, so that both see the same digits.
    return states.to(torch.bfloat16) * scales.to(torch.bfloat16)


def row(path: Path) -> tuple[Tensor, Tensor]:
    """input_ids [T] int64 and loss_mask [T] bool of a file's row in the dataset."""
    table, index = open_dataset(path), row_of(path)
    if index >= table.num_rows:
        raise BadInput(
            f"{path} stands for row {index}, but the dataset has only {table.num_rows} rows"
        )
    lacking = [name for name in ("input_ids", "loss_mask") if name not in table.column_names]
    if lacking:
        raise BadInput(f"the dataset beside {path} lacks {', '.join(lacking)}")
    ids = look.vector(cell(table, "input_ids", path), path, "input_ids")
    mask = look.mask(cell(table, "loss_mask", path), path)
    if "seq_len" in table.column_names:
        says = cell(table, "seq_len", path)
        if says.dim() or says != len(ids):
            raise BadInput(
                f"{path}: the dataset's row {index} has {len(ids)} input_ids, but its seq_len says "
                f"{says.tolist()}"
            )
    return ids, mask


def cell(table: Any, name: str, path: Path) -> Tensor:
    """What a dataset's column holds for a file's row, as a tensor of its numbers."""
    try:
        value = table.column(name)[row_of(path)].as_py()
        return torch.tensor(value, dtype=torch.int64 if value == [] else None)
    # NotImplementedError and KeyError are pyarrow's, of types that Python has no word for.
    except (TypeError, ValueError, RuntimeError, OverflowError, LookupError) as error:
        raise BadInput(
            f"{path}: {name} of the dataset's row {row_of(path)} holds something else than numbers"
        ) from error


def open_dataset(sample: Path) -> Any:
    """The arrow table that a sample file belongs to, memory-mapped."""
    places = (sample.parent, sample.parent.parent)
    folder = next((p for p in places if (p / STATE).is_file()), None)
    if folder is None:
        raise BadInput(
            f"{sample.parent} holds hs_*.safetensors files, but no dataset ({STATE} and *.arrow) lies "
            "there or one above; text and loss masks are in it, so put it beside the files"
        )
    return read_table(folder, (folder / STATE).stat().st_mtime_ns)


@lru_cache(maxsize=1)  # every sample asks for a row of the same one
def read_table(folder: Path, stamp: int) -> Any:
    """The shards of a dataset, which was last written at `stamp`, as one table."""
    del stamp
    try:
        import pyarrow as pa
    except ImportError as error:
        raise BadInput(
            f"{folder} has text and masks in an arrow dataset; install pyarrow on the host to read it"
        ) from error
    listed = read_json(folder / STATE).get("_data_files")
    if (
        not isinstance(listed, list)
        or not listed
        or not all(
            isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in listed
        )
    ):
        raise BadInput(f"{folder / STATE} does not list the dataset's files")
    tables = []
    for entry in listed:
        path = folder / entry["filename"]
        try:
            tables.append(pa.ipc.open_stream(pa.memory_map(str(path))).read_all())
        except (OSError, pa.ArrowException) as error:
            raise BadInput(f"{path} is damaged or truncated: {first_line(error)}") from error
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise BadInput(
            f"the files of the dataset {folder} do not have the same columns: {first_line(error)}"
        ) from error
