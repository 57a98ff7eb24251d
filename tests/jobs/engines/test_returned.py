"""What a running server returns as its target's states, named: right ones, others, and what is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.errors import BadInput
from jobs.engine_probe import open_job
from jobs.engines.engine import Draft
from jobs.engines.records import Facts, Returned
from jobs.engines.returned import NEW_TOKENS, POSITIONS, rows_of, why_no_states
from jobs.engines.talk import Address, get_json
from jobs.events import Events
from tests.eagle3.small import SHAPE
from tests.jobs.engines import fake
from tests.jobs.engines.conftest import Serve
from tests.jobs.test_drafter_test import LAYERS, STATES, WIRING, Desk

pytestmark = pytest.mark.runs  # each starts servers

RIGHT, SHIFTED = (0, 3, 5), (1, 4, 6)
STEPS, TOKENS = 3, 21
WIDTH = SHAPE.target_hidden
FLAGS = {"enable_return_hidden_states": True}
# A text in the fake's way: t + 1 behind t. The second is longer than what is asked for states.
PROMPTS = ([1, 9, 3, 4], [1, *[5, 6, 9] * 24, 13, 14])
Change = Callable[[dict[str, Any]], dict[str, Any] | None]


def noisy(rows: list[list[float]], size: float) -> list[list[float]]:
    """Every number off by so much of it, so that every chunk is."""
    made = torch.tensor(rows)
    signs = torch.randint(2, made.shape, generator=torch.Generator().manual_seed(3)) * 2 - 1
    changed: list[list[float]] = (made * (1 + size * signs)).tolist()
    return changed


class Files(Desk):
    """A target that transformers runs, data of its own states, and the fake's answers out of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=SHAPE.vocab,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.4,  # so that each layer moves a state visibly
        )
        LlamaForCausalLM(config).save_pretrained(self.target)
        for file in self.data.iterdir():
            file.unlink()
        for i, prompt in enumerate(PROMPTS):
            ids = torch.tensor([*prompt, *range(prompt[-1] + 1, prompt[-1] + 1 + TOKENS)])
            mask = torch.ones(len(ids), dtype=torch.int64)
            mask[: len(prompt)] = 0
            states = self.states(ids)
            sample = {
                "input_ids": ids,
                "loss_mask": mask,
                "hidden_states": [states[k] for k in STATES],
            }
            torch.save(sample, self.path(i))

    @cached_property
    def model(self) -> Any:
        return LlamaForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()

    def states(self, ids: Tensor) -> Tensor:
        """States 0 … n as transformers gives them, the last one in front of the final norm."""
        before: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, x: before.append(x[0]))
        with torch.no_grad():
            found = self.model(ids[None], output_hidden_states=True).hidden_states
        hook.remove()
        return torch.cat([*found[:-1], *before])

    def answers(
        self, layers: Sequence[int] = RIGHT, second: Change = lambda meta: meta, shift: int = 0
    ) -> str:
        """What the fake returns for both askings of each prompt, a file; the second one changed."""
        by_prompt = {}
        for prompt in PROMPTS:
            asked = prompt[:POSITIONS]
            text = [*asked, *range(asked[-1] + 1, asked[-1] + 1 + NEW_TOKENS)]
            states = self.states(torch.tensor(text))
            rows = torch.cat([states[k] for k in layers], -1).roll(shift, 0).tolist()
            first = {"hidden_states": [rows[: len(asked)], *rows[len(asked) : -1]]}
            by_prompt[",".join(map(str, asked))] = [first, second(json.loads(json.dumps(first)))]
        file = self.folder / "states.json"
        file.write_text(json.dumps(by_prompt))
        return str(file)

    def probe(self, url: str, name: str = "sglang", **settings: Any) -> dict[str, Any]:
        data = {"path": str(self.data), "states": STATES, "layout": None, "damaged": "fail"}
        engine: dict[str, Any] = {
            **{"name": name, "version": None, "engine_class": None, "flags": {}, "env": {}},
            **{"python": None, "url": url, "baseline_url": None, "ids": None},
            **{"patch": None, "launch": None, "baseline_launch": None},
        }
        request = {
            **{"device": "cpu", "steps": STEPS, "topk": 1, "draft_tokens": None, "seed": 0},
            **{"max_prompts": 4, "new_tokens": TOKENS, "ignore_eos": True},
            **{"start_s": 60.0, "first_s": 30.0, "request_s": 30.0},
            "engine": engine,
            "inputs": {
                "target": {"path": str(self.target), "layout": "hf", "made": ""},
                "drafter": {"path": str(self.drafter), "layout": None},
                "data": {**data, "target_argmax": None},
                "prompts": None,
            },
            **settings,
        }
        with Events(self.folder / "events.jsonl") as events:
            job = open_job(request, events)
            found = job.run_case({"case_id": "a", "wiring": {**WIRING, "layers": RIGHT}})
        return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def serve_states(serve: Serve, files: Files) -> Callable[..., Address]:
    """A fake that serves the files' drafter, and returns states out of a file of theirs."""

    def start(states: str, *, flags: dict[str, Any] = FLAGS, **more: Any) -> Address:
        draft = Draft(folder=files.drafter, steps=STEPS)
        more = {fake.STATES: states, "target": files.target, **more}
        return serve(draft=draft, flags=flags, fault="unflushable", **more)

    return start


