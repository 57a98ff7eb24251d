"""The trainers' own forwards and metrics against eagle3/trainer_metrics, on the same tensors.

Both sides run a small random drafter over the same texts with the same teacher. Counts must be the
same integers; sums of probabilities agree to 1e-5 of their value, which is float32's rounding over
the few dozen positions and tokens summed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eagle3.chain import draft_to_target_ids
from eagle3.form import Rope
from eagle3.model import Drafter, DrafterShape
from eagle3.samples import Sample
from eagle3.trainer_metrics import STEPS, Figure, count_text, summarise
from eagle3.trainer_metrics.rollout import TeacherLogits, forced_rollout
from eagle3.trainer_metrics.tally import Tally
from eagle3.wiring import D2T

# speculators takes only targets as wide as the drafter.
SHAPE = DrafterShape(
    hidden=24,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=40,
    vocab=50,
    draft_vocab=30,
    target_hidden=24,
    num_aux=3,
    norm_eps=1e-5,
    rope=Rope(theta=500.0),
)
# Lengths and masks: spans at the start, in the middle, up to the end and in several pieces.
MASKS = (
    "00000001111111111111111",
    "0000001111000011101100000",
    "1111111111110",
    "0001",
    "0" * 29 + "1" * 60 + "0" * 3 + "1" * 70,
    "0" * 7 + "1" * 90,
)


@dataclass(frozen=True, kw_only=True)
class World:
    """A drafter, a target's ends and the texts that both sides are given."""

    drafter: Drafter
    embedding: Tensor  # [V, H_d]
    head: Tensor  # [V, H]
    norm: Tensor  # [H]
    samples: tuple[Sample, ...]
    aux: tuple[Tensor, ...]  # [T, A·H] each

    def teacher(self, sample: Sample) -> TeacherLogits:
        """The logits behind the final norm of the states that the text stores."""

        def logits(positions: Tensor) -> Tensor:
            assert sample.teacher is not None
            h = sample.teacher[positions]
            return F.linear(F.rms_norm(h, (len(self.norm),), self.norm, SHAPE.norm_eps), self.head)

        return logits


def make_world(shape: DrafterShape, seed: int) -> World:
    """A world whose teacher agrees with each step of the drafter in part, and in part cannot."""
    torch.manual_seed(seed)
    drafter = Drafter(shape).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        wide = parameter.dim() == 2
        parameter.copy_(
            torch.randn_like(parameter) * 0.4 if wide else 1 + 0.3 * torch.randn(len(parameter))
        )
    chosen = torch.randperm(shape.vocab)[: shape.draft_vocab].sort().values
    drafter.d2t.copy_(chosen - torch.arange(shape.draft_vocab))
    drafter.t2d.zero_()
    drafter.t2d[chosen] = True
    embedding = torch.randn(shape.vocab, shape.hidden)
    head = torch.randn(shape.vocab, shape.target_hidden)
    norm = 1 + 0.3 * torch.rand(shape.target_hidden)
    samples, auxes = [], []
    for i, bits in enumerate(MASKS):
        length = len(bits)
        ids = torch.randint(shape.vocab, (length,))
        aux = torch.randn(length, shape.num_aux * shape.target_hidden)
        tokens = wanted_tokens(drafter, embedding, ids, aux)
        # A state whose logits are highest at the wanted token: its row of the head, undone by the
        # norm's weight, at a scale that only the norm takes away.
        scale = 1 + 5 * torch.rand(length, 1)
        states = (head[tokens] + 0.5 * torch.randn(length, shape.target_hidden)) / norm * scale
        samples.append(
            Sample(
                path=Path(f"data_{i}"),
                input_ids=ids,
                loss_mask=torch.tensor([c == "1" for c in bits]),
                states={},
                target_argmax=None,
                teacher=states,
            )
        )
        auxes.append(aux)
    return World(
        drafter=drafter,
        embedding=embedding,
        head=head,
        norm=norm,
        samples=tuple(samples),
        aux=tuple(auxes),
    )


