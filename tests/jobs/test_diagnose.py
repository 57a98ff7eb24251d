"""The job on the lab: the story's drafter and the second one behind SGLang 0.5.12, and a sound one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import jobs.diagnosing
import jobs.searching
from eagle3.doctor.subject import EngineAsked
from eagle3.errors import BadInput
from eagle3.wiring import Wiring
from jobs.diagnose import open_job
from jobs.diagnosing import diagnose_folder
from jobs.events import Events
from jobs.question import Asked, Kit, check_engine

LAB = Path(__file__).parents[2] / "lab"
PROMPTS = 48
KIMI = {"name": "sglang", "version": "0.5.12", "engine_class": "kimi_k25", "ids": [2, 30, 58]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's target and data, made once."""
    folder = tmp_path_factory.mktemp("made")
    with Events(folder / "events.jsonl") as events:
        open_job(request_of(folder, LAB / "drafter"), events)
    return folder


def request_of(made: Path, drafter: Path, **changed: Any) -> dict[str, Any]:
    target = {"path": str(LAB / "target"), "layout": "lab", "made": str(made / "target")}
    capture = {
        "job": "capture_states",
        "device": "cpu",
        "threads": 1,
        "dtype": "float32",
        "inputs": {"target": target},
        "cases": [
            {
                "case_id": "case",
                "prompts": str(LAB / "prompts.jsonl"),
                "out": str(made / "data"),
                "keep": True,
                "states": [0, 3, 31, 59],
                "new_tokens": 96,
                "repetition_window": 24,
                "min_new_tokens": 24,
                "batch": PROMPTS,
                "max_samples": PROMPTS,
            }
        ],
    }
    data = {"path": str(made / "data"), "target_argmax": None, "states": None, "layout": None}
    return {
        "job": "diagnose",
        "device": "cpu",
        "threads": 1,
        "steps": 4,
        "max_samples": 16,
        "seed": 0,
        "axes": {"fixed": [], "only": {}, "states": None},
        "start": None,
        "finalists": 4,
        "inputs": {
            "target": target,
            "drafter": {"path": str(drafter), "layout": None},
            "data": {**data, "damaged": "fail", "capture": capture},
        },
        "engine": None,
        "trained_accuracy": None,
        "cases": [{"case_id": "case"}],
        **changed,
    }


def answer(made: Path, drafter: Path, tmp_path: Path, **changed: Any) -> dict[str, Any]:
    with Events(tmp_path / "events.jsonl") as events:
        job = open_job(request_of(made, drafter, **changed), events)
        found = job.run_case({"case_id": "case"})
    return json.loads(json.dumps(found))  # it has to be fit for a result file


def kinds(result: dict[str, Any]) -> list[str]:
    return [cause["kind"] for cause in result["diagnosis"]["causes"]]


def test_the_story_behind_sglang(made: Path, tmp_path: Path):
    result = answer(made, LAB / "drafter", tmp_path, engine=KIMI)
    diagnosis = result["diagnosis"]
    assert diagnosis["verdict"] == "cause"
    assert kinds(result) == ["states"]
    assert diagnosis["trained"]["states"] == [0, 3, 31]
    assert diagnosis["served"]["states"] == [3, 31, 59]
    assert diagnosis["accept_length_served"]["value"] < 1.2
    assert diagnosis["accept_length_repaired"]["value"] > 2.3
    text = "\n".join(diagnosis["first_lines"])
    assert "[-1, 2, 30]" in text
    assert "expected accept length" in text
    assert diagnosis["slots"] == [
        f"slot {i}: state {k}, verified" for i, k in enumerate((0, 3, 31, 59))
    ]
    assert result["ranked"][0]["states"] == [0, 3, 31]
    assert result["metrics"]["accuracy"]["value"] > 0.6


@pytest.mark.runs
def test_the_second_drafter_has_three_faults(made: Path, tmp_path: Path):
    drafter = LAB / "drafter_speculators"
    result = answer(made, drafter, tmp_path, engine=KIMI, max_samples=PROMPTS)
    assert {"teacher", "residual", "states"} <= set(kinds(result))
    diagnosis = result["diagnosis"]
    assert "state 59" in diagnosis["teacher"]
    # What can be written comes first on the ladder: the ids, before what takes a patch.
    ladder = [step["mended"] for step in diagnosis["ladder"]]
    assert ladder[0] == "states"
    alone = diagnosis["ladder"][0]["accept_length"]["value"]
    assert alone < 1.3
    lines = diagnosis["first_lines"]
    assert len(lines) <= 12
    # What serving shows once the ids alone are written, and a fix for each of the three.
    assert any(f"alone mended {alone:.2f}: serving stays slow [inferred]" in s for s in lines)
    assert sum(s.strip().startswith("fix: ") for s in lines) == 3
    assert any("[-1, 2, 30]" in s for s in lines)
    cost = next(c["cost"] for c in diagnosis["causes"] if c["kind"] == "teacher")
    assert cost is None


