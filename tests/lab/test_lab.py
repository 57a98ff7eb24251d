"""The lab shows what the story showed, on weights that were really trained."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3.data import pt_shards
from eagle3.lab.build import FOLDERS, PROMPT, REPETITION_WINDOW, drafter_shape, windows
from eagle3.lab.corpus import encode_documents, read_stdlib
from eagle3.lab.drafter import Texts, continue_prompts, new_drafter, train_drafter
from eagle3.lab.layout import lay_out, load_live
from eagle3.metrics import paired_difference
from eagle3.model import Drafter
from eagle3.repetition import cut
from eagle3.samples import Sample
from orchestrator.paths import CLONE
from tests.lab.conftest import EXPERIMENTS, STORED, Lab, first_step_counts, pooled

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
TRIPLES = list(permutations(STORED, 3))


def accuracy(lab: Lab, experiment: str) -> float:
    value: float = lab.record(experiment, "result.json")["metrics"]["accuracy"]["value"]
    return value


def test_every_experiment_is_supported_and_filed_under_one_parent(lab: Lab) -> None:
    assert lab.exit_code == 0
    client = MlflowClient(f"sqlite:///{lab.results}/mlflow.db")
    parents = set()
    for name in EXPERIMENTS:
        assert lab.record(name, "verdict.json")["verdict"] == "supported", name
        run = client.get_run(lab.record(name, "filed.json")["run"])
        assert run.info.status == "FINISHED"
        assert run.data.tags["experiment"] == name
        assert run.data.metrics["accuracy"] == accuracy(lab, name)
        parents.add(run.data.tags["mlflow.parentRunId"])
        artifacts = {a.path for a in client.list_artifacts(run.info.run_id)}
        assert {"config.yaml", "log", "result.json", "environment.json"} <= artifacts
        curve = client.get_metric_history(run.info.run_id, "step_accuracy/marginal")
        assert [point.step for point in curve] == [0, 1, 2, 3]
    assert len(parents) == 1


def test_the_true_wiring_is_good_and_leaves_headroom(lab: Lab) -> None:
    metrics = lab.record("layers_m1_2_30", "result.json")["metrics"]
    assert metrics["accuracy"]["value"] >= 0.70
    assert 2.5 <= metrics["accept_length"]["value"] <= 3.5
    assert metrics["accuracy"]["denominator"] >= 4000
    assert metrics["coverage"]["value"] > metrics["accuracy"]["value"]
    assert len(pt_shards.files(lab.data)) >= 64


@pytest.mark.parametrize(
    ("experiment", "bound"),
    [
        ("layers_2_30_58", 0.10),
        ("d2t_absolute", 0.02),
        ("no_decoder_layer", 0.15),
        ("d2t_absolute_no_decoder_layer", 0.02),
    ],
)
def test_a_wrong_wiring_is_dead(lab: Lab, experiment: str, bound: float) -> None:
    assert accuracy(lab, experiment) < bound


def test_the_true_triple_beats_the_other_23(
    lab_drafter: Drafter, embedding: Tensor, samples: list[Sample], lab: Lab
) -> None:
    counts = {t: first_step_counts(lab_drafter, embedding, samples, t) for t in TRIPLES}
    true = counts.pop((0, 3, 31))
    assert pooled(true) == pytest.approx(accuracy(lab, "layers_m1_2_30"))
    for triple, others in counts.items():
        assert paired_difference(true, others, comparisons=23).low > 0, triple


@pytest.mark.runs
def test_the_winner_follows_the_training(
    embedding: Tensor, samples: list[Sample], tmp_path: Path
) -> None:
    # A drafter of its own, another triple, a seed that nobody chose.
    seed = random.SystemRandom().randrange(2**31)
    triple = random.Random(seed).choice([t for t in TRIPLES if t != (0, 3, 31)])
    target = load_live(CLONE / "lab" / "target")
    texts = Texts.whole(windows(training_tokens(), 4000, seed))
    drafter = new_drafter(target, drafter_shape(target.shape), texts.ids, seed)
    train_drafter(
        drafter, target, texts, triple, seed=seed, steps=220, chain=1, report=lambda _: None
    )
    figures = {t: pooled(first_step_counts(drafter.eval(), embedding, samples, t)) for t in TRIPLES}
    assert max(figures, key=lambda t: figures[t]) == triple, (seed, figures)
    assert figures[triple] > 0.1


def training_tokens(files: int = 150) -> Tensor:
    training, _ = read_stdlib()
    tokenizer = AutoTokenizer.from_pretrained(CLONE / "lab" / "target").backend_tokenizer
    chosen = random.Random(0).sample(training, files)
    return torch.tensor([i for text in encode_documents(tokenizer, chosen) for i in text])


def training_text(count: int) -> list[Tensor]:
    """Texts as the drafter was trained on: prompts with the target's own words, without loops.

    The standard library's text would be another one: the drafter never learnt to predict it.
    """
    prompts = windows(training_tokens(), count, seed=1)
    texts = continue_prompts(load_live(CLONE / "lab" / "target"), prompts, 72)
    lengths = [cut(row, PROMPT, {1023}, REPETITION_WINDOW) for row in texts.tolist()]
    return [text[:length] for text, length in zip(texts, lengths, strict=True)]


def bigram_table(texts: list[Tensor]) -> Tensor:
    """The most frequent successor of every token, [V]."""
    counts = torch.zeros(1024, 1024, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    for text in texts:
        counts.index_put_((text[:-1], text[1:]), one, accumulate=True)
    return counts.argmax(1)


@pytest.mark.runs
def test_without_its_states_the_drafter_is_a_bigram_table(
    lab_drafter: Drafter, embedding: Tensor, samples: list[Sample]
) -> None:
    right = pooled(first_step_counts(lab_drafter, embedding, samples, (0, 3, 31)))
    exchanged = []
    for sample, other in zip(samples, samples[1:] + samples[:1], strict=True):
        length = len(sample.input_ids)
        states = {k: h.repeat(length // len(h) + 1, 1)[:length] for k, h in other.states.items()}
        exchanged.append(replace(sample, states=states))
    blind = pooled(first_step_counts(lab_drafter, embedding, exchanged, (0, 3, 31)))
    best = bigram_table(training_text(768))
    hits = total = 0
    for sample in samples:
        position = (sample.loss_mask[1:-1] & sample.loss_mask[2:]).nonzero().flatten() + 2
        assert sample.target_argmax is not None
        hits += int(
            (best[sample.input_ids[position - 1]] == sample.target_argmax[position - 1]).sum()
        )
        total += len(position)
    assert blind < right / 2
    assert abs(blind - hits / total) <= 0.05


def test_the_checkpoint_is_an_ordinary_one_of_61_layers(lab: Lab) -> None:
    model = AutoModelForCausalLM.from_pretrained(lab.target, dtype=torch.float32)
    assert model.config.num_hidden_layers == 61
    assert model.config.head_dim >= 32
    tokenizer = AutoTokenizer.from_pretrained(lab.target)
    assert tokenizer.is_fast
    text = "def main(argv=None):\n    return 0\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    live = load_live(CLONE / "lab" / "target")
    with torch.no_grad():
        full = model(ids, output_hidden_states=True)
        logits, kept = live(ids, states=range(62))
    torch.testing.assert_close(full.logits, logits, atol=2e-4, rtol=1e-4)
    for k in range(61):
        torch.testing.assert_close(full.hidden_states[k], kept[k], atol=2e-4, rtol=1e-4)
    near = [*range(5), *range(29, 33), *range(57, 62)]
    for a, b in pairwise(near):
        if b == a + 1:
            assert (kept[a] - kept[b]).abs().max() > 0.05, f"states {a} and {b} are the same"


def test_a_checkpoint_laid_out_by_several_at_once_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "made" / "target"
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: lay_out(CLONE / "lab" / "target", out), range(3)))
    assert made == [out] * 3
    assert [p.name for p in out.parent.iterdir()] == ["target"]
    assert len(load_file(out / "model.safetensors")) == 61 * 9 + 3


def test_what_ships_is_small_and_in_specforges_layout() -> None:
    files = [p for p in (CLONE / "lab").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 12_000_000
    names = set(load_file(CLONE / "lab" / "drafter" / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert all(
        n.startswith("midlayer.")
        for n in names - {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    )
    build = json.loads((CLONE / "lab" / "build.json").read_text())
    stages = {"text", "target", "continuations", "drafter", "tuning", *FOLDERS}
    assert build["seconds"].keys() == stages
