"""Our drafter against the trainers' own, with the weights and configs that they write themselves.

The trainers run in the peers' environment (logits_peer.py says which of their functions); every case
is then loaded by `load_drafter` and fed the same text, step by step.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.model import Cache, Drafter
from tests.eagle3 import configs

TOLERANCE = 1e-5  # of the largest logit, in float32

SIZES: dict[str, Any] = {
    **configs.SIZES,
    "draft_vocab_size": configs.DRAFT_VOCAB,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drafter: changed sizes, switches, number of aux states, how it is saved."""

    name: str
    peer: str
    config: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)
    aux: int = 3
    form: str = ""
    cannot: str = ""  # why the peer cannot run it itself
    differs: bool = False  # it computes what is not run here, which has a test of its own

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "config": {**SIZES, **self.config}}


def specforge(name: str, form: str = "hf", **changes: Any) -> Case:
    return Case(name=f"specforge-{name}", peer="specforge", form=form, **changes)


def speculators(name: str, form: str = "", **changes: Any) -> Case:
    aux = changes.setdefault("aux", 3)
    ids = {"eagle_aux_hidden_state_layer_ids": list(range(aux))}
    changes["switches"] = {**ids, **changes.get("switches", {})}
    return Case(name=f"speculators-{name}", peer="speculators", form=form, **changes)


