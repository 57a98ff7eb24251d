"""A diagnosis of the lab's drafter asks a running server: what it returns, counts and says is joined."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.conventions import KEY
from eagle3.data import LAYOUTS, find_data
from eagle3.errors import BadInput
from eagle3.files import read_json
from eagle3.samples import answer_start
from jobs import served_live
from jobs.diagnose import open_job
from jobs.engines.engine import Draft
from jobs.engines.folder import lay_out
from jobs.engines.returned import FLAG, NEW_TOKENS, POSITIONS
from jobs.engines.talk import Address, get_json
from jobs.events import Events
from jobs.first_layers import FirstLayers
from jobs.question import Kit
from jobs.served_live import OF_STATES, PROMPTS
from tests.jobs.engines import fake
from tests.jobs.engines.conftest import Serve
from tests.jobs.test_diagnose import LAB, kinds, request_of

pytestmark = pytest.mark.runs  # each starts servers

STEPS = 3  # of which the fake accepts 3 and 0 in turn behind a prompt that ends in 4, 9, …
RIGHT, WRONG = (0, 3, 31), (3, 31, 59)
TEXTS = 8
FLAGS = {"enable_return_hidden_states": True}
NONE = {"SGLANG_SIMULATE_ACC_LEN": "1"}  # the fake accepts no draft
ENGINE: dict[str, Any] = {
    **{"name": "sglang", "version": None, "engine_class": None, "checkout": None},
    **{"flags": {}, "ids": None, "accept_length": None},
}


class Lab:
    """The lab's target and data, made once, and what a server of it returns."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, folder / "target"
        with Events(folder / "events.jsonl") as events:
            request = request_of(folder, LAB / "drafter")
            request["inputs"]["data"]["capture"]["cases"][0].update(max_samples=24, batch=24)
            open_job(request, events)
        self.kit = Kit(self.target)
        form = find_data(
            folder / "data", hidden=self.kit.target.hidden, num_layers=self.kit.target.num_layers
        )
        samples = [LAYOUTS[form.layout].read(path, form) for path in form.files[:PROMPTS]]
        self.prompts = [s.input_ids[: answer_start(s.loss_mask)].tolist() for s in samples]

    def drafter(self, out: Path, ids: Sequence[int] | None) -> Path:
        """The drafter's folder as somebody serves it."""
        config = read_json(LAB / "drafter" / "config.json")
        if ids is not None:
            config["eagle_config"] = {KEY: list(ids)}
        return lay_out(LAB / "drafter", out, config)

    def returned(
        self, file: Path, layers: Sequence[int], *, shift: int = 0, noise: float = 0
    ) -> str:
        """What the fake returns for both askings of each prompt, a file; the second with noise."""
        texts = []
        for prompt in self.prompts[:OF_STATES]:
            asked = prompt[:POSITIONS]
            texts.append(torch.tensor([*asked, *(asked[-1] + 1 + i for i in range(NEW_TOKENS))]))
        made = self.kit.layers.states([t % self.kit.target.vocab for t in texts], max(layers))
        found = {}
        for text, states in zip(texts, made, strict=True):
            count = len(text) - NEW_TOKENS
            rows = torch.cat([states[k].float() for k in layers], -1).roll(shift, 0)
            drawn = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
            takes = [rows, rows + noise * rows.norm(dim=-1, keepdim=True) * drawn / 10]
            found[",".join(map(str, text[:count].tolist()))] = [
                {"hidden_states": [take[:count].tolist(), *take[count:-1].tolist()]}
                for take in takes
            ]
        file.write_text(json.dumps(found))
        return str(file)

    def ask(self, url: str, out: Path, drafter: Path | None = None, **changed: Any) -> Any:
        """The job's answer."""
        settings = {key: changed.pop(key) for key in ("steps",) if key in changed}
        request = request_of(
            self.folder,
            drafter or LAB / "drafter",
            engine={**ENGINE, "url": url, **changed},
            **{"max_samples": TEXTS, "steps": STEPS, **settings},
        )
        with Events(out / "events.jsonl") as events:
            found = open_job(request, events).run_case({"case_id": "case"})
        return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def serving(serve: Serve, lab: Lab, tmp_path: Path) -> Callable[..., Address]:
    """A fake SGLang that serves the lab's drafter with these ids, and returns these states."""

    def start(
        layers: Sequence[int] = RIGHT,
        ids: Sequence[int] | None = (-1, 2, 30),
        *,
        flags: dict[str, Any] = FLAGS,
        returned: dict[str, Any] | None = None,
        **more: Any,
    ) -> Address:
        draft = Draft(folder=lab.drafter(tmp_path / "served", ids), steps=STEPS)
        file = lab.returned(tmp_path / "states.json", layers, **(returned or {}))
        more = {fake.STATES: file, "target": lab.target, **more}
        return serve(draft=draft, flags=flags, **more)

    return start


def first_lines(result: dict[str, Any]) -> str:
    lines: list[str] = result["diagnosis"]["first_lines"]
    assert 0 < len(lines) <= 12
    assert max(map(len, lines)) <= 120
    for word in ("expected accept length", "confidence: "):
        assert sum(line.startswith(word) for line in lines) == 1
    return re.sub(r"\s+", " ", "\n".join(lines))


