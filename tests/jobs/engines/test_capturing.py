"""A dump captured from a running server holds what the server returned, under the states that it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.conventions import KEY
from eagle3.data import find_data
from eagle3.errors import BadInput
from eagle3.samples import Sample, read_samples
from jobs.capture_states import open_job
from jobs.engines.engine import Draft
from jobs.engines.returned import POSITIONS
from jobs.engines.talk import Address, get_json
from jobs.events import Events
from tests.eagle3.small import SHAPE
from tests.jobs.engines import fake
from tests.jobs.engines.conftest import Serve
from tests.jobs.engines.test_returned import FLAGS, Files, noisy
from tests.jobs.test_drafter_test import LAYERS

pytestmark = pytest.mark.runs  # each starts servers

RETURNED, IDS = (0, 3, 5), [-1, 2, 4]
WIDTH = SHAPE.target_hidden
NEW = 6
END = 2  # the target's end token: that of LlamaConfig
# Behind the second a repetition begins at once (of windows of 2), the third ends behind two tokens.
PROMPTS = ([9, 3, 4, 20], [5, 6, 9, 4], [9, 8, 0], [fake.VICTIM, 30, 11])
Rows = list[list[float]]


class Asked:
    """One target, a server's answers for its texts, and the job that asks it."""

    def __init__(self, files: Files, folder: Path, serve: Serve) -> None:
        self.files, self.folder, self.serve = files, folder, serve
        self.target = files.target
        self.drafter = folder / "drafter"
        self.out = folder / "out" / "data"
        self.told(IDS)

    def told(self, ids: Sequence[int]) -> None:
        """The drafter that the server names has these ids."""
        self.drafter.mkdir(exist_ok=True)
        config = {"eagle_config": {KEY: list(ids)}}
        (self.drafter / "config.json").write_text(json.dumps(config))

    def quantised(self) -> None:
        """A target whose layers cannot be run on the host."""
        self.target = self.folder / "quantised"
        shutil.copytree(self.files.target, self.target)
        config = json.loads((self.target / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (self.target / "config.json").write_text(json.dumps(config))

    def answers(
        self,
        states: Sequence[int] = RETURNED,
        make: Callable[[Rows], Any] = lambda rows: rows,
        text: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda meta: meta,
    ) -> Path:
        """The server's states of each prompt's beginning and of its texts; `make` changes all rows,
        `text` what is returned of texts that were continued by anything.
        """
        by_prompt = {}
        for prompt in PROMPTS:
            whole = [*prompt, *range(prompt[-1] + 1, prompt[-1] + 1 + NEW)]
            for end in range(len(prompt), len(whole) + 1):
                made = self.files.states(torch.tensor(whole[:end]))
                rows = make(torch.cat([made[k] for k in states], -1).tolist())
                meta: Any = {"hidden_states": [rows]}
                key = ",".join(map(str, whole[:end][:POSITIONS]))
                by_prompt[key] = [meta if end == len(prompt) else text(meta)]
        file = self.folder / "states.json"
        file.write_text(json.dumps(by_prompt))
        return file

    def start(
        self,
        states: Path | None = None,
        *,
        drafts: bool = True,
        target: Path | None = None,
        fault: str = "",
        **flags: Any,
    ) -> Address:
        """A fake that returns these states; with other flags than the usual ones where any are given."""
        more = {fake.STATES: str(states or self.answers())}
        draft = Draft(folder=self.drafter, steps=3) if drafts else None
        where = target or self.target
        return self.serve(draft=draft, target=where, fault=fault, flags=flags or FLAGS, **more)

    def capture(
        self,
        address: Address | str,
        *,
        dtype: str = "auto",
        version: str | None = None,
        **case: Any,
    ) -> dict[str, Any]:
        """The job's answer."""
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in PROMPTS))
        url = address if isinstance(address, str) else address.url
        engine = {"name": "sglang", "url": url, "version": version, "engine_class": None}
        request = {
            "device": "cpu",
            "dtype": dtype,
            "request_s": None,
            "engine": engine,
            "inputs": {"target": {"path": str(self.target), "layout": "hf", "made": ""}},
        }
        usual = {
            "out": str(self.out),
            "prompts": str(prompts),
            "states": [5, 0],
            "new_tokens": NEW,
            "repetition_window": 2,
            "min_new_tokens": 3,
            "batch": 3,
            "max_samples": None,
            "keep": False,
        }
        with Events(self.folder / "events.jsonl") as events:
            found = open_job(request, events).run_case({**usual, **case})
        return json.loads(json.dumps(found, allow_nan=False))

    def samples(self) -> list[Sample]:
        """What was written, in order."""
        form = find_data(self.out, hidden=WIDTH, num_layers=LAYERS)
        return list(read_samples(form, vocab=SHAPE.vocab, hidden=WIDTH))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def asked(files: Files, tmp_path: Path, serve: Serve) -> Asked:
    return Asked(files, tmp_path, serve)