QWEN3 = {"model_type": "qwen3"}
TWO = {"num_hidden_layers": 2}
SLIDING = {"sliding_window": 4, "use_sliding_window": True}
TRAINED = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
CASES = [
    specforge("plain"),
    specforge("sglang-export", "sglang"),
    specforge("bin-without-embedding", "bin"),
    specforge("sharded", "sharded"),
    specforge("layers-0", "layers.0"),
    specforge("other-target-width", switches={"target_hidden_size": 20}),
    specforge("full-vocabulary", config={"draft_vocab_size": 50}),
    specforge("all-heads-own-keys", config={"num_key_value_heads": 6}),
    specforge("fc-norm", switches={"fc_norm": True}),
    specforge("fc-norm-other-width", switches={"fc_norm": True, "target_hidden_size": 20}),
    specforge("head-without-norm", switches={"norm_output": False}),
    specforge("norm-output-stated", switches={"norm_output": True}),
    specforge(
        "nested-ids",
        switches={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
    ),
    specforge("linear", config={"rope_parameters": LINEAR}),
    specforge("llama3", "sglang", config={"rope_parameters": LLAMA3}),
    specforge("yarn", config={"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}}),
    specforge(
        "yarn-kimi",
        "sglang",
        config={"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    specforge(
        "yarn-mscale", config={"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}
    ),
    specforge("dynamic", config={"rope_parameters": DYNAMIC}, differs=True),
    specforge("two-aux", aux=2, cannot="its fc takes three states"),
    specforge("bare-yarn", config={"rope_parameters": YARN}, cannot="its YaRN needs mscale"),
    speculators("plain"),
    speculators("positions-from-1", "from 1"),
    speculators("sharded", "sharded"),
    speculators("no-ids", switches={"eagle_aux_hidden_state_layer_ids": None}),
    speculators("full-vocabulary", config={"draft_vocab_size": 50}),
    speculators("residual", switches={"norm_before_residual": True}),
    speculators("fc-input-norm", switches={"norm_before_fc": True}),
    speculators("fc-norm", switches={"fc_norm": True}),
    speculators("feedback", switches={"norm_output": True}),
    speculators("trainers-defaults", switches=TRAINED),
    speculators(
        "all-at-once",
        aux=4,
        switches={"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        config={**QWEN3, **TWO, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
    speculators("bias", config={"attention_bias": True}),
    speculators("mlp-bias", config={"mlp_bias": True}),
    speculators("qwen3", config=QWEN3),
    speculators("qwen3-bias", config={**QWEN3, "attention_bias": True}),
    speculators("two-layers", config=TWO),
    speculators("two-layers-residual", config=TWO, switches=TRAINED),
    speculators("two-layers-qwen3", config={**QWEN3, **TWO}),
    speculators("one-aux", aux=1),
    speculators("two-aux", aux=2, switches={"fc_norm": True}),
    speculators("four-aux", aux=4, switches={"norm_before_fc": True}),
    speculators("window", config={**SLIDING, "layer_types": ["sliding_attention"]}),
    speculators(
        "one-window-of-two",
        config={**TWO, **SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    speculators("qwen3-window", config={**QWEN3, **TWO, **SLIDING, "max_window_layers": 1}),
    speculators("linear", config={"rope_parameters": LINEAR}),
    speculators("dynamic", config={"rope_parameters": DYNAMIC}),
    speculators(
        "dynamic-grown",
        config={"rope_parameters": DYNAMIC, "max_position_embeddings": 8},
        differs=True,
    ),
    speculators("llama3", config={"rope_parameters": LLAMA3}),
    speculators("yarn", config={"rope_parameters": YARN}),
    speculators("yarn-factor", config={"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    speculators("yarn-not-truncated", config={"rope_parameters": {**YARN, "truncate": False}}),
    speculators(
        "yarn-mscale", config={"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}
    ),
    speculators(
        "both-norms",
        switches={"norm_before_fc": True, "fc_norm": True},
        cannot="its config excludes the two",
    ),
    speculators(
        "other-target-width",
        switches={"target_hidden_size": 20},
        cannot="its fc is as wide as the drafter",
    ),
    # The lab's third drafter: every trainer's default turned over, on two layers of Llama.
    speculators("two-layers-fc-norm", config=TWO, switches={"fc_norm": True}),
]
RUN = [case for case in CASES if not case.cannot and not case.differs]


@pytest.fixture(scope="module")
def peers_runs(peers_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The peers' checkpoints and logits: one process for all cases."""
    folder = tmp_path_factory.mktemp("logits")
    (folder / "cases.json").write_text(json.dumps([case.plain() for case in CASES]))
    script = Path(__file__).with_name("logits_peer.py")
    done = subprocess.run(
        [peers_python, script, folder],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def forced_logits(
    drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor, steps: int
) -> Tensor:
    """Logits [steps, T, V_d] where every step is fed the text's own tokens, zeros behind its end."""
    length = len(aux)
    fed = torch.cat([ids[1:], ids.new_zeros(steps)])
    rows, cache, logits = torch.arange(length), Cache(), []
    g = drafter.fuse(aux)[None]
    for step in range(steps):
        embedded = embedding[fed[step : step + length]][None]
        y = drafter.step(embedded, g, rows, cache, window_from_row=True)
        logits.append(drafter.logits(y[0]))
        g = drafter.feedback(y)
    return torch.stack(logits)


def loaded(case: Case, folder: Path) -> tuple[DrafterCheckpoint, dict[str, Tensor]]:
    place = folder / case.name
    return load_drafter(place / "checkpoint"), load_file(place / "run.safetensors")


def apart(drafter: Drafter, run: dict[str, Tensor]) -> Tensor:
    """How far our logits are from the trainer's at each step, [steps], in units of its largest."""
    theirs = run["logits"]
    ours = forced_logits(drafter, run["embedding"], run["input_ids"], run["aux"], len(theirs))
    assert ours.dtype == theirs.dtype == torch.float32
    return (ours - theirs).abs().amax((1, 2)) / theirs.abs().amax((1, 2))


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.name)
def test_logits_of_every_step_are_the_trainers(case: Case, peers_runs: Path) -> None:
    checkpoint, run = loaded(case, peers_runs)
    own = checkpoint.embedding
    assert (own is None) == (case.form in ("sglang", "bin"))
    if own is not None:
        assert torch.equal(own.float(), run["embedding"])
    assert (apart(checkpoint.drafter, run) <= TOLERANCE).all()


@pytest.mark.parametrize("case", RUN, ids=lambda case: case.name)
def test_the_cases_can_tell_each_switch(case: Case, peers_runs: Path) -> None:
    """A case in which a switch makes no difference would prove nothing about it."""
    checkpoint, run = loaded(case, peers_runs)
    shape = checkpoint.drafter.shape
    turned: dict[str, Any] = {
        "norm_before_residual": not shape.norm_before_residual,
        "feedback_normed": not shape.feedback_normed,
    }
    if not shape.feedback_normed:
        turned["head_norm"] = not shape.head_norm
    if shape.windows:
        turned["windows"] = ()
    if shape.rope.kind != "default" and case.name != "speculators-dynamic":
        turned["rope"] = Rope(theta=shape.rope.theta)  # dynamic: differs on longer texts only
    for switch, value in turned.items():
        first = 1 if switch == "feedback_normed" else 0
        other = checkpoint.drafter.rewired(**{switch: value})
        assert (apart(other, run)[first:] > 100 * TOLERANCE).all(), switch


def test_specforges_dynamic_scaling_is_another(peers_runs: Path) -> None:
    """Its table is built for 20 positions more than the longest, which scales it from the start on.

    The checkpoint says so aloud when it is loaded; transformers and EAGLE do not scale short texts.
    """
    case = next(case for case in CASES if case.name == "specforge-dynamic")
    checkpoint, run = loaded(case, peers_runs)
    assert any("SpecForge's own table" in note for note in checkpoint.notes)
    assert (apart(checkpoint.drafter, run) > 10 * TOLERANCE).all()
    shape = checkpoint.drafter.shape
    factor, longest = DYNAMIC["factor"], SIZES["max_position_embeddings"]
    growth = factor * (longest + 20) / longest - (factor - 1)
    theta = shape.rope.theta * growth ** (shape.head_dim / (shape.head_dim - 2))
    assert (apart(checkpoint.drafter.rewired(rope=Rope(theta=theta)), run) <= TOLERANCE).all()


def test_a_text_behind_the_length_of_dynamic_scaling_is_refused(peers_runs: Path) -> None:
    """The trainer rotates each step by the length of its whole batch, which no engine does."""
    case = next(case for case in CASES if case.name == "speculators-dynamic-grown")
    checkpoint, run = loaded(case, peers_runs)
    with pytest.raises(BadInput, match="reaches 11 positions, but behind 8 the drafter's dynamic"):
        apart(checkpoint.drafter, run)


@pytest.mark.parametrize("case", [case for case in CASES if case.cannot], ids=lambda c: c.name)
def test_what_a_trainer_cannot_run_itself(case: Case, peers_runs: Path) -> None:
    """Held here so that a release that learns it is noticed: it then belongs among the others."""
    assert (peers_runs / case.name / "error.txt").is_file(), case.cannot
