"""Rebuild the lab's weights from nothing: python -m eagle3.lab.build --out lab --work /tmp/lab-work

Text is the standard library of the interpreter that runs this, so another Python version gives other
weights of the same kind. Each stage leaves its product in the work folder, so that an interrupted
build goes on where it was; `build.json` says what was done and how long it took. All drafters but the
first are trained by speculators, which lives in the peers' environment (`tests/peers/setup_peers.py`
makes it).
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.lab.corpus import encode_documents, read_stdlib, train_tokenizer
from eagle3.lab.drafter import Texts, continue_prompts, new_drafter, own_words, train_drafter
from eagle3.lab.layout import TOKENIZER_FILE, load_live, save_live
from eagle3.lab.speculators_drafter import (
    Plan,
    check_peers,
    peers_python,
    save_files,
    train_by_speculators,
)
from eagle3.lab.target import LiveTarget, TargetShape, train_target
from eagle3.model import Drafter, DrafterShape

STATES = (0, 3, 31)
PROMPT = 48  # tokens of a prompt
NEW_TOKENS = 112  # tokens of a training continuation
DRAFT_VOCAB = 704
HELD_OUT_PROMPTS = 200
TARGET_STEPS = 3200
DRAFTER_TEXTS = 16_384
DRAFTER_STEPS = 3000
# The drafter is then tuned on the target's own words, without their loops, as the lab's data has them.
TUNING_STEPS = 1000
TUNING_LENGTH = 120
REPETITION_WINDOW = 24
MIN_NEW_TOKENS = 24
EXCHANGED = 0.1
SPECULATORS_EPOCHS = 3
# The second drafter's dump lacks the target's end: state 59 becomes its teacher.
SECOND_STATES = (0, 3, 31, 59)
# The third differs from it in all that a checkpoint can: states, teacher, layers, norms, sizes.
THIRD_STATES = (2, 30, 58, 61)
THIRD_VOCAB = 512
THIRD_TEXTS = 5000
THIRD_EPOCHS = 4
THIRD_SWITCHES = (
    "--no-norm-before-residual",
    "--no-norm-before-fc",
    "--fc-norm",
    "--no-norm-output",
)
EARLY_STEPS = 260
# Stages that speculators runs, and the folders of what they make.
FOLDERS = {
    "speculators": "drafter_speculators",
    "two_layers": "drafter_two_layers",
    "early": "drafter_early",
}


def main() -> None:
    """Build everything that `lab/` ships."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the shipped files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the stages' products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--drafter-steps", type=int, default=DRAFTER_STEPS)
    parser.add_argument("--tuning-steps", type=int, default=TUNING_STEPS)
    parser.add_argument("--speculators-epochs", type=int, default=SPECULATORS_EPOCHS)
    parser.add_argument(
        "--peers-python", type=Path, default=peers_python(), help="interpreter with speculators"
    )
    arguments = parser.parse_args()
    try:  # before the hour that the other stages take
        check_peers(arguments.peers_python)
    except BadInput as error:
        parser.error(str(error))
    plans = speculators_plans(
        arguments.peers_python.absolute(),  # it is started in another folder
        arguments.seed,
        arguments.speculators_epochs,
    )
    # A folder for each set of settings: a stage is never taken over from other ones.
    settings = (
        arguments.seed,
        arguments.target_steps,
        arguments.drafter_steps,
        arguments.tuning_steps,
        arguments.speculators_epochs,
    )
    work = arguments.work / "-".join(map(str, settings))
    work.mkdir(parents=True, exist_ok=True)
    build(
        arguments.out,
        work,
        arguments.seed,
        arguments.target_steps,
        arguments.drafter_steps,
        arguments.tuning_steps,
        plans,
    )


def speculators_plans(python: Path, seed: int, epochs: int) -> dict[str, Plan]:
    """How each of speculators' drafters is trained, by stage; `epochs` are the second drafter's."""
    second = Plan(
        python=python, states=SECOND_STATES, seed=seed, epochs=epochs, draft_vocab=DRAFT_VOCAB
    )
    third = Plan(
        python=python,
        states=THIRD_STATES,
        seed=seed + 1,
        epochs=THIRD_EPOCHS,
        draft_vocab=THIRD_VOCAB,
        texts=THIRD_TEXTS,
        switches=THIRD_SWITCHES,
        decoder=two_layers(TargetShape()),
    )
    early = replace(third, epochs=1, max_steps=EARLY_STEPS)
    return {"speculators": second, "two_layers": third, "early": early}