def test_a_sound_drafter_has_nothing(made: Path, tmp_path: Path):
    result = answer(made, LAB / "drafter", tmp_path)
    assert result["diagnosis"]["verdict"] == "sound"
    assert kinds(result) == []
    assert result["diagnosis"]["config"] is None


def with_table(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The first lab drafter with another d2t."""
    shutil.copytree(LAB / "drafter", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = change(tensors["d2t"])
    save_file(tensors, folder / "model.safetensors")
    return folder


def shuffled(d2t: torch.Tensor) -> torch.Tensor:
    """The same target ids at other places."""
    places = torch.arange(len(d2t))
    ids = (d2t + places)[torch.randperm(len(d2t), generator=torch.Generator().manual_seed(0))]
    return ids - places


def test_a_table_that_was_never_filled_is_made_again_from_its_mask(made: Path, tmp_path: Path):
    drafter = with_table(tmp_path / "drafter", torch.zeros_like)
    result = answer(made, drafter, tmp_path)
    assert kinds(result) == ["d2t"]
    assert result["diagnosis"]["accept_length_repaired"]["value"] > 2.3


@pytest.mark.runs
def test_a_shuffled_table_costs_what_the_file_as_it_is_loses(made: Path, tmp_path: Path):
    drafter = with_table(tmp_path / "drafter", shuffled)
    result = answer(made, drafter, tmp_path, engine={**KIMI, "ids": [-1, 2, 30]})
    diagnosis = result["diagnosis"]
    assert kinds(result) == ["d2t"]
    assert diagnosis["accept_length_served"]["value"] < 1.1
    assert diagnosis["causes"][0]["cost"]["accept_length_so"]["value"] < 1.1
    assert [step["mended"] for step in diagnosis["ladder"]] == ["d2t"]
    assert diagnosis["ladder"][0]["accept_length"]["value"] > 2.3
    # The program of the fix is whole: run on the file it gives the table that was trained with.
    program = diagnosis["causes"][0]["fixes"][0]["snippet"]
    (tmp_path / "fix.py").write_text(program)
    subprocess.run([sys.executable, str(tmp_path / "fix.py"), str(drafter)], check=True)
    whole = load_file(LAB / "drafter" / "model.safetensors")
    assert torch.equal(load_file(drafter / "model.safetensors")["d2t"], whole["d2t"])


def test_a_table_in_another_order_that_works_is_searched_once(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drafter = tmp_path / "drafter"
    shutil.copytree(LAB / "drafter", drafter)
    tensors = load_file(drafter / "model.safetensors")
    places = torch.arange(len(tensors["d2t"]))
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = (tensors["d2t"] + places)[order] - places
    save_file(tensors, drafter / "model.safetensors")
    searches = []
    search = jobs.searching.search

    def counted(*args: Any, **kwargs: Any) -> Any:
        searches.append(1)
        return search(*args, **kwargs)

    monkeypatch.setattr(jobs.searching, "search", counted)
    result = answer(made, drafter, tmp_path)
    assert result["diagnosis"]["verdict"] == "sound"
    assert len(searches) == 1


@pytest.mark.runs
def test_damaged_weights_are_not_among_the_causes(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drafter = tmp_path / "drafter"
    shutil.copytree(LAB / "drafter", drafter)
    tensors = load_file(drafter / "model.safetensors")
    order = torch.randperm(384, generator=torch.Generator().manual_seed(1))
    name = next(n for n in tensors if n.endswith("mlp.gate_proj.weight"))
    tensors[name] = tensors[name][order]
    save_file(tensors, drafter / "model.safetensors")
    looked: list[bool] = []
    may_be = jobs.diagnosing.may_be_beside

    def may_be_beside(*given: Any) -> bool:
        looked.append(may_be(*given))
        return looked[-1]

    monkeypatch.setattr(jobs.diagnosing, "may_be_beside", may_be_beside)
    result = answer(made, drafter, tmp_path)
    assert result["diagnosis"]["verdict"] == "unknown"
    assert kinds(result)[0] == "unknown"
    # A state beside those that the data stores might do better: a few texts say no. It is not looked
    # for where that is not to be asked.
    assert looked == [False]
    axes = {"fixed": [], "only": {}, "states": None, "neighbours": False}
    assert kinds(answer(made, drafter, tmp_path, axes=axes))[0] == "unknown"
    assert looked == [False]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": None}, "engine_version"),
        ({"name": "specforge", "version": None}, "engines are"),
    ],
)
def test_an_engine_that_cannot_be_resolved_is_refused_before_anything_is_made(
    tmp_path: Path, changed: dict[str, Any], said: str
):
    with Events(tmp_path / "events.jsonl") as events, pytest.raises(BadInput, match=said):
        open_job(request_of(tmp_path, LAB / "drafter", engine={**KIMI, **changed}), events)
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "target").exists()


def test_ids_without_an_engine_are_refused():
    asked = Asked(drafter=LAB / "drafter", data=LAB, ids=[2, 30, 58])
    with pytest.raises(BadInput, match="name it"):
        check_engine(asked)


def test_an_engine_that_does_not_start_is_promised_no_more_than_it_gives_once_it_does(
    made: Path, tmp_path: Path
):
    engine = {**KIMI, "version": "0.5.13", "ids": [-1, 2, 30]}
    result = answer(made, LAB / "drafter_speculators", tmp_path, engine=engine)
    diagnosis = result["diagnosis"]
    assert diagnosis["accept_length_served"] is None
    assert "residual" in kinds(result)
    ladder = {step["mended"]: step["accept_length"]["value"] for step in diagnosis["ladder"]}
    assert list(ladder) == ["states", "residual"]
    assert ladder["states"] < 1.2 < ladder["residual"]
    text = "\n".join(diagnosis["first_lines"])
    assert "expected accept length: it does not start" in text
    assert "with a patch" in text  # the states' fix needs one there, so lines alone bring nothing
    assert "by lines alone" not in text


@pytest.mark.runs
def test_one_text_and_a_start_beside_the_right_states_is_undecided(made: Path, tmp_path: Path):
    start = Wiring.of_states((3, 31, 59)).plain()
    result = answer(made, LAB / "drafter", tmp_path, max_samples=1, start=start)
    assert result["diagnosis"]["verdict"] == "undecided"
    assert result["diagnosis"]["headline"].startswith("undecided: too few texts")
    assert kinds(result) == []


@pytest.mark.runs
def test_two_texts_lead_from_the_wrong_states_to_the_right_ones(made: Path, tmp_path: Path):
    """Right tokens of two texts settle nothing; how probable the target's choices are does."""
    start = Wiring.of_states((0, 31, 59)).plain()
    result = answer(made, LAB / "drafter", tmp_path, max_samples=2, start=start)
    assert result["diagnosis"]["trained"]["states"] == [0, 3, 31]
    assert (
        result["diagnosis"]["verdict"] == "undecided"
    )  # too few to say that nothing else is wrong
    assert any("cross-entropy" in said for said in result["rounds"])


def relabelled(made: Path, out: Path) -> Path:
    """The captured data without what says which states it holds."""
    shutil.copytree(made / "data", out)
    (out / "capture.json").unlink()
    return out


def test_slots_under_each_other_s_names_are_one_fault_that_costs_what_the_names_serve(
    made: Path, tmp_path: Path
):
    kit = Kit(made / "target")
    data = relabelled(made, tmp_path / "data")
    asked = Asked(drafter=LAB / "drafter", data=data, states=[3, 31, 0, 59], max_samples=12)
    found = diagnose_folder(asked, kit)
    as_declared = found.evidence.inspected.as_declared
    assert as_declared is not None
    assert as_declared.wiring.states() == (3, 31, 0)
    assert [cause.kind for cause in found.diagnosis.causes] == ["slots"]
    assert [kind for kind, _ in found.diagnosis.ladder] == ["slots"]


def test_ids_findings_of_the_file_are_left_out_where_others_are_served(made: Path, tmp_path: Path):
    kit = Kit(made / "target")
    engine = EngineAsked(name="sglang", version="0.5.12", engine_class="kimi_k25")
    asked = Asked(drafter=LAB / "drafter", data=made / "data", engine=engine, max_samples=4)
    names = {
        ids: {f.name for f in diagnose_folder(replace(asked, ids=ids), kit).evidence.doctor}
        for ids in (None, (-1, 2, 30))
    }
    assert any(name.startswith("ids-") for name in names[None])
    assert not any(name.startswith("ids-") for name in names[-1, 2, 30])
    assert {n for n in names[None] if n.startswith("norm")} <= names[-1, 2, 30]


def test_a_tree_that_cannot_be_drawn_is_a_note(made: Path, tmp_path: Path):
    def absolute(d2t: torch.Tensor) -> torch.Tensor:
        return d2t + torch.arange(len(d2t))

    drafter = with_table(tmp_path / "drafter", absolute)
    flags = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}
    engine = {**KIMI, "flags": flags, "accept_length": 1.1}
    result = answer(made, drafter, tmp_path, engine=engine)
    assert kinds(result)[:2] in (["d2t", "states"], ["states", "d2t"])
    assert any("tree was not scored" in note for note in result["diagnosis"]["notes"])