def test_the_states_that_a_running_server_returns_are_named(
    serve_states: Callable[..., Address], files: Files
) -> None:
    address = serve_states(files.answers())
    result = files.probe(address.url)
    probe = result["probe"]
    assert probe["fed"] == list(RIGHT)
    assert [(c["verdict"], c["states"], c["noise"]) for c in probe["chunks"]] == [
        ("fed", [k], 0.0) for k in RIGHT
    ]
    assert all(c["error"] < 1e-3 < c["second"] for c in probe["chunks"])
    assert [slot["verdict"] for slot in result["slots"]] == ["verified"] * 3
    assert [f for f in result["findings"] if f["name"] == "engine-feeds-other-states"] == []
    # In verifications of 4, 1, 4, 1, … behind prompts that end in 4, 9, 14, …
    assert result["metrics"]["accept_length"]["value"] == 2.5
    rows = (NEW_TOKENS - 1) * len(PROMPTS)
    assert f"behind the prompts {rows} of {rows} rows are states [0, 3, 5]" in result["notes"]
    (seen,) = [note for note in result["notes"] if note.startswith("the states are the target's")]
    assert "what becomes of them between there and the drafter's fc is not seen" in seen
    # It is left as it was: its cache could not be emptied here, and it runs.
    assert get_json(address, "/server_info")["version"] == "0.5.23"


def test_other_states_are_the_configs_fault_with_ids_to_write(
    serve_states: Callable[..., Address], files: Files
) -> None:
    result = files.probe(serve_states(files.answers(SHIFTED)).url)
    probe = result["probe"]
    assert (probe["where"], probe["fed"]) == ("config", list(SHIFTED))
    assert probe["why"] == "the engine feeds states [1, 4, 6], not [0, 3, 5]"
    (finding,) = [f for f in result["findings"] if f["name"] == "engine-feeds-other-states"]
    assert finding["fix"] == ['write "eagle_config.eagle_aux_hidden_state_layer_ids": [-1, 2, 4]']
    assert finding["evidence"] == "run: returned by this engine as the states of its target"


def test_rows_of_another_position_are_the_engines_fault(
    serve_states: Callable[..., Address], files: Files
) -> None:
    probe = files.probe(serve_states(files.answers(shift=1)).url)["probe"]
    assert probe["where"] == "engine"
    assert probe["why"] == "it feeds the right states, but row t is that of position t-1"


def test_states_within_the_noise_are_not_told_apart(
    serve_states: Callable[..., Address], files: Files
) -> None:
    def second(size: float) -> Change:
        def change(meta: dict[str, Any]) -> dict[str, Any]:
            block, *others = meta["hidden_states"]
            return {"hidden_states": [noisy(block, size), *others]}

        return change

    quiet = files.probe(serve_states(files.answers(second=second(0.001))).url)
    assert quiet["probe"]["fed"] == list(RIGHT)
    assert [c["noise"] for c in quiet["probe"]["chunks"]] == pytest.approx([0.001] * 3, rel=0.01)
    assert not any("asked twice" in note for note in quiet["notes"])
    loud = files.probe(serve_states(files.answers(second=second(0.6))).url)
    assert (loud["probe"]["fed"], loud["probe"]["where"]) == (None, "undecided")
    # The embedding is several times its own size away from every other state.
    chunks = loud["probe"]["chunks"]
    assert [c["verdict"] for c in chunks] == ["fed", "undecided", "undecided"]
    assert all(k in c["states"] for c, k in zip(chunks, RIGHT, strict=True))
    (note,) = [note for note in loud["notes"] if note.startswith("asked twice")]
    assert note.endswith("ask it when it answers nobody else")


