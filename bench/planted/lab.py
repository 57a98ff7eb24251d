"""The lab's target, six targets made of it, and texts that they wrote with all their states.

A drafter is sound only beside a target whose end is what it was trained to say. The second lab drafter
learnt what state 59 says, so its target is the lab's without the two layers behind that state; and
where a target goes on for two more layers, or for one, its end is a mere slot of the longer one. Two
have a final norm with weights of its own, and a head that says without them what the lab's says, or
what the one that ends at state 59 says; another says so behind that norm and the same once more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from eagle3.lab.layout import lay_out, load_live, save_live
from eagle3.lab.target import LiveTarget
from eagle3.repetition import cut

LAB = Path(__file__).resolve().parent.parent.parent / "lab"
TARGETS = (
    "whole",
    "ends_at_59",
    "goes_on",
    "own_norm",
    "normed_twice",
    "one_more",
    "own_norm_at_59",
)
MORE = {"goes_on": (2, 2), "one_more": (1, 3)}  # how many more layers, and how much louder
LOUD = ("o_proj.weight", "down_proj.weight")
SPREAD = 0.7  # of the own norm's weights, in their logarithm
PROMPT, NEW_TOKENS, WINDOW, LEAST = 48, 96, 24, 24  # as conf/data/lab.yaml has them
STATES = (0, 1, 2, 3, 4, 29, 30, 31, 32, 57, 58, 59, 60, 61)


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text of T tokens that a target wrote, and its states."""

    ids: Tensor  # [T] int64
    mask: Tensor  # [T] int64, 1 where the target wrote the token
    argmax: Tensor  # [T] int64
    states: dict[int, Tensor]  # canonical k → [T, H] float32
    normed: Tensor  # [T, H] float32, the end behind the final norm

    def cut(self, length: int) -> Text:
        """Its first tokens."""
        return Text(
            ids=self.ids[:length],
            mask=self.mask[:length],
            argmax=self.argmax[:length],
            states={k: h[:length] for k, h in self.states.items()},
            normed=self.normed[:length],
        )


def live_target(name: str) -> LiveTarget:
    """The trained layers of one of TARGETS."""
    whole = load_live(LAB / "target")
    if name == "whole":
        return whole
    if name in ("ends_at_59", "own_norm_at_59"):
        for position, layer in zip(whole.shape.live_layers, whole.layers, strict=True):
            if position >= 59:
                layer.self_attn["o_proj"].weight.zero_()  # type: ignore[index, union-attr]
                layer.mlp["down_proj"].weight.zero_()  # type: ignore[index, union-attr]
        if name == "ends_at_59":
            return whole
    if name in ("own_norm", "normed_twice", "own_norm_at_59"):
        head, norm = whole.lm_head.weight, whole.norm.weight
        spread = torch.randn(len(norm), generator=torch.Generator().manual_seed(59))
        own = torch.exp(SPREAD * spread).bfloat16().float()
        # By columns: what the norm's weights did, where its own are left out, or come in twice.
        does = norm / own.square() if name == "normed_twice" else norm
        head.copy_((head * does).bfloat16())
        norm.copy_(own)
        return whole
    if name not in MORE:
        raise ValueError(f"there is no target '{name}'; there are {', '.join(TARGETS)}")
    live = whole.shape.live_layers
    count, louder = MORE[name]
    added = tuple(range(61, 61 + count))
    longer = LiveTarget(replace(whole.shape, live_layers=(*live, *added), num_layers=61 + count))
    held = whole.state_dict()
    last = live.index(60)
    for new in range(len(live), len(live) + count):  # the last layer again, louder
        held |= {
            f"layers.{new}.{part}": tensor * (louder if part.endswith(LOUD) else 1)
            for part, tensor in (
                (name.split(".", 2)[2], tensor)
                for name, tensor in list(held.items())
                if name.startswith(f"layers.{last}.")
            )
        }
    longer.load_state_dict(held)
    return longer.eval().requires_grad_(False)


def num_layers(name: str) -> int:
    """n of one of TARGETS."""
    return 61 + MORE[name][0] if name in MORE else 61


@dataclass(frozen=True)
class Laboratory:
    """What is made once and kept: targets laid out as checkpoints, and their texts."""

    work: Path
    prompts: int | None = None  # how many of the lab's are continued; None: all

    def target(self, name: str) -> Path:
        """The checkpoint folder of one of TARGETS."""
        out = self.work / f"target-{name}"
        if not (out / "config.json").is_file():
            live = self.work / f"live-{name}"
            save_live(live_target(name), live)
            tokenizer = LAB / "target" / "tokenizer.json"
            (live / tokenizer.name).write_bytes(tokenizer.read_bytes())
            lay_out(live, out)
        return out

    def texts(self, name: str) -> tuple[Text, ...]:
        """Greedy continuations of the lab's held-out prompts by one of TARGETS."""
        path = self.work / f"texts-{name}.pt"
        if not path.is_file():
            raw = [vars(text) for text in write_texts(live_target(name), self.prompts)]
            temporary = path.with_suffix(".part")
            torch.save(raw, temporary)
            temporary.rename(path)
        return load_texts(path)


@lru_cache(maxsize=len(TARGETS))
def load_texts(path: Path) -> tuple[Text, ...]:
    """What `Laboratory.texts` kept."""
    return tuple(Text(**raw) for raw in torch.load(path, weights_only=True))


@torch.no_grad()
def write_texts(
    target: LiveTarget,
    count: int | None = None,
    states: Sequence[int] = STATES,
    batch: int = 25,
) -> list[Text]:
    """The texts of a target, each up to where it begins to repeat itself."""
    lines = (LAB / "prompts.jsonl").read_text().splitlines()[:count]
    prompts = torch.tensor([json.loads(line)["input_ids"] for line in lines])
    states = (*states, *range(62, target.shape.num_layers + 1))
    end = target.shape.vocab - 1
    texts = []
    for ids in target.generate(prompts, NEW_TOKENS).split(batch):
        logits, kept = target(ids, states)
        normed = target.norm(kept[target.shape.num_layers])
        argmax = logits.argmax(-1)
        for row in range(len(ids)):
            length = cut(ids[row].tolist(), PROMPT, {end}, WINDOW)
            if length - PROMPT < LEAST:
                continue
            mask = torch.zeros(len(ids[row]), dtype=torch.int64)
            mask[PROMPT:] = 1
            whole = Text(
                ids=ids[row],
                mask=mask,
                argmax=argmax[row],
                states={k: h[row] for k, h in kept.items()},
                normed=normed[row],
            )
            texts.append(clone(whole.cut(length)))
    return texts


def clone(text: Text) -> Text:
    """The same text with memory of its own, so that no more than it is kept."""
    return Text(
        ids=text.ids.clone(),
        mask=text.mask.clone(),
        argmax=text.argmax.clone(),
        states={k: h.clone() for k, h in text.states.items()},
        normed=text.normed.clone(),
    )