def sampled(made: Path, out: Path, kit: Kit, count: int) -> Path:
    """Texts whose answers are drawn at temperature 1, with the target's last state, no choices."""
    (out / "rows").mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)
    files = sorted((made / "data").glob("rows_*/*.pt"))[:count]
    for path in files:
        sample = torch.load(path, weights_only=True)
        ids, mask = sample["input_ids"].clone(), sample["loss_mask"].bool()
        state = kit.layers.states([ids], 61)[0][61].float()
        logits = kit.target.logits(kit.target.final_norm()(state), normed=True)
        drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator).flatten()
        ids[1:][mask[1:]] = drawn[:-1][mask[1:]]
        states = kit.layers.states([ids], 61)[0]
        made_so = {k: v for k, v in sample.items() if k != "target_argmax"}
        stored = torch.stack([states[k] for k in (0, 3, 31, 61)], 1)
        old = sample["hidden_states"]
        made_so["input_ids"] = ids
        made_so["hidden_states"] = (
            [
                part.reshape(o.shape).to(o.dtype)
                for part, o in zip(stored.unbind(1), old, strict=True)
            ]
            if isinstance(old, list)
            else stored.reshape(old.shape).to(old.dtype).clone()
        )
        torch.save(made_so, out / "rows" / path.name)
    return out