def nothing_left(asked: Asked) -> bool:
    return not asked.out.parent.exists() or not list(asked.out.parent.iterdir())


def test_the_dump_holds_the_texts_their_states_and_the_targets_choices(asked: Asked) -> None:
    address = asked.start()
    result = asked.capture(address)
    samples = asked.samples()
    whole = [[9, 3, 4, *range(20, 27)], [fake.VICTIM, 30, *range(11, 18)]]
    assert [s.input_ids.tolist() for s in samples] == whole
    for sample in samples:
        prompt = len(sample.input_ids) - NEW
        assert sample.loss_mask.tolist() == [False] * prompt + [True] * NEW
        # As the fake's target chooses: t + 1 behind t.
        assert sample.target_argmax is not None
        assert sample.target_argmax.tolist() == (sample.input_ids + 1).tolist()
        states = asked.files.states(sample.input_ids)
        assert list(sample.states) == [5, 0]
        for k in (5, 0):
            assert torch.equal(sample.states[k], states[k])
        assert all(slot.dtype is torch.float32 for slot in sample.stored)
    written = json.loads((asked.out / "capture.json").read_text())
    assert (written["states"], written["num_layers"]) == ([5, 0], LAYERS)
    assert (written["samples"], written["left_out"]) == (2, 2)
    assert written["positions"] == written["positions_following_argmax"] == 2 * NEW
    assert (written["new_tokens"], written["repetition_window"]) == (NEW, 2)
    assert written["dtype"] == "float32"
    source = written["source"]
    assert (source["engine"], source["version"], source["url"]) == ("sglang", "0.5.23", address.url)
    assert source["model"] == str(asked.target)
    assert source["returned"] == list(RETURNED)
    assert source["states_known_by"] == ["measured", "measured"]
    assert source["told"].startswith(f"{asked.drafter}/config.json: ids {IDS} = states [0, 3, 5]")
    assert source["target_argmax"].startswith("the likeliest token at every position")
    assert result["capture"] == {"out": str(asked.out), **written}
    assert "12 of 12 tokens in the loss mask are the target's own choice" in result["notes"]
    assert get_json(address, "/server_info")["version"] == "0.5.23"  # and it was left running


def test_texts_as_they_are_are_captured_whole(asked: Asked) -> None:
    asked.capture(asked.start(), new_tokens=0)
    samples = asked.samples()
    assert [s.input_ids.tolist() for s in samples] == [list(prompt) for prompt in PROMPTS]
    assert all(s.loss_mask.tolist() == [False, *[True] * (len(s.loss_mask) - 1)] for s in samples)


def test_a_text_ends_with_its_end_token(asked: Asked) -> None:
    asked.capture(asked.start(), repetition_window=None, min_new_tokens=2)
    assert [9, 8, 0, 1, END] in [s.input_ids.tolist() for s in asked.samples()]