def changed(make: Callable[[list[Any]], list[Any]]) -> Change:
    """Of an answer, with its prompt's rows made anew."""

    def change(meta: dict[str, Any]) -> dict[str, Any]:
        block, *others = meta["hidden_states"]
        return {"hidden_states": [make(block), *others]}

    return change


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            lambda _: {},
            r"the server answered prompt data/data_0\.pt without states; start it with "
            r"--enable-return-hidden-states beside its flags",
        ),
        (
            changed(lambda rows: [row[:WIDTH] for row in rows]),
            rf"the server's states of prompt \S+ have {WIDTH} numbers a row, but the drafter's fc takes "
            rf"{3 * WIDTH}",
        ),
        (
            changed(lambda rows: [rows[0][:-1], *rows[1:]]),
            r"the server's states of prompt \S+ are no rows of numbers: ",
        ),
        (
            changed(lambda rows: rows[0]),
            r"the server's states of prompt \S+ are no rows of numbers: ",
        ),
        (
            changed(lambda rows: rows[1:]),
            r"the server returned 3 rows for the 4 tokens of prompt \S+; ask it when it is idle",
        ),
        (
            changed(lambda rows: [[None, *rows[0][1:]], *rows[1:]]),
            r"1 of the 4 rows that the server returned of prompt \S+ hold NaN or infinity",
        ),
        (
            changed(lambda rows: [[float("nan"), *row[1:]] for row in rows]),
            r"4 of the 4 rows that the server returned of prompt \S+ hold NaN or infinity",
        ),
        (lambda _: None, r"prompt \S+ was not answered: http://127\.0\.0\.1:\d+/generate: "),
    ],
    ids=["none", "width", "ragged", "flat", "few", "null", "nan", "dies"],
)
def test_states_that_cannot_be_used_are_one_sentence(
    second: Change, words: str, serve_states: Callable[..., Address], files: Files
) -> None:
    with pytest.raises(BadInput, match=f"^{words}") as caught:
        files.probe(serve_states(files.answers(second=second)).url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [{}, {"return_hidden_states_mode": "last"}])
def test_a_server_without_the_flag_is_told_which(
    flags: dict[str, Any], serve_states: Callable[..., Address], files: Files
) -> None:
    url = serve_states(files.answers(), flags=flags).url
    words = (
        f"engine.url={url}: it does not return its states; start it with --enable-return-hidden-states "
        "beside its flags"
    )
    with pytest.raises(BadInput, match=f"^{re.escape(words)}$"):
        files.probe(url)


def test_a_server_that_runs_no_drafter_says_nothing_of_one(
    serve_states: Callable[..., Address], files: Files
) -> None:
    url = serve_states(files.answers(), flags={"enable_return_aux_hidden_states": True}).url
    with pytest.raises(
        BadInput, match=r"it runs no drafter .* start it with the drafter, and with"
    ):
        files.probe(url)


def test_a_server_that_drafts_otherwise_is_refused(
    serve_states: Callable[..., Address], files: Files
) -> None:
    url = serve_states(files.answers()).url
    with pytest.raises(BadInput, match="its speculative_num_steps is 3, but the job asks for 4"):
        files.probe(url, steps=4)


def test_a_running_vllm_is_refused(serve: Serve, files: Files) -> None:
    url = serve("vllm", draft=Draft(folder=files.drafter, steps=STEPS)).url
    with pytest.raises(
        BadInput, match=r"a running vllm returns no states; leave engine\.url out and"
    ):
        files.probe(url, name="vllm")


@pytest.mark.parametrize(
    ("flags", "returns"),
    [
        ({"enable_return_hidden_states": True, "return_hidden_states_mode": "full"}, True),
        ({"enable_return_hidden_states": True, "return_hidden_states_mode": None}, True),
        ({"enable_return_hidden_states": True}, True),
        # Which sets the other flag as well.
        ({"enable_return_hidden_states": True, "return_hidden_states_mode": "last"}, False),
        ({"enable_return_hidden_states": False, "return_hidden_states_mode": None}, False),
        ({}, False),
    ],
)
def test_the_flags_tell_whether_states_are_returned(flags: dict[str, Any], returns: bool) -> None:
    facts = Facts(engine="sglang", version="0.5.23", model=None, drafter=None, flags=flags)
    assert (why_no_states(facts) is None) == returns


def test_rows_that_a_cache_answered_are_missed_by_name() -> None:
    given = Returned(output=(5,), states=[[[1.0, 2.0]]], cached=3)
    words = r"1 rows for the 4 tokens of prompt p \(3 came from its cache of prefixes\)"
    with pytest.raises(BadInput, match=words):
        rows_of(given, 4, 2, "p")


def test_a_prompt_without_rows_behind_it_has_none() -> None:
    prefill, later = rows_of(Returned(output=(5,), states=[[[1, 2]]], cached=0), 1, 2, "p")
    assert (prefill.tolist(), later.shape) == ([[1.0, 2.0]], (0, 2))