def test_other_states_than_trained_are_the_config_s_fault(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    address = serving(WRONG, (2, 30, 58), **NONE)
    result = lab.ask(address.url, tmp_path)
    diagnosis = result["diagnosis"]
    assert kinds(result) == ["states"]
    assert diagnosis["trained"]["states"] == list(RIGHT)
    assert diagnosis["served"]["states"] == list(WRONG)
    assert diagnosis["served"]["measured"]
    server = diagnosis["server"]
    assert (server["fault"], server["version"]) == ("config", "0.5.23")
    assert server["states"] == list(WRONG)
    # It accepts no draft, and such a wiring alone next to none.
    assert server["accept_length"]["value"] == 1.0
    assert server["alone"]["value"] < 1.2
    assert (
        "; served: run (measured: the server returns states 3, 31 and 59)"
        in (diagnosis["causes"][0]["evidence"])
    )
    text = first_lines(result)
    assert "1. states: trained on states 0, 3 and 31; served states 3, 31 and 59" in text
    assert "fix: " in text
    assert "[-1, 2, 30]" in text
    assert "fault: config; the server feeds states 3, 31 and 59 (measured)" in text
    # What it serves is what is diagnosed, and mended.
    assert diagnosis["config"]["eagle_config"][KEY] == [-1, 2, 30]
    folder = tmp_path / "served"
    assert any(f"the server serves {folder}, which has the" in note for note in result["notes"])
    # It is left as it was.
    assert get_json(address, "/server_info")["version"] == "0.5.23"


def test_right_states_and_an_accept_length_as_alone_are_no_fault(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    result = lab.ask(serving().url, tmp_path)
    server = result["diagnosis"]["server"]
    assert kinds(result) == []
    assert result["diagnosis"]["verdict"] == "sound"
    assert server["fault"] == "none found"
    assert server["contradicts"] is None
    # The fake gains 4 and 1 tokens in turn, or 4 alone, by where a prompt ends.
    assert 2.3 < server["accept_length"]["value"] <= 4
    assert "fault: none found; the server feeds states 0, 3 and 31 (measured)" in first_lines(
        result
    )


def test_right_states_of_which_less_is_accepted_are_the_engine_s_fault(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    result = lab.ask(serving(**NONE).url, tmp_path)
    assert kinds(result) == ["engine-state"]
    (cause,) = result["diagnosis"]["causes"]
    assert (cause["confidence"], cause["evidence"]) == ("likely", "run")
    assert "was counted at 1.00 [1.00, " in cause["what"]
    assert "something between the target's states and what is accepted loses" in cause["what"]
    server = result["diagnosis"]["server"]
    assert (server["fault"], server["lost"]["low"] > 0.1) == ("engine", True)
    assert "fault: engine; the server feeds states 0, 3 and 31 (measured)" in first_lines(result)


def test_what_was_measured_is_believed_before_the_tables(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    result = lab.ask(serving(RIGHT, (2, 30, 58)).url, tmp_path)
    diagnosis = result["diagnosis"]
    assert kinds(result) == []
    assert diagnosis["served"]["states"] == list(RIGHT)
    (line,) = [note for note in diagnosis["notes"] if note.startswith("the tables are contra")]
    assert "reads the ids [2,30,58]" in line
    assert line.endswith("but it returns states 0, 3 and 31, and that is believed")
    assert "(measured, against the tables)" in first_lines(result)


def test_without_the_flag_the_tables_are_read_and_that_is_said(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    result = lab.ask(serving(WRONG, (2, 30, 58), flags={}, **NONE).url, tmp_path)
    diagnosis = result["diagnosis"]
    assert kinds(result) == ["states"]
    assert not diagnosis["served"]["measured"]
    assert diagnosis["served"]["engine"].startswith("SGLang 0.5.23, class ")
    server = diagnosis["server"]
    assert (server["fault"], server["states"]) == ("config", None)
    assert server["accept_length"]["value"] == 1.0
    told = f"states 3, 31 and 59 read from tables, not measured (needs {FLAG})"
    assert told in first_lines(result)
    assert any(
        line.startswith("which states the server feeds: read from tables") and FLAG in line
        for line in diagnosis["undecided"]
    )


def test_a_running_vllm_is_asked_for_what_it_counts(serve: Serve, lab: Lab, tmp_path: Path) -> None:
    draft = Draft(folder=LAB / "drafter", steps=STEPS)
    address = serve("vllm", draft=draft, target=lab.target)
    result = lab.ask(address.url, tmp_path, name="vllm")
    diagnosis = result["diagnosis"]
    assert diagnosis["served"]["engine"].startswith("vLLM 0.32.0")
    server = diagnosis["server"]
    assert server["states"] is None
    assert server["why_not"].startswith("a running vllm returns none; job=engine_probe")
    assert 2.3 < server["accept_length"]["value"] <= 4
    # It accepts what no drafter does on the states that the tables have: so those are not sure.
    assert server["fault"] == "undecided, since it accepts more than the tables' states can give"
    states, more = diagnosis["causes"]
    assert (states["kind"], states["confidence"]) == ("states", "possible")
    assert "what it feeds is not what was read; as trained it would be 2." in more["what"]
    # How many it drafts a round is counted, so that the figures can be compared.
    assert server["lost"] is not None
    assert diagnosis["engine_figure"] is None
    assert "read from tables, not measured (a running vllm returns none" in first_lines(result)
    words = r"it drafts 3 steps, but job\.steps=4 would be scored beside it; give job\.steps=3$"
    with pytest.raises(BadInput, match=words):
        lab.ask(address.url, tmp_path, name="vllm", steps=4)


def test_rows_of_another_position_are_the_engine_s_fault(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    result = lab.ask(serving(returned={"shift": 1}, **NONE).url, tmp_path)
    (cause,) = result["diagnosis"]["causes"]
    assert cause["kind"] == "engine-state"
    assert "row t of the states that the server returns is that of position t-1" in cause["what"]
    assert result["diagnosis"]["server"]["fault"] == "engine"


def test_rows_that_are_moved_where_as_much_is_accepted_are_only_said(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    """What accepts as much as the drafter alone is fed as it should be: the answer alone is moved."""
    result = lab.ask(serving(returned={"shift": 1}).url, tmp_path)
    assert kinds(result) == []
    assert any("row t is of position t-1" in note for note in result["diagnosis"]["notes"])


def test_the_last_state_that_could_be_made_may_be_one_behind_it(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory for 58 layers: what is nearest to state 58 is state 59, which was not made.
    few = FirstLayers(layers=58, why="they take all that is free")
    monkeypatch.setattr(served_live, "plan_layers", lambda *_: few)
    result = lab.ask(serving(WRONG, (2, 30, 58)).url, tmp_path)
    server = result["diagnosis"]["server"]
    assert server["states"] is None
    assert server["why_not"] == (
        "a chunk is nearest to state 58, the last that the target's layers made here, and may be one "
        "behind it (they take all that is free)"
    )


def test_states_that_are_noise_are_not_believed(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    result = lab.ask(serving(WRONG, returned={"noise": 3.0}).url, tmp_path)
    diagnosis = result["diagnosis"]
    assert diagnosis["served"]["states"] == list(RIGHT)  # as the tables read its ids
    server = diagnosis["server"]
    assert server["states"] is None
    assert server["why_not"].startswith("not every state that it returns could be named: chunk ")
    assert any(note.startswith("asked twice, the server returned") for note in diagnosis["notes"])
    assert "read from tables, not measured (not every state" in first_lines(result)


def test_what_is_counted_goes_before_an_accept_length_that_was_given(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    result = lab.ask(serving(**NONE).url, tmp_path, accept_length=2.6)
    assert kinds(result) == ["engine-state"]
    notes = result["diagnosis"]["notes"]
    assert any(note.startswith("the server was counted at 1.00 [1.00, ") for note in notes)


def refused(lab: Lab, url: str, words: str, **changed: Any) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        lab.ask(url, lab.folder, **changed)
    assert "\n" not in str(caught.value)


def test_what_contradicts_the_server_is_refused(
    serving: Callable[..., Address], lab: Lab, tmp_path: Path
) -> None:
    url = serving().url
    named = r"^engine\.version=0\.5\.12, but the server at \S+ is sglang 0\.5\.23; leave it out"
    refused(lab, url, named, version="0.5.12")
    steps = r"it drafts 3 steps, but job\.steps=5 would be scored beside it; give job\.steps=3$"
    refused(lab, url, steps, steps=5)
    flags = (
        r"^engine\.flags: speculative_eagle_topk is 4, but the server at \S+ says 1; leave it out$"
    )
    refused(lab, url, flags, flags={"topk": 4})
    other = tmp_path / "other"
    shutil.copytree(LAB / "drafter", other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: t * 2 for name, t in tensors.items()}, other / "model.safetensors")
    with pytest.raises(BadInput, match=rf"its drafter \S+ has other weights than {other}$"):
        lab.ask(url, tmp_path, other)
    # The same release and flags are no contradiction.
    lab.ask(url, tmp_path, version="0.5.23", flags={"num_steps": 3})


def test_a_server_of_another_model_or_of_none_is_refused(
    serve: Serve, serving: Callable[..., Address], lab: Lab
) -> None:
    other = serving(fault="other_model").url
    refused(lab, other, r"^engine\.url=\S+: it serves the model /models/other, not ")
    nothing = r"^engine\.url=http://127\.0\.0\.1:1 does not answer as sglang: "
    refused(lab, "http://127.0.0.1:1", nothing)
    refused(lab, "gpu8:port", r"does not answer as sglang: \S+ is no address of a server")
    plain = serve("sglang", target=lab.target).url
    words = r"it serves no drafter \(no speculative_algorithm\); name the server that does"
    refused(lab, plain, words)
    vllm = serve("vllm", target=lab.target).url
    words = "it serves no drafter, since it counts no drafts; name the server that does"
    refused(lab, vllm, words, name="vllm")
    refused(lab, vllm, "does not answer as sglang: ")