def wanted_tokens(drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor) -> Tensor:
    """For every position a token that step 0, 1, 2 or 3 of its row drafts, or any token at all."""
    length, vocab = len(ids), len(embedding)
    rows = torch.arange(length - 1)
    out = forced_rollout(
        drafter, embedding, ids, aux, rows, steps=4, teacher=lambda p: torch.zeros(len(p), vocab)
    )
    said = draft_to_target_ids(drafter.d2t, D2T.offset, vocab)[out.drafted]
    wanted = torch.randint(vocab, (length,))
    for position in range(1, length):
        step = (0, 0, 0, 1, 2, 3, None, None)[int(torch.randint(8, ()))]
        if step is not None and position - 1 - step >= 0:
            wanted[position] = said[position - 1 - step, step]
    return wanted


@dataclass(frozen=True, kw_only=True)
class Case:
    """A wiring, and which trainers know it."""

    switches: Mapping[str, bool]  # as speculators' config spells them
    steps: Mapping[str, int]
    seed: int = 0

    def world(self) -> World:
        ours = {"feedback_normed" if k == "norm_output" else k: v for k, v in self.switches.items()}
        return make_world(replace(SHAPE, **ours), self.seed)


SPECULATORS = {"speculators": STEPS["speculators"]}
CASES = {
    "reference": Case(switches={}, steps=STEPS),
    "its default": Case(switches={"norm_before_residual": True}, steps=SPECULATORS, seed=1),
    "its 3.1": Case(
        switches={"norm_before_residual": True, "norm_output": True, "fc_norm": True},
        steps=SPECULATORS,
        seed=2,
    ),
    "gpt-oss": Case(switches={"norm_before_fc": True}, steps=SPECULATORS, seed=3),
}


def write_case(folder: Path, case: Case, world: World) -> None:
    """All that the trainers are given, in the form that metrics_peer.py reads."""
    shape = world.drafter.shape
    config = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "max_position_embeddings": 256,
    }
    plain = {"config": config, "steps": {**case.steps}, "speculators": {**case.switches}}
    (folder / "case.json").write_text(json.dumps(plain))
    weights = {**world.drafter.state_dict(), "embed_tokens.weight": world.embedding}
    save_file(weights, folder / "drafter.safetensors")
    save_file({"head": world.head, "norm": world.norm}, folder / "target.safetensors")
    texts = {}
    for i, (sample, aux) in enumerate(zip(world.samples, world.aux, strict=True)):
        assert sample.teacher is not None
        texts[f"{i}.input_ids"] = sample.input_ids
        texts[f"{i}.loss_mask"] = sample.loss_mask
        texts[f"{i}.aux"] = aux
        texts[f"{i}.teacher"] = sample.teacher
    save_file(texts, folder / "texts.safetensors")


def run_ours(world: World, steps: Mapping[str, int]) -> list[dict[str, Tally]]:
    """Our counts, text by text."""
    shape = world.drafter.shape
    to_target = draft_to_target_ids(world.drafter.d2t, D2T.offset, shape.vocab)
    return [
        count_text(
            steps,
            world.drafter,
            world.embedding,
            sample,
            aux,
            world.teacher(sample),
            to_target=to_target,
        )
        for sample, aux in zip(world.samples, world.aux, strict=True)
    ]


@dataclass(frozen=True)
class Held:
    """Both sides' words on one world."""

    peers: dict[str, Any]
    texts: list[dict[str, Tally]]
    metrics: dict[str, Figure]
    curves: dict[str, list[tuple[int, Figure]]]

    def curve(self, name: str) -> list[float]:
        return [figure.value for _, figure in self.curves[name]]