def test_what_is_measured_counts_where_the_server_was_told_otherwise(asked: Asked) -> None:
    asked.told([2, 4, 5])  # its config.json was changed behind it: states 3, 5, 6
    result = asked.capture(asked.start(), states=[3])
    (note,) = [n for n in result["notes"] if "not as told" in n]
    assert note.startswith("measured, the server returns states [0, 3, 5]")
    assert "ids [2, 4, 5] = states [3, 5, 6]" in note
    for sample in asked.samples():
        assert torch.equal(sample.states[3], asked.files.states(sample.input_ids)[3])
    asked.told([2])  # another number of them
    again = asked.capture(asked.start(), states=[3], out=str(asked.folder / "again"))
    assert again["capture"]["source"]["states_known_by"] == ["measured"]


def test_rows_that_are_none_of_the_states_told_name_both(asked: Asked) -> None:
    file = asked.answers(make=lambda rows: noisy(rows, 0.6))
    with pytest.raises(BadInput, match=r"but it was told that this is state 0: .*ids \[-1, 2, 4\]"):
        asked.capture(asked.start(file))
    assert nothing_left(asked)


def test_rows_of_other_positions_are_refused(asked: Asked) -> None:
    file = asked.answers(make=lambda rows: [rows[-1], *rows[:-1]])
    with pytest.raises(
        BadInput, match=r"rows are not their positions' own.*row t is of position t-1"
    ):
        asked.capture(asked.start(file))


def test_where_layers_cannot_be_run_the_servers_ids_count_and_that_is_said(asked: Asked) -> None:
    asked.quantised()
    result = asked.capture(asked.start())
    assert result["capture"]["source"]["states_known_by"] == ["declared", "declared"]
    assert (
        "not measured: the target's weights are quantised, and only plain ones are run"
        in (result["notes"])
    )
    for sample in asked.samples():
        assert torch.equal(sample.states[5], asked.files.states(sample.input_ids)[5])


def test_without_either_evidence_no_state_is_guessed(asked: Asked) -> None:
    asked.quantised()
    address = asked.start()
    (asked.drafter / "config.json").unlink()
    with pytest.raises(
        BadInput,
        match=r"which states the server returns is not known \(its drafter's ids .* quantised",
    ):
        asked.capture(address)
    # Measured, nobody has to say it.
    asked.target = asked.files.target
    found = asked.capture(asked.start())
    assert found["capture"]["source"]["states_known_by"] == ["measured", "measured"]


def test_more_states_than_were_told_are_refused_where_none_is_measured(asked: Asked) -> None:
    asked.quantised()
    asked.told([2, 4])
    with pytest.raises(BadInput, match=r"returns 3 states a row, but was told 2: .*ids"):
        asked.capture(asked.start())


def test_a_state_that_is_not_returned_is_refused_with_those_that_are(asked: Asked) -> None:
    with pytest.raises(
        BadInput,
        match=r"data\.capture\.states asks for state 6, but the server returns states \[0, 3, 5\]",
    ):
        asked.capture(asked.start(), states=[0, 6])
    assert nothing_left(asked)


def test_a_server_without_a_drafter_returns_the_layers_of_its_flag(asked: Asked) -> None:
    flags = {"enable_return_aux_hidden_states": True, "return_aux_hidden_state_layer_ids": [2, 4]}
    address = asked.start(asked.answers((3, 5)), drafts=False, **flags)
    source = asked.capture(address, states=[3, 5])["capture"]["source"]
    assert (source["returned"], source["drafter"]) == ([3, 5], None)
    assert source["told"].startswith(
        "--return-aux-hidden-state-layer-ids: ids [2, 4] = states [3, 5]"
    )


def test_without_log_probabilities_the_text_is_the_choice_and_that_is_said(asked: Asked) -> None:
    result = asked.capture(asked.start(fault="no_logprobs"))
    for sample in asked.samples():
        assert sample.target_argmax is not None
        after = [*sample.input_ids[1:].tolist(), int(sample.input_ids[-1]) + 1]
        assert sample.target_argmax.tolist() == after
    assert result["capture"]["source"]["target_argmax"].startswith("the next token of the text")
    (note,) = [n for n in result["notes"] if n.startswith("target_argmax is the next token")]
    assert "not supported here" in note
    # The texts follow their own tokens whatever the server does: that says nothing.
    written = json.loads((asked.out / "capture.json").read_text())
    assert written["positions_following_argmax"] is None
    assert not [n for n in result["notes"] if "the target's own choice" in n or "go on as" in n]
    with pytest.raises(
        BadInput, match=r"which texts as they are need; .*data\.capture\.new_tokens=N"
    ):
        asked.capture(asked.start(fault="no_logprobs"), new_tokens=0, out=str(asked.folder / "b"))


