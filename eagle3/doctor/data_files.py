"""A folder of captured samples by its file names and headers: layout, slots, widths, number types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from eagle3.doctor.findings import MEASURED, Finding
from eagle3.doctor.pickled import NotExaminedError, TensorOutline, outline
from eagle3.doctor.subject import Data, DataSlot, read_config, states_declared, whole
from eagle3.errors import BadInput
from eagle3.headers import read_header
from eagle3.listing import files_below

CAPTURE = "capture.json"
NOT_DATA = ("vocab_mapping.pt", "token_freq.pt", "d2t.pt", "t2d.pt")


def read_data(
    folder: Path, asked: Sequence[int] | None
) -> tuple[Data, list[Finding], tuple[str, ...]]:
    """What a folder holds, what is wrong with it, and what was not examined."""
    if not folder.is_dir():
        raise BadInput(f"data: {folder} is no folder on this host")
    captured = read_config(folder / CAPTURE) if (folder / CAPTURE).is_file() else None
    states, origin, findings = states_declared(asked, captured, folder)
    try:
        files = sample_files(folder)
    except BadInput as error:
        data = Data(
            folder=folder,
            layout=None,
            files=0,
            slots=None,
            states=states,
            origin=origin,
            target_layers=whole(captured, "num_layers") if captured else None,
        )
        return data, [*findings, damaged(folder, error)], ()
    if not files:
        raise BadInput(f"data: {folder} holds no .pt, .ckpt, .ckpt.gz or hs_*.safetensors files")
    layout, held, left = None, None, []
    opened = {0, len(files) // 2, len(files) - 1}
    for path in [files[i] for i in sorted(opened)]:
        try:
            name, slots = slots_of(path)
        except NotExaminedError as error:
            left.append(str(error))
            continue
        except (BadInput, OSError) as error:
            findings.append(damaged(path, error))
            continue
        if layout is None:
            layout, held = name, slots
        elif [(s.name, s.width) for s in slots] != [(s.name, s.width) for s in held or ()]:
            findings.append(differing(path, files[0], slots, held or ()))
    if len(opened) < len(files):
        left.append(
            f"{folder}: {len(files) - len(opened)} of its {len(files)} files; the first, the middle and "
            "the last were opened, job=inspect_data reads them all"
        )
    layers = whole(captured, "num_layers") if captured else None
    data = Data(
        folder=folder,
        layout=layout,
        files=len(files),
        slots=None if held is None else tuple(placed(held, states)),
        states=states,
        origin=origin,
        target_layers=layers,
    )
    return data, findings, tuple(left)


def sample_files(folder: Path) -> list[Path]:
    """The sample files below a folder, in numeric order. Raises BadInput as files_below does."""
    found = files_below(folder, (".pt", ".ckpt", ".ckpt.gz", ".safetensors"), without=NOT_DATA)
    return [p for p in found if p.suffix != ".safetensors" or p.name.startswith("hs_")]


def slots_of(path: Path) -> tuple[str, list[DataSlot]]:
    """(layout, slots) of one file. Raises BadInput where it is in no layout."""
    if path.suffix == ".safetensors":
        return "speculators", safetensors_slots(path)
    entries = outline(path)
    tensors = {key: value for key, value in entries.items() if isinstance(value, TensorOutline)}
    states = entries.get("hidden_states")
    if isinstance(states, list | tuple) and all(isinstance(s, TensorOutline) for s in states):
        last = len(states) - 1
        slots = [slot(f"hidden_states[{i}]", s, i == last) for i, s in enumerate(states)]
        return "pt_shards", slots
    for layout, aux, end in (
        ("specforge", "aux_hidden_state", "hidden_state"),
        ("modelopt", "aux_hidden_states", "hidden_states"),
        ("speculators_v0", "hidden_state", "target"),
    ):
        if aux in tensors and end in tensors:
            return layout, chunks(path, aux, tensors[aux], end, tensors[end])
    raise BadInput(
        f"{path} is in no layout that is known: it has {', '.join(entries) or 'nothing'}"
    )


def slot(name: str, tensor: TensorOutline, teacher: bool) -> DataSlot:
    """One stored state of [T, H] or [1, T, H]."""
    width = tensor.shape[-1] if tensor.shape else 0
    return DataSlot(name=name, width=width, dtype=tensor.dtype, state=None, teacher=teacher)


def chunks(
    path: Path, aux: str, joined: TensorOutline, end: str, last: TensorOutline
) -> list[DataSlot]:
    """Aux states that lie side by side, and the last one, whose width tells theirs."""
    if not last.shape or not joined.shape:
        scalar = end if joined.shape else aux
        raise BadInput(f"{path}: {scalar} is a single number, no states of [positions, width]")
    width, total = last.shape[-1], joined.shape[-1]
    if not width or total % width:
        raise BadInput(f"{path}: {aux} is {total} wide, no multiple of {end}'s {width}")
    slots = [
        DataSlot(
            name=f"{aux}[{i * width}:{(i + 1) * width}]",
            width=width,
            dtype=joined.dtype,
            state=None,
            teacher=False,
        )
        for i in range(total // width)
    ]
    return [*slots, slot(end, last, True)]


def safetensors_slots(path: Path) -> list[DataSlot]:
    """The slots of [S, L, H]."""
    info = read_header(path).get("hidden_states")
    if info is None or len(info.shape) != 3:
        raise BadInput(f"{path} has no hidden_states of shape [positions, slots, width]")
    _, count, width = info.shape
    return [
        DataSlot(
            name=f"hidden_states[:, {i}]",
            width=width,
            dtype=info.dtype,
            state=None,
            teacher=i == count - 1,
        )
        for i in range(count)
    ]


def placed(slots: Sequence[DataSlot], states: Sequence[int] | None) -> Iterable[DataSlot]:
    """The slots with the states that are declared for them; of the last one it may be left out."""
    known: list[int | None] = list(states or ())
    if len(known) == len(slots) - 1:
        known.append(None)
    if len(known) != len(slots):
        known = [None] * len(slots)
    for held, state in zip(slots, known, strict=True):
        yield DataSlot(
            name=held.name,
            width=held.width,
            dtype=held.dtype,
            state=state,
            teacher=held.teacher,
        )


def damaged(path: Path, error: Exception) -> Finding:
    """A file that cannot be read."""
    said = str(error)
    return Finding(
        name="data-damaged",
        severity="error",
        where=str(path),
        what=said if str(path) in said else f"{path} cannot be read: {said}",
        effect="a trainer stops at it or leaves it out; a test of the drafter names every such file",
        fix=("copy or capture the file again", "data.damaged=skip leaves such files out of a test"),
        evidence=MEASURED,
    )


def differing(
    path: Path, first: Path, slots: Sequence[DataSlot], others: Sequence[DataSlot]
) -> Finding:
    """A file with other slots than the first."""
    said = [f"{len(held)} of width {held[0].width if held else 0}" for held in (slots, others)]
    return Finding(
        name="data-slots-differ",
        severity="error",
        where=str(path),
        what=f"it stores {said[0]} slots, {first.name} stores {said[1]}",
        effect="a part of the samples is of another capture; aux states are mixed up or do not fit fc",
        fix=("keep samples of one capture in one folder",),
        evidence=MEASURED,
    )