def two_layers(shape: TargetShape) -> dict[str, Any]:
    """A decoder of two layers narrower than the target's, with half as many key-value heads."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }


def build(
    out: Path,
    work: Path,
    seed: int,
    target_steps: int,
    drafter_steps: int,
    tuning_steps: int,
    plans: Mapping[str, Plan],
) -> None:
    """All stages: text, target, continuations, drafter, its tuning, speculators' drafters, prompts."""
    seconds: dict[str, float] = {}
    tokens, held_out = timed("text", work, seconds, lambda: make_text(out / "target", seed))

    def make_target() -> dict[str, Tensor]:
        model = train_target(TargetShape(), tokens, seed=seed, steps=target_steps, report=say)
        return model.state_dict()

    model = LiveTarget(TargetShape())
    model.load_state_dict(timed("target", work, seconds, make_target))
    save_live(model, out / "target")
    target = load_live(out / "target")  # in bf16, as it ships

    def make_continuations() -> Tensor:
        prompts = windows(tokens, DRAFTER_TEXTS, seed + 1)
        return continue_prompts(target, prompts, NEW_TOKENS)

    texts = timed("continuations", work, seconds, make_continuations)
    shape = drafter_shape(target.shape)

    def make_drafter() -> dict[str, Tensor]:
        drafter = new_drafter(target, shape, texts[:, PROMPT:], seed)
        train_drafter(
            drafter,
            target,
            Texts.whole(texts),
            STATES,
            seed=seed,
            steps=drafter_steps,
            report=say,
        )
        return drafter.state_dict()

    drafter = Drafter(shape)
    drafter.load_state_dict(timed("drafter", work, seconds, make_drafter))

    def own(length: int) -> Texts:
        return own_words(
            texts,
            prompt=PROMPT,
            end=target.shape.vocab - 1,
            window=REPETITION_WINDOW,
            length=length,
            least=MIN_NEW_TOKENS,
        )

    def tune_drafter() -> dict[str, Tensor]:
        train_drafter(
            drafter,
            target,
            own(TUNING_LENGTH),
            STATES,
            seed=seed + 1,
            steps=tuning_steps,
            peak_lr=1.5e-3,
            exchanged=EXCHANGED,
            report=say,
        )
        return drafter.state_dict()

    drafter.load_state_dict(timed("tuning", work, seconds, tune_drafter))
    save_drafter(drafter, out / "drafter")

    def by_speculators(stage: str) -> dict[str, Tensor]:
        whole = own(PROMPT + NEW_TOKENS)
        log = work / f"{stage}.log"
        return train_by_speculators(out / "target", target, whole, log, plans[stage], report=say)

    for stage, folder in FOLDERS.items():
        made = timed(stage, work, seconds, functools.partial(by_speculators, stage))
        save_files(made, out / folder)
    write_prompts(windows(held_out, HELD_OUT_PROMPTS, seed + 2), out / "prompts.jsonl")
    record = {
        "seed": seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "target_steps": target_steps,
        "drafter_steps": drafter_steps,
        "tuning_steps": tuning_steps,
        "training_tokens": len(tokens),
        "drafter_texts": len(texts),
        "trained_by_speculators": {stage: plan.record() for stage, plan in plans.items()},
        "seconds": {name: round(value) for name, value in seconds.items()},
    }
    (out / "build.json").write_text(json.dumps(record, indent=2) + "\n")


def timed(name: str, work: Path, seconds: dict[str, float], make: Callable[[], Any]) -> Any:
    """A stage's product, from the work folder if it was made before; its seconds go to `seconds`."""
    path = work / f"{name}.pt"
    if not path.is_file():
        started = time.monotonic()
        product = make()
        torch.save({"product": product, "seconds": time.monotonic() - started}, path)
    saved = torch.load(path, weights_only=True)
    seconds[name] = saved["seconds"]
    say(f"{name}: {saved['seconds']:.0f} s")
    return saved["product"]


def say(line: str) -> None:
    """Progress on stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def make_text(folder: Path, seed: int) -> tuple[Tensor, Tensor]:
    """(training tokens, held-out tokens), and the tokenizer written to `folder`."""
    training, held_out = read_stdlib()
    tokenizer = train_tokenizer(training, TargetShape().vocab)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    documents = list(encode_documents(tokenizer, training))
    random.Random(seed).shuffle(documents)
    rows = [documents, list(encode_documents(tokenizer, held_out))]
    train_ids, held_ids = (torch.tensor([i for d in row for i in d]) for row in rows)
    return train_ids, held_ids


def windows(tokens: Tensor, count: int, seed: int) -> Tensor:
    """Prompts [count, PROMPT] from random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - PROMPT, (count,), generator=generator)
    return torch.stack([tokens[s : s + PROMPT] for s in starts.tolist()])


def drafter_shape(shape: TargetShape) -> DrafterShape:
    """The lab drafter's sizes: one layer as wide as the target's."""
    return DrafterShape(
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        draft_vocab=DRAFT_VOCAB,
        target_hidden=shape.hidden,
        num_aux=len(STATES),
        norm_eps=shape.norm_eps,
        rope=Rope(theta=shape.rope_theta),
    )


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write a drafter in SpecForge's layout, weights in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = drafter.shape
    tensors = {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous()
        for name, t in drafter.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.target_hidden,
        "max_position_embeddings": 1024,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_prompts(prompts: Tensor, path: Path) -> None:
    """Prompts as JSON lines of token ids."""
    lines = [json.dumps({"input_ids": row}) for row in prompts.tolist()]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