@pytest.mark.parametrize(("says", "alike"), [(3, 1), (4, 0)])
def test_without_log_probabilities_a_cut_text_is_held_against_what_the_server_says_there(
    asked: Asked, says: int, alike: int
) -> None:
    answers = asked.answers(text=lambda meta: {**meta, "output_ids": [says]})
    address = asked.start(answers, fault="no_logprobs")
    result = asked.capture(address, repetition_window=None, min_new_tokens=2)
    written = result["capture"]
    # [9, 8, 0] goes on with 1 and the end token, and behind it with 3.
    assert (written["cut_texts"], written["cut_texts_going_on_alike"]) == (1, alike)
    note = (
        f"{alike} of 1 texts that were cut go on as they were written, when the server reads them"
    )
    assert note in result["notes"]


def test_a_failure_otherwise_is_no_reason_to_do_without_log_probabilities(asked: Asked) -> None:
    with pytest.raises(
        BadInput, match=r"prompt 1 was not answered: .* answered 503: the scheduler"
    ):
        asked.capture(asked.start(fault="no_logprobs_now"))
    assert nothing_left(asked)


def test_where_one_prompt_fails_it_is_said_that_others_are_under_way(asked: Asked) -> None:
    asked.quantised()  # nothing else is asked
    with pytest.raises(BadInput, match=r"prompt 4 was not answered: .*the prompt is too long"):
        asked.capture(asked.start(fault="stalls"), batch=4)
    said = (asked.folder / "events.jsonl").read_text()
    assert "3 other prompts are being answered still" in said
    assert "at most 300 s from now (job.request_s)" in said


def test_numbers_of_a_narrow_type_are_kept_in_it(asked: Asked) -> None:
    def halved(rows: Rows) -> Any:
        return torch.tensor(rows).to(torch.bfloat16).float().tolist()

    result = asked.capture(asked.start(asked.answers(make=halved)))
    assert result["capture"]["dtype"] == "bfloat16"
    assert all(slot.dtype is torch.bfloat16 for s in asked.samples() for slot in s.stored)


def likeliest(tokens: Callable[[int], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Of a text's answer, other choices within it."""

    def change(meta: dict[str, Any]) -> dict[str, Any]:
        count = len(meta["hidden_states"][0])
        return {**meta, "input_top_logprobs": [None, *(tokens(i) for i in range(1, count))]}

    return change


def without(row: Callable[[Rows], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Of a text's answer, other rows."""
    return lambda meta: {"hidden_states": [row(meta["hidden_states"][0])]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lambda _: {}, "the server answered prompt 1 without states; start it with"),
        (without(lambda rows: rows[1:]), "returned 9 rows for the 10 tokens of prompt 1"),
        (
            without(lambda rows: [[float("nan"), *rows[0][1:]], *rows[1:]]),
            "1 of the 10 rows that the server returned of prompt 1 hold NaN",
        ),
        (
            likeliest(lambda _: [[-0.5, 49, None]]),
            "only 0 of 6 tokens that the server wrote are its",
        ),
        (
            likeliest(lambda _: [[-0.5, SHAPE.vocab, None]]),
            "are not one token of the target's vocabul",
        ),
        (likeliest(lambda _: []), "input_top_logprobs of prompt 1 are no tokens"),
        (lambda _: None, r"prompt 1 was not answered: http://127\.0\.0\.1:\d+/generate: "),
    ],
    ids=["none", "few", "nan", "other", "outside", "empty", "dies"],
)
def test_a_text_that_cannot_be_used_is_one_sentence_and_leaves_nothing(
    asked: Asked, text: Callable[[dict[str, Any]], dict[str, Any] | None], words: str
) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        asked.capture(asked.start(asked.answers(text=text)))
    assert "\n" not in str(caught.value)
    assert nothing_left(asked)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "cut",
            r"prompt 4 has 3 tokens and was to be continued by 6, but the server took 3 and said 5",
        ),
        ("refuses", r"prompt 4 was not answered: .* answered 400: .*the prompt is too long"),
        ("dies", r"prompt 4 was not answered: "),
        ("other_model", r"engine\.url=http\S+: it serves the model /models/other, not "),
    ],
)
def test_a_server_that_fails_midway_is_one_sentence_and_leaves_nothing(
    asked: Asked, fault: str, words: str
) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        # The probing of the first ones is over then; the last one begins with VICTIM.
        asked.capture(asked.start(fault=fault))
    assert "\n" not in str(caught.value)
    assert nothing_left(asked)