@pytest.mark.runs
def test_the_target_s_end_in_the_data_is_the_reference_and_no_other_teacher(
    made: Path, tmp_path: Path
):
    kit = Kit(made / "target")
    data = sampled(made, tmp_path / "data", kit, 16)
    asked = Asked(drafter=LAB / "drafter", data=data, states=[0, 3, 31, 61], trained_accuracy=0.74)
    found = diagnose_folder(asked, kit)
    assert found.evidence.trained.truth == "stored_teacher"
    assert found.evidence.searched.teacher.slot == 3
    assert found.diagnosis.verdict == "sound"
    assert any("harder than what it writes itself" in line for line in found.diagnosis.undecided)


@pytest.mark.runs
@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_data_is_said_and_the_drafter_is_asked_about_all_the_same(
    made: Path, tmp_path: Path, shift: int
):
    """Row t of every slot holds the state of position t + shift; nobody has the target's choices."""
    data = sampled(made, tmp_path / "data", Kit(made / "target"), 12)
    for path in (data / "rows").iterdir():
        sample = torch.load(path, weights_only=True)
        old = sample["hidden_states"]
        parts = [torch.roll(h, -shift, -2) for h in (old if isinstance(old, list) else [old])]
        torch.save({**sample, "hidden_states": parts if isinstance(old, list) else parts[0]}, path)
    asked = Asked(drafter=LAB / "drafter", data=data, states=[0, 3, 31, 61])
    found = diagnose_folder(asked, Kit(made / "target"))
    assert found.evidence.inspected.shift == shift
    assert found.evidence.inspected.aligned
    assert [cause.kind for cause in found.diagnosis.causes] == ["slots"]
    assert found.diagnosis.trained.states() == (0, 3, 31)
    assert found.evidence.by_teacher.accuracy.value > 0.4  # of texts drawn at temperature 1


@pytest.mark.runs
@pytest.mark.parametrize("last", [True, False])
def test_an_answer_that_lags_alone_is_set_right(made: Path, tmp_path: Path, last: bool):
    """The prefill's last row stands twice, and the last one is lost; of the last slot, or not of it."""
    data = sampled(made, tmp_path / "data", Kit(made / "target"), 12)
    for path in (data / "rows").iterdir():
        sample = torch.load(path, weights_only=True)
        start = int(sample["loss_mask"].argmax())
        slots = list(sample["hidden_states"])
        late = [torch.cat([h[..., :start, :], h[..., start - 1 : -1, :]], -2) for h in slots]
        kept = late if last else [*late[:-1], slots[-1]]
        torch.save({**sample, "hidden_states": kept}, path)
    asked = Asked(drafter=LAB / "drafter", data=data, states=[0, 3, 31, 61])
    found = diagnose_folder(asked, Kit(made / "target"))
    inspected = found.evidence.inspected
    assert (inspected.shift, inspected.in_answer, inspected.aligned) == (-1, True, True)
    assert [slot.in_place for slot in inspected.slots] == [False] * 3 + [not last]
    assert [cause.kind for cause in found.diagnosis.causes] == ["slots"]
    assert "over the answer alone, row t belongs to position t-1" in found.diagnosis.causes[0].what
    assert found.diagnosis.trained.states() == (0, 3, 31)
    assert found.evidence.by_teacher.accuracy.value > 0.4  # of texts drawn at temperature 1