@pytest.fixture(scope="module")
def held(peers_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Held]:
    """Every case on both sides; the peers' imports take long, so one process runs them all."""
    folders = {}
    for name, case in CASES.items():
        folders[name] = tmp_path_factory.mktemp("case")
        write_case(folders[name], case, case.world())
    done = subprocess.run(
        [peers_python, "-I", Path(__file__).with_name("metrics_peer.py"), *folders.values()],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    both = {}
    for name, case in CASES.items():
        texts = run_ours(case.world(), case.steps)
        metrics, curves, _ = summarise(texts)
        peers = json.loads((folders[name] / "out.json").read_text())
        both[name] = Held(peers, texts, metrics, curves)
    return both


@pytest.fixture
def reference(held: dict[str, Held]) -> Held:
    """The wiring that both trainers know, each with its own number of steps."""
    return held["reference"]


def test_the_worlds_texts_try_every_count() -> None:
    """Else the equality below would be one of zeros."""
    world = CASES["reference"].world()
    _, curves, _ = summarise(run_ours(world, STEPS))
    for step, figure in curves["specforge/acc"]:
        assert 0.1 < figure.value < 0.9 or step > 3, step
    for name in ("speculators/full_acc", "speculators/cond_acc"):
        assert all(0 < figure.value < 1 for _, figure in curves[name])
    out_of_vocabulary = 0
    for sample in world.samples:
        choices = world.teacher(sample)(torch.arange(len(sample.input_ids))).argmax(-1)
        out_of_vocabulary += int((~world.drafter.t2d[choices] & sample.loss_mask).sum())
    assert out_of_vocabulary > 5


def test_specforge_counts_are_its_own(reference: Held) -> None:
    for ours, its in zip(reference.texts, reference.peers["specforge"]["counts"], strict=True):
        for s in range(STEPS["specforge"]):
            tally = ours[f"specforge/acc@{s}"]
            assert tally.numerator == its["acc_corrects"][s]
            # It divides by no less than 1e-6, and by that where nothing is counted.
            assert tally.denominator == round(its["acc_denoms"][s])
            accepted = ours[f"specforge/acceptance_rate@{s}"]
            rate = accepted.numerator / max(accepted.denominator, 1)
            assert rate == pytest.approx(its["acceptance_rates"][s], rel=1e-5)


def test_specforge_evaluation_and_log_line_are_met(reference: Held) -> None:
    its = reference.peers["specforge"]["eval"]
    assert reference.curve("specforge/acc") == pytest.approx(its["eval/per_position_acc"], rel=1e-6)
    length = reference.metrics["specforge/simulated_acc_len"].value
    assert length == pytest.approx(its["eval/simulated_acc_len"], rel=1e-6)
    for text, line in zip(reference.texts, reference.peers["specforge"]["log"], strict=True):
        metrics, curves, _ = summarise([text])
        for s, figure in curves.get("specforge/acc", []):
            assert figure.value == pytest.approx(line[f"acc_{s}"], rel=1e-6)
        if metrics:
            assert metrics["specforge/acc_all_steps"].value == pytest.approx(line["acc"], rel=1e-6)


def assert_speculators_counts(texts: list[dict[str, Tally]], peers: Mapping[str, Any]) -> None:
    for ours, its in zip(texts, peers["counts"], strict=True):
        for s in range(STEPS["speculators"]):
            for name in ("full_acc", "cond_acc"):
                theirs = Tally(int(its[f"{name}_{s}_sum"]), int(its[f"{name}_{s}_total"]))
                assert ours[f"speculators/{name}@{s}"] == theirs, (name, s)


def test_speculators_counts_and_validation_are_its_own(reference: Held) -> None:
    peers = reference.peers["speculators"]
    assert_speculators_counts(reference.texts, peers)
    for name in ("full_acc", "cond_acc"):
        wanted = [peers["val"][f"{name}_{s}"] for s in range(STEPS["speculators"])]
        assert reference.curve(f"speculators/{name}") == pytest.approx(wanted, rel=1e-9)


def test_packing_changes_speculators_counts_as_the_listed_difference_says(reference: Held) -> None:
    packed = reference.peers["speculators"]["packed"]

    def sums(name: str, s: int) -> tuple[int, int]:
        tallies = [text[f"speculators/{name}@{s}"] for text in reference.texts]
        return sum(int(t.numerator) for t in tallies), sum(t.denominator for t in tallies)

    for name in ("full_acc", "cond_acc"):
        assert sums(name, 0) == (packed[f"{name}_0_sum"], packed[f"{name}_0_total"])
    for s in (1, 2):
        assert sums("cond_acc", s)[1] < packed[f"cond_acc_{s}_total"]
        assert sums("full_acc", s)[1] <= packed[f"full_acc_{s}_total"]


@pytest.mark.parametrize("name", [name for name in CASES if name != "reference"])
def test_speculators_counts_hold_for_its_own_wirings(held: dict[str, Held], name: str) -> None:
    assert_speculators_counts(held[name].texts, held[name].peers["speculators"])