@pytest.mark.parametrize(
    ("drafts", "flags", "words"),
    [
        (
            True,
            {"log_level": "info"},
            "it does not return its states; start it with --enable-return",
        ),
        (True, {**FLAGS, "return_hidden_states_mode": "last"}, "it does not return its states"),
        (
            False,
            FLAGS,
            "its speculative_algorithm is None, with which it returns states behind the fin",
        ),
        (
            False,
            {"enable_return_aux_hidden_states": True, "return_hidden_states_mode": "last"},
            "it returns the last position's states alone; start it with --return-hidden-states-mode",
        ),
        (
            True,
            {**FLAGS, "preferred_sampling_params": "{}"},
            "its --preferred-sampling-params change",
        ),
        (
            True,
            {**FLAGS, "chunked_prefill_size": 9},
            "the longest text may have 10 tokens, but the",
        ),
        (True, {**FLAGS, "dtype": "half"}, "is float32, but the server at .* with --dtype half"),
    ],
)
def test_a_server_that_cannot_be_captured_from_is_refused_before_it_is_asked(
    asked: Asked, drafts: bool, flags: dict[str, Any], words: str
) -> None:
    dtype = "float32" if "dtype" in flags else "auto"
    with pytest.raises(BadInput, match=words) as caught:
        asked.capture(asked.start(drafts=drafts, **flags), dtype=dtype)
    assert "\n" not in str(caught.value)
    assert nothing_left(asked)


def test_the_number_type_that_is_asked_for_is_the_servers(asked: Asked) -> None:
    asked.capture(asked.start(**FLAGS, dtype="float32"), dtype="float32")


def test_a_server_of_another_width_or_release_or_none_at_all_is_refused(asked: Asked) -> None:
    file = asked.answers(make=lambda rows: [row[:-1] for row in rows])
    with pytest.raises(
        BadInput, match=r"59 numbers a row, which is no multiple of .* hidden size 20"
    ):
        asked.capture(asked.start(file))
    with pytest.raises(
        BadInput, match=r"engine\.version=0\.5\.12, but the server at \S+ is sglang 0"
    ):
        asked.capture(asked.start(), version="0.5.12")
    with pytest.raises(
        BadInput, match=r"engine\.url=http://127\.0\.0\.1:9 does not answer as sglang"
    ):
        asked.capture("http://127.0.0.1:9")


def test_a_release_is_named_without_what_a_build_adds_to_it(asked: Asked) -> None:
    address = asked.start(**FLAGS, version="0.5.23+cu129")
    source = asked.capture(address, version="0.5.23")["capture"]["source"]
    assert source["version"] == "0.5.23+cu129"


def test_a_folder_that_is_there_is_never_written_to(asked: Asked) -> None:
    address = asked.start()
    asked.capture(address)
    before = (asked.out / "capture.json").read_bytes()
    with pytest.raises(BadInput, match=re.escape(f"{asked.out} exists already")):
        asked.capture(address)
    asked.capture(address, keep=True, new_tokens=0)
    assert (asked.out / "capture.json").read_bytes() == before