@pytest.mark.runs
def test_a_slot_in_its_place_stays_there_where_the_others_lag(made: Path, tmp_path: Path):
    data = sampled(made, tmp_path / "data", Kit(made / "target"), 12)
    for path in (data / "rows").iterdir():
        sample = torch.load(path, weights_only=True)
        *aux, last = sample["hidden_states"]
        late = [torch.cat([h[..., :1, :], h[..., :-1, :]], -2) for h in aux]
        torch.save({**sample, "hidden_states": [*late, last]}, path)
    asked = Asked(drafter=LAB / "drafter", data=data, states=[0, 3, 31, 61])
    found = diagnose_folder(asked, Kit(made / "target"))
    assert found.evidence.inspected.shift == -1
    assert [slot.in_place for slot in found.evidence.inspected.slots] == [False] * 3 + [True]
    assert [cause.kind for cause in found.diagnosis.causes] == ["slots"]
    assert found.evidence.by_teacher.accuracy.value > 0.4  # of texts drawn at temperature 1


def of_wrong_ranks(made: Path, out: Path) -> Path:
    """The data with the halves of the aux states' columns in each other's place."""
    shutil.copytree(made / "data", out)
    for path in sorted(out.glob("rows_*/*.pt")):
        sample = torch.load(path, weights_only=True)
        *aux, last = sample["hidden_states"]
        swapped = [h.roll(h.shape[-1] // 2, -1) for h in aux]
        torch.save({**sample, "hidden_states": [*swapped, last]}, path)
    return out


@pytest.mark.runs
def test_slots_that_hold_no_state_give_way_to_what_the_target_s_layers_make(
    made: Path, tmp_path: Path
):
    """So the drafter can be asked about, and another fault of it be found beside them."""
    data = of_wrong_ranks(made, tmp_path / "data")
    asked = Asked(drafter=LAB / "drafter", data=data, max_samples=16)
    kit = Kit(made / "target")
    found = diagnose_folder(asked, kit)
    assert found.evidence.inspected.remade
    assert [cause.kind for cause in found.diagnosis.causes] == ["slots"]
    assert "declared state 3, but no such state" in found.diagnosis.causes[0].what
    assert found.diagnosis.trained.states() == (0, 3, 31)
    assert found.diagnosis.accept_length_repaired.value > 2.3
    assert "what the target's own layers make" in found.diagnosis.confidence
    faulty = with_table(tmp_path / "drafter", shuffled)
    both = diagnose_folder(replace(asked, drafter=faulty), kit)
    assert {cause.kind for cause in both.diagnosis.causes} == {"slots", "d2t"}
    # A target that cannot be run so far leaves nothing to say but of the data.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.diagnosing, "can_be_made", lambda *_: False)
        alone = diagnose_folder(replace(asked, drafter=faulty), kit)
    assert [cause.kind for cause in alone.diagnosis.causes] == ["slots"]


@pytest.mark.runs
def test_a_drafter_that_was_trained_on_slots_that_hold_no_state_is_asked_about_those(
    made: Path, tmp_path: Path
):
    data = of_wrong_ranks(made, tmp_path / "data")
    drafter = tmp_path / "drafter"
    shutil.copytree(LAB / "drafter", drafter)
    tensors = load_file(drafter / "model.safetensors")
    chunks = tensors["fc.weight"].chunk(3, 1)
    tensors["fc.weight"] = torch.cat([c.roll(c.shape[1] // 2, 1) for c in chunks], 1).contiguous()
    save_file(tensors, drafter / "model.safetensors")
    found = diagnose_folder(Asked(drafter=drafter, data=data, max_samples=16), Kit(made / "target"))
    assert not found.evidence.inspected.remade
    assert found.evidence.trained.accuracy.value > 0.6
    assert [cause.kind for cause in found.diagnosis.causes] == ["slots"]


def test_a_drafter_of_another_kind_is_refused_by_name(made: Path, tmp_path: Path):
    drafter = tmp_path / "drafter"
    shutil.copytree(LAB / "drafter", drafter)
    path = drafter / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 16}
    path.write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"(?i)mla|latent"):
        answer(made, drafter, tmp_path)
