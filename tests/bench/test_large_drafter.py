"""The made-up drafter that stands for a large one, at a size that a test can afford."""

import pytest
import torch
from safetensors.torch import load_file

from bench.large_drafter import request_of, run_job
from bench.large_files import (
    STORED,
    TRAINED,
    Made,
    Planned,
    Size,
    make,
    noise,
    whole,
    write_latent_drafter,
    write_safetensors,
)
from bench.wiring_draws import pooled
from eagle3.chain import draft_chains
from eagle3.checkpoint import load_drafter
from eagle3.connect import connect
from eagle3.data import find_data
from eagle3.errors import BadInput
from eagle3.headers import read_header
from eagle3.metrics import Truth, count_chains, judge_chains, scored_rows, truth_tokens
from eagle3.samples import read_samples
from eagle3.target import load_target_parts
from eagle3.wiring import D2T, DecoderLayer, Residual, Wiring

SMALL = Size(
    hidden=256,
    heads=4,
    head_dim=64,
    intermediate=640,
    vocab=2000,
    draft_vocab=800,
    known=64,
    texts=6,
    tokens=64,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("large"), SMALL)


@pytest.fixture(scope="module")
def accept_length(made):
    """A function from a wiring to its accept length on the data."""
    target, drafter = load_target_parts(made.target), load_drafter(made.drafter)
    form = find_data(made.data, states=STORED, hidden=target.hidden, num_layers=target.num_layers)
    samples = list(read_samples(form, vocab=target.vocab, hidden=target.hidden))

    def length(wiring):
        tied, counts = connect(drafter, target, wiring), []
        for sample in samples:
            ids, mask, rows = sample.input_ids, sample.loss_mask, scored_rows(sample.loss_mask)
            drafted = draft_chains(
                tied.drafter,
                tied.embedding,
                ids,
                sample.aux(tied.states),
                rows,
                steps=4,
                to_target=tied.to_target,
                decoder_layer=tied.decoder_layer,
            )
            truth = truth_tokens(ids, sample.target_argmax, Truth.target_argmax, "")
            chains = judge_chains(drafted, rows, ids, mask, truth, tied.drafter.t2d)
            counts.append(count_chains(chains)["accept_length"])
        return pooled(counts)

    return length


def test_a_file_written_in_blocks_is_an_ordinary_one(tmp_path):
    path = tmp_path / "model.safetensors"
    halves = Planned(
        name="two",
        dtype="BF16",
        shape=(4, 3),
        blocks=lambda: iter([torch.ones(1, 3), torch.zeros(3, 3)]),
    )
    ids = torch.arange(5)
    write_safetensors(path, [halves, whole("ids", ids, "I64"), noise("n", (9, 2), 1.0, 0)])
    assert set(read_header(path)) == {"two", "ids", "n"}
    read = load_file(path)
    assert read["two"].tolist() == [[1, 1, 1], *[[0, 0, 0]] * 3]
    assert torch.equal(read["ids"], ids)
    assert read["n"].dtype is torch.bfloat16
    assert read["n"].float().std() > 0.5


def test_the_drafter_is_alive_in_the_wiring_that_it_was_made_for_alone(accept_length):
    trained = accept_length(Wiring.of_states(TRAINED))
    assert 2 < trained < 4  # the text's jumps leave headroom
    for other in (
        Wiring.of_states((3, 31, 59)),
        Wiring.of_states((0, 31, 3)),
        Wiring.of_states((0, 3, 59)),
        Wiring.of_states(TRAINED, d2t=D2T.identity),
        Wiring.of_states(TRAINED, decoder_layer=DecoderLayer.skipped),
        Wiring.of_states(TRAINED, residual=Residual.normed),
    ):
        assert accept_length(other) < trained - 0.5, other


def test_the_diagnosis_names_the_planted_states(made, tmp_path):
    cost = run_job(request_of(made, threads=1), tmp_path / "run")
    assert cost.result["status"] == "ok", cost.result["error"]
    assert 0 < cost.anonymous_gib < cost.peak_gib
    found = cost.result["diagnosis"]
    assert found["verdict"] == "cause"
    assert [cause["kind"] for cause in found["causes"]] == ["states"]
    assert any(
        "[-1, 2, 30]" in line for fix in found["causes"][0]["fixes"] for line in fix["lines"]
    )
    assert cost.result["wiring"]["states"] == list(TRAINED)
    assert cost.result["wiring"]["d2t"] == "offset"


def test_a_latent_attention_drafter_is_refused_by_name(made, tmp_path):
    latent = tmp_path / "latent"
    write_latent_drafter(latent, SMALL)
    with pytest.raises(BadInput, match="multi-head latent attention"):
        load_drafter(latent)
    asked = request_of(
        Made(target=made.target, drafter=latent, data=made.data),
        threads=1,
    )
    error = run_job(asked, tmp_path / "run").result["error"]
    assert error["kind"] == "BadInput"
    assert "is a drafter with multi-head latent attention" in error["message"]
    assert "which this version does not run" in error["message"]
    assert str(latent) in error["message"]
