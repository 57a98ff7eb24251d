"""What a search and a diagnosis may be set to, and what they ask of a host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.errors import HydraException

from eagle3.wiring import SWITCHES
from orchestrator.errors import InputError
from orchestrator.explain import explain
from orchestrator.plan import inputs_of
from tests.orchestrator.test_config import experiment, resolved
from tests.orchestrator.test_plan import DUMP, request

SGLANG = ("engine=sglang", "engine.version=0.5.12", "engine.engine_class=kimi_k25")


def test_a_search_is_asked_with_its_axes_and_no_start() -> None:
    asked = request("job=wiring_search", *DUMP, "drafter=path", "drafter.path=/models/mine")
    assert asked["job"] == "wiring_search"
    assert asked["start"] is None
    assert asked["axes"] == {
        "fixed": [],
        "only": {},
        "states": None,
        "more_states": [],
        "neighbours": True,
    }
    assert [asked[key] for key in ("steps", "max_samples", "finalists", "seed")] == [4, None, 8, 0]
    assert asked["cases"] == [{"case_id": "case"}]
    assert asked["inputs"]["drafter"] == {"path": "/models/mine", "layout": None}
    assert "engine" not in asked


@pytest.mark.parametrize("job", ["wiring_search", "diagnose"])
def test_a_person_extends_and_cuts_the_states_that_are_tried(job: str) -> None:
    asked = request(f"job={job}", "job.axes.more_states=[[4,3,31],[31,3,4]]")["axes"]
    assert (asked["states"], asked["more_states"]) == (None, [[4, 3, 31], [31, 3, 4]])
    asked = request(f"job={job}", "job.axes.states=[[4,3,31]]", "job.axes.fixed=[d2t]")["axes"]
    assert (asked["states"], asked["more_states"]) == ([[4, 3, 31]], [])


def test_a_running_server_says_its_release_itself() -> None:
    url = "engine.url='http://gpu8:30000'"
    asked = request("job=diagnose", "engine=sglang", url)["engine"]
    assert (asked["url"], asked["version"]) == ("http://gpu8:30000", None)
    asked = request("job=diagnose", "engine=vllm", url, "engine.accept_length=1.6")["engine"]
    assert (asked["url"], asked["accept_length"]) == ("http://gpu8:30000", 1.6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job=diagnose"], r"engine\.url is set without an engine; name it: engine=sglang"),
        (
            ["job=diagnose", "engine=llama_cpp"],
            r"engine\.url asks a running sglang or vllm, but the engine is llama_cpp; leave it out",
        ),
        (
            ["job=diagnose", "engine=sglang", "engine.ids=[2,30,58]"],
            r"engine\.ids=\[2, 30, 58\] is what a server is told, but engine\.url names one that runs",
        ),
        (["job=wiring_search", "engine=sglang"], "engine"),
    ],
)
def test_a_running_server_is_asked_by_a_diagnosis_alone_and_told_nothing(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        resolved(*overrides, "engine.url='http://gpu8:30000'")


def test_a_diagnosis_is_asked_with_its_engine() -> None:
    asked = request(
        *("job=diagnose", *SGLANG, "engine.ids=[2,30,58]", "engine.accept_length=1.6"),
        *("+engine.flags={topk: 4}", "job.trained_accuracy=0.75", "job.finalists=3"),
    )
    assert asked["engine"] == {
        "name": "sglang",
        "version": "0.5.12",
        "engine_class": "kimi_k25",
        "checkout": None,
        "flags": {"topk": 4},
        "ids": [2, 30, 58],
        "accept_length": 1.6,
    }
    assert asked["trained_accuracy"] == 0.75
    assert asked["finalists"] == 3
    assert request("job=diagnose")["engine"] is None


def test_an_engines_checkout_must_lie_on_the_host() -> None:
    config = resolved("job=diagnose", *SGLANG, "engine.checkout='~/sglang'").config
    assert inputs_of(config)["checkout"].path == "~/sglang"
    with pytest.raises(InputError, match=r"engine\.checkout: 'sglang' is relative"):
        inputs_of(resolved("job=diagnose", *SGLANG, "engine.checkout=sglang").config)


@pytest.mark.parametrize("job", ["wiring_search", "diagnose"])
def test_a_start_is_stated_whole_or_not_at_all(job: str) -> None:
    assert "wiring" not in resolved(f"job={job}").config
    whole = ("wiring.layers=[2,30,58]", "wiring.convention=output", "wiring.d2t=absolute")
    start = request(f"job={job}", *whole)["start"]
    assert (start["layers"], start["d2t"]) == ([2, 30, 58], "absolute")
    assert set(start) == {"layers", "convention", *SWITCHES}
    for part in whole:
        with pytest.raises(InputError, match=r"not set: wiring\."):
            resolved(f"job={job}", part)


def test_an_experiments_wiring_is_a_start_too(tmp_path: Path) -> None:
    found = resolved("+experiment=layers_2_30_58", "job=wiring_search", "predict=null")
    assert found.config["wiring"]["layers"] == [2, 30, 58]
    text = "# @package _global_\ndefaults: [override /job: wiring_search]\nclaim: x\n"
    found = resolved("+experiment=mine", extra=experiment(tmp_path, "mine", text))
    assert "wiring" not in found.config


def test_a_drafter_test_still_needs_its_layers() -> None:
    with pytest.raises(InputError, match=r"not set: wiring\.convention, wiring\.layers"):
        resolved()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["job.axes.fixed=[ropee]"],
            "job.axes.fixed: there is no axis 'ropee'; did you mean 'rope'?",
        ),
        (["job.axes.fixed=[zzz]"], "there is no axis 'zzz'; there are states, d2t, decoder_layer"),
        (["+job.axes.only.fedback=[raw]"], "no switch 'fedback'; did you mean 'feedback'?"),
        (["+job.axes.only.feedback=[nromed]"], "no value 'nromed'; did you mean 'normed'?"),
        (["+job.axes.only.feedback=[]"], "name each value to try once"),
        (["+job.axes.only.feedback=[raw,raw]"], "name each value to try once"),
        (["+job.axes.only.states=[a]"], "name states by job.axes.states="),
        (
            ["job.axes.fixed=[d2t]", "+job.axes.only.d2t=[offset]"],
            "d2t is in fixed, and its values",
        ),
        (["job.axes.fixed=[states]", "job.axes.states=[[0,3,31]]"], "states is in fixed"),
        (["job.axes.states=[[0,3],[0,3,31]]"], "as many states in each"),
        (["job.axes.states=[[0,3],[0,3]]"], "name each choice of canonical states once"),
        (["job.axes.states=[[0,-3]]"], "from 0 up"),
        (["job.axes.states=[]"], "name each choice"),
        (["job.axes.states=[[]]"], "name each choice"),
        (
            ["job.axes.more_states=[[4,3,31]]", "job.axes.states=[[0,3,31]]"],
            "job.axes.more_states adds to the states that are tried, but job.axes.states names them",
        ),
        (
            ["job.axes.more_states=[[4,3,31]]", "job.axes.fixed=[states]"],
            "job.axes.more_states adds to the states that are tried, but states is in job.axes.fixed",
        ),
        (["job.axes.more_states=[[4,3],[4,3,31]]"], "job.axes.more_states is [[4, 3], [4, 3, 31]]"),
        (["job.axes.more_states=[[4,3],[4,3]]"], "name each choice of canonical states once"),
        (["job.axes.more_states=[[4,-3]]"], "from 0 up"),
        (["job.axes.more_states=[[]]"], "name each choice"),
        (["job.finalists=0"], "job.finalists is 0, but must be at least 1"),
        (["job.steps=0"], "job.steps is 0"),
    ],
)
@pytest.mark.parametrize("job", ["wiring_search", "diagnose"])
def test_axes_that_will_not_do_are_one_clear_error(
    job: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        resolved(f"job={job}", *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["engine.version=0.5.12"],
            "engine.version is set without an engine; name it: engine=sglang",
        ),
        (["engine.ids=[2,30,58]"], "engine.ids is set without an engine"),
        ([*SGLANG, "engine.ids=[]"], "engine.ids is empty"),
        (
            [*SGLANG, "engine.accept_length=0.9"],
            "engine.accept_length is 0.9, but must be at least 1",
        ),
        (["engine=sglang", "engine.version=0.5"], "0.5 is no str; quote it"),
        (["job.trained_accuracy=75"], "must be from 0 to 1; for 75 % write 0.75"),
        (["job.trained_accuracy=-1"], "must be from 0 to 1"),
    ],
)
def test_what_is_said_of_an_engine_must_make_sense(overrides: list[str], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        resolved("job=diagnose", *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+experiment=layers_m1_2_30", "engine=sglang"], "engine=sglang chooses a section that"),
        (["job=wiring_search", "engine=sglang"], "that the job wiring_search does not read"),
        (["job=inspect_data", "drafter=lab"], "that the job inspect_data does not read"),
        (["job=wiring_search", "job.axes.fixd=[d2t]"], None),
        (["job=wiring_search", "job.trained_accuracy=0.7"], None),
    ],
)
def test_what_the_job_does_not_read_is_refused(overrides: list[str], words: str | None) -> None:
    if words is None:
        with pytest.raises(HydraException):
            resolved(*overrides)
        return
    with pytest.raises(InputError, match=re.escape(words)):
        resolved(*overrides)


def test_an_experiment_may_not_choose_what_its_job_does_not_read(tmp_path: Path) -> None:
    text = (
        "# @package _global_\ndefaults: [override /engine: vllm]\n"
        "wiring: {layers: [1, 2, 3], convention: output}\n"
    )
    with pytest.raises(InputError, match=r"mine\.yaml chooses engine=vllm, but the job does not"):
        resolved("+experiment=mine", extra=experiment(tmp_path, "mine", text))


def test_a_key_of_ones_own_is_told_how_to_be_written() -> None:
    for key in ("job.axes.only.feedback=[raw]", "engine.flags.topk=4"):
        with pytest.raises(HydraException) as caught:
            resolved("job=diagnose", "engine=sglang", key)
        assert f"write +{key.split('=')[0]}=…" in explain(caught.value)
