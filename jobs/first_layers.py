"""The states that a target's first layers make, run alone where they fit in memory.

Only the embedding and the first m decoder layers are loaded, with transformers' own classes and a
config of m layers, in the checkpoint's number type. A few texts, and of each the first positions, are
enough: attention is causal, so the positions behind them change nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle3.errors import BadInput
from eagle3.files import first_line, read_json
from eagle3.headers import find_weights
from eagle3.search.spread import SMALL as SMALL_WIDTH
from eagle3.search.spread import spread
from eagle3.target import TargetParts
from jobs.capture_states import decoder_layers, states_kept
from jobs.environment import memory

TEXTS = 4
POSITIONS = 128  # of each text; where its answer begins later, so many more that
ANSWER = 32  # positions of that are among them, but not more than
LONGEST = 512
BEYOND = 2  # layers behind the highest declared state that fits, so that its neighbours are known
MEMORY_SHARE = 0.5  # of what is free
SMALL = 8 << 30  # bytes up to which a target is run whole where it fits
TOGETHER = 1024  # positions that are run at once; a longer text alone


@dataclass(frozen=True, kw_only=True)
class FirstLayers:
    """How many layers are to be run (0: none), and why so many."""

    layers: int
    why: str
    needed: int = 0  # bytes
    free: int = 0  # bytes, of which MEMORY_SHARE may be used

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self)}


def plan_layers(
    target: TargetParts, wanted: int | None, declared: Sequence[int | None]
) -> FirstLayers:
    """How many first layers to run: `wanted`, or as many as the slots take and memory allows.

    `declared` are the slots' states; a slot without one may be any. Raises BadInput where more layers
    are wanted than there are or than fit.
    """
    num_layers = target.num_layers
    if wanted == 0:
        return FirstLayers(layers=0, why="job.first_layers=0")
    if wanted is not None and wanted > num_layers:
        raise BadInput(f"job.first_layers={wanted}, but the target has {num_layers} layers")
    if reason := cannot_run(target.folder):
        if wanted is not None:
            raise BadInput(f"job.first_layers={wanted}, but {reason}")
        return FirstLayers(layers=0, why=reason)
    free = free_memory(target.device)
    sizes = layer_sizes(target)
    allowed = int(free * MEMORY_SHARE)
    fitting = max((m for m in range(num_layers + 1) if sizes[m] <= allowed), default=0)
    if wanted is not None:
        if wanted > fitting:
            raise BadInput(
                f"job.first_layers={wanted} takes {mib(sizes[wanted])}, but only half of {mib(free)} of "
                f"free memory is used, which holds {fitting} layers; ask for fewer"
            )
        why = f"job.first_layers={wanted}"
        return FirstLayers(layers=wanted, why=why, needed=sizes[wanted], free=free)
    if None in declared or (fitting == num_layers and sizes[num_layers] <= SMALL):
        layers = fitting
    else:
        within = [k for k in declared if k is not None and k <= fitting]
        layers = min(max(within, default=0) + BEYOND, fitting)
    if not layers:
        why = (
            f"one layer and the embedding take {mib(sizes[1])}, half of {mib(free)} is free for it"
        )
        return FirstLayers(layers=0, why=why, needed=sizes[1], free=free)
    why = f"they take {mib(sizes[layers])} of {mib(free)} free"
    return FirstLayers(layers=layers, why=why, needed=sizes[layers], free=free)


def mib(count: int) -> str:
    """Bytes in words."""
    return f"{count / 2**20:,.0f} MiB"


def cannot_run(folder: Path) -> str | None:
    """Why this target's layers cannot be run here whatever their size; None where they may be."""
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    if config.get("quantization_config") or text.get("quantization_config"):
        return "the target's weights are quantised, and only plain ones are run"
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "transformers is not installed on the host"
    if find_weights(folder).tensors is None:
        return "the target's weights are a .bin file, which cannot be read in part"
    return None


def free_memory(device: str) -> int:
    """Bytes that are free where the layers would lie."""
    if device == "cpu":
        return memory()["available"]
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def layer_sizes(target: TargetParts) -> list[int]:
    """Bytes of everything but the decoder layers, and the first m of them, for m = 0 … n."""
    place = re.compile(rf"{re.escape(target.base)}layers\.(\d+)\.")
    sizes = [0] * (target.num_layers + 1)  # [0]: what is loaded in any case
    for name, info in (find_weights(target.folder).tensors or {}).items():
        found = place.match(name)
        layer = int(found.group(1)) if found else -1
        if layer < target.num_layers:  # layers behind the last are for several tokens at once
            sizes[layer + 1] += info.end - info.start
    return list(accumulate(sizes))


def load_first_layers(folder: Path, layers: int, device: str) -> Any:
    """The target with its first layers only; raises BadInput where transformers cannot make it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        shorten(config.get_text_config(), layers)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        AttributeError,
        ImportError,
        SafetensorError,
    ) as error:
        raise BadInput(f"target {folder} cannot be run: {first_line(error)}") from error
    model, loading = loaded
    for what in ("missing_keys", "mismatched_keys"):
        if loading.get(what):
            names = ", ".join(sorted(str(key) for key in loading[what])[:5])
            raise BadInput(f"target {folder} has {what.replace('_', ' ')}: {names}")
    return model.eval().requires_grad_(False).to(device)


def shorten(config: Any, layers: int) -> None:
    """Set a text config to its first layers; lists with an entry a layer are cut with it."""
    whole = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def run_layers(
    model: Any, texts: Sequence[Tensor], device: str, only: Sequence[int] | None = None
) -> list[Tensor]:
    """States 0 … m of each text [T], or `only` these, as [K, T, H] on the CPU; raises BadInput where
    that fails.

    Short texts run side by side, padded at the end, which changes nothing before it.
    """
    layers = decoder_layers(model)
    wanted = range(len(layers) + 1) if only is None else only
    mine = threading.local()  # what a core's own pass leaves

    def keep(k: int, state: Tensor) -> None:
        mine.kept[k] = state

    @torch.no_grad()
    def run(numbers: Sequence[int]) -> list[Tensor]:
        mine.kept = {}
        padded = pad_sequence([texts[i] for i in numbers], batch_first=True).to(device)
        try:
            model.get_decoder()(input_ids=padded, use_cache=False)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise BadInput(f"the target's layers cannot be run: {first_line(error)}") from error
        return [
            torch.stack([mine.kept[k][b, : len(texts[i])] for k in wanted]).cpu()
            for b, i in enumerate(numbers)
        ]

    small = device == "cpu" and model.config.get_text_config().hidden_size <= SMALL_WIDTH
    groups = side_by_side([len(ids) for ids in texts])
    cores = min(torch.get_num_threads() if small else 1, len(groups))
    made: dict[int, Tensor] = {}
    with states_kept(layers, wanted, keep):
        for numbers, states in spread(run, groups, cores):
            made.update(zip(numbers, states, strict=True))
    return [made[i] for i in range(len(texts))]


def side_by_side(lengths: Sequence[int]) -> list[list[int]]:
    """Texts of these lengths by number, in groups of at most TOGETHER positions with the padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= TOGETHER:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
