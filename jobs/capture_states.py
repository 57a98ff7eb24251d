"""Run prompts through a target and store its hidden states, for drafter tests.

Each prompt may be continued greedily first, so that the text is the target's own. States are taken
by hooks on the decoder layers: canonical state k is the input of layer k, and state n what the last
layer puts out, before the final norm. Needs transformers beside torch. A running server is asked in
jobs.engines.capturing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from eagle3.errors import BadInput
from eagle3.files import first_line
from eagle3.target import load_target_parts
from jobs.captured import (
    Captured,
    Samples,
    already_there,
    answer,
    check_ids,
    check_states,
    loss_mask,
    write_folder,
)
from jobs.choices import choose
from jobs.events import Events
from jobs.inputs import pick_device, target_folder

if TYPE_CHECKING:
    from jobs.engines.capturing import CaptureFromEngine

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken")


def open_job(request: Mapping[str, Any], events: Events) -> CaptureStates | CaptureFromEngine:
    """Load the target, or find the server that runs it."""
    if request.get("engine"):
        from jobs.engines import capturing  # which needs this module

        return capturing.open_job(request, events)
    device = pick_device(request["device"], events)
    folder = target_folder(request["inputs"]["target"])
    return CaptureStates(request, events, device, folder)


class CaptureStates:
    """Answers cases `{"case_id": …, "prompts": path, "out": path, "states": […], …}`.

    With `data` in the place of `prompts` and `states`, it is eagle3.data.argmax that is written.
    """

    def __init__(
        self, request: Mapping[str, Any], events: Events, device: str, folder: Path
    ) -> None:
        self.events = events
        self.device = device
        self.folder = folder
        self.fingerprint = load_target_parts(folder).fingerprint
        self.model = load_model(folder, request["dtype"], device)
        self.layers = decoder_layers(self.model)

    def run_case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Capture one data folder; it has its final name only when complete.

        With case['keep'] a folder that is there already is the answer: another run made it.
        """
        if "data" in case:
            return choose(self.model, self.folder, case, self.events)
        out, states = Path(case["out"]), [int(k) for k in case["states"]]
        check_states(states, len(self.layers))
        summary = already_there(out, case)
        if summary is None:
            prompts = read_prompts(Path(case["prompts"]), self.folder)[: case["max_samples"]]
            check_ids(prompts, self.model.config.get_text_config().vocab_size, case["prompts"])
            summary = write_folder(out, case, partial(self.capture, case, prompts, states))
        return answer(out, summary, self.fingerprint, self.events)

    def capture(
        self,
        case: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        states: Sequence[int],
        folder: Path,
    ) -> dict[str, Any]:
        """Write the samples of all prompts; returns what capture.json says of them."""
        new_tokens, window = int(case["new_tokens"]), case["repetition_window"]
        samples = Samples(folder, case, len(prompts), self.events)
        batches = list(equal_lengths(prompts, int(case["batch"])))
        ticks = Ticks(self.events, new_tokens * len(batches))
        for indices in batches:
            batch = torch.tensor([prompts[i] for i in indices], device=self.device)
            ids = greedy(self.model, batch, new_tokens, ticks)
            for sample in self.run_batch(ids, batch.shape[1], window, states):
                samples.keep(sample)
        return {
            "states": list(states),
            "num_layers": len(self.layers),
            "target": self.fingerprint,
            "target_folder": str(self.folder),
            **samples.counted(),
            "new_tokens": new_tokens,
            "repetition_window": window,
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    @torch.no_grad()
    def run_batch(
        self, ids: Tensor, prompt: int, window: int | None, states: Sequence[int]
    ) -> Iterator[Captured]:
        """Capture texts [B, T] of which the first `prompt` tokens were given; T = P: all of it."""
        with captured_states(self.layers, states) as kept:
            logits = self.model(ids, use_cache=False).logits
        argmax = logits.argmax(-1)
        end = self.model.config.get_text_config().eos_token_id
        ends = set(end) if isinstance(end, list) else {end}
        for row in range(len(ids)):
            mask = loss_mask(ids[row].tolist(), prompt, ends, window)
            length = len(mask)
            yield Captured(
                ids=ids[row, :length].cpu(),
                mask=mask,
                argmax=argmax[row, :length].cpu(),
                states={k: kept[k][row, :length].cpu() for k in states},
            )


def load_model(folder: Path, dtype: str, device: str) -> Any:
    """The target as a transformers model; raises BadInput where it cannot be loaded."""
    try:
        import transformers
    except ImportError as error:
        raise BadInput(
            "capture_states needs transformers on the host; install it beside torch"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
        model, loading = loaded
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"target {folder} cannot be loaded: {first_line(error)}") from error
    # transformers fills what a file lacks with random numbers; states of those would look like any.
    for what in ("missing_keys", "mismatched_keys"):
        if loading.get(what):
            names = ", ".join(sorted(str(key) for key in loading[what])[:5])
            raise BadInput(
                f"target {folder} has {what.replace('_', ' ')}: {names}; its states would be those of "
                "random weights"
            )
    return model.eval().requires_grad_(False).to(device)


def load_tokenizer(folder: Path) -> Any:
    """The target's tokenizer; raises BadInput where it has none."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BadInput(
            "prompts as text need transformers on the host; install it, or give them as input_ids"
        ) from error
    # Without any of these files transformers may make an empty tokenizer up.
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise BadInput(f"target {folder} holds no tokenizer; give the prompts as input_ids")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"the tokenizer of target {folder} cannot be loaded ({first_line(error)}); give the prompts "
            "as input_ids"
        ) from error


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a transformers model, in order."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise BadInput(
            f"{type(model).__name__} keeps its decoder layers in a place this job does not know "
            "(get_decoder().layers)"
        )
    return layers


@contextmanager
def captured_states(layers: nn.ModuleList, states: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within the block, forward passes leave the canonical states named, each [B, T, H]."""
    kept: dict[int, Tensor] = {}
    with states_kept(layers, states, kept.__setitem__):
        yield kept


@contextmanager
def states_kept(
    layers: nn.ModuleList, states: Sequence[int], keep: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Within the block, `keep` is called with each canonical state named, [B, T, H], of every forward
    pass, by the thread that runs it.
    """
    handles = []

    def take_input(k: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(k, args[0] if args else kwargs["hidden_states"])

        return hook

    def take_output(_: nn.Module, __: Any, output: Any) -> None:
        keep(len(layers), output[0] if isinstance(output, tuple) else output)

    for k in states:
        if k < len(layers):
            handles.append(layers[k].register_forward_pre_hook(take_input(k), with_kwargs=True))
        else:
            handles.append(layers[-1].register_forward_hook(take_output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Ticks:
    """Counts the tokens that all batches together have been continued by."""

    def __init__(self, events: Events, total: int) -> None:
        self.events, self.total, self.done = events, total, 0

    def tick(self) -> None:
        """One more token."""
        self.done += 1
        self.events.progress("continue", self.done, self.total)


@torch.no_grad()
def greedy(model: Any, prompts: Tensor, new_tokens: int, ticks: Ticks) -> Tensor:
    """Greedy continuations [B, P + new_tokens] of prompts [B, P].

    A loop of our own, since generate() takes penalties and sampling from the checkpoint's
    generation_config.
    """
    from transformers import DynamicCache

    # The argument's name differs between versions of transformers; the cache is filled in place.
    taken = inspect.signature(model.forward).parameters
    cache = {"cache" if "cache" in taken else "past_key_values": DynamicCache(config=model.config)}
    ids, step = prompts, prompts
    for _ in range(new_tokens):
        logits = model(step, use_cache=True, logits_to_keep=1, **cache).logits
        step = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], 1)
        ticks.tick()
    return ids


def equal_lengths(prompts: Sequence[Sequence[int]], batch: int) -> Iterator[list[int]]:
    """Indices of prompts in batches of one length, so that nothing needs padding."""
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    for indices in by_length.values():
        for start in range(0, len(indices), batch):
            yield indices[start : start + batch]


def read_prompts(path: Path, target: Path) -> list[list[int]]:
    """Prompts as token ids from JSON lines with `input_ids` or `text`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"prompts {path} cannot be read: {error}") from error
    prompts: list[list[int]] = []
    tokenizer: Any = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}, line {number} is no JSON: {error}") from error
        ids = entry.get("input_ids") if isinstance(entry, dict) else None
        if ids is None and isinstance(entry, dict) and isinstance(entry.get("text"), str):
            if tokenizer is None:
                tokenizer = load_tokenizer(target)
            ids = tokenizer(entry["text"])["input_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise BadInput(
                f"{path}, line {number} needs 'input_ids' (a list of whole numbers) or 'text'"
            )
        prompts.append(ids)
    if not prompts:
        raise BadInput(f"prompts {path} holds no prompt")
    return prompts
