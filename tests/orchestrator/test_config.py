"""What may be composed, and that nothing which is set goes without effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.asked import quoted
from orchestrator.config import Resolved, check_host, resolve
from orchestrator.errors import InputError
from orchestrator.explain import explain
from orchestrator.judge import parse_predictions
from orchestrator.paths import CONF
from orchestrator.raw_types import type_problem
from orchestrator.schema import Where, register

EXPERIMENTS = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))


def resolved(*overrides: str, extra: Path | None = None) -> Resolved:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        search = [f"hydra.searchpath=[{quoted(f'file://{extra}')}]"] if extra else []
        cfg = compose("config", [*overrides, *search], return_hydra_config=True)
    task = OmegaConf.masked_copy(cfg, [k for k in cfg if k != "hydra"])
    return resolve(task, cfg.hydra)


def experiment(folder: Path, name: str, text: str) -> Path:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / f"{name}.yaml").write_text(text)
    return folder


GLOBAL = "# @package _global_\n"
WIRED = "wiring: {layers: [1, 2, 3], convention: output}\n"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_says_what_it_tests(name: str) -> None:
    found = resolved(f"+experiment={name}")
    assert found.experiment == name
    assert found.config["claim"]
    assert parse_predictions(found.config["predict"])
    opening = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()[:2]
    assert opening == ["# @package _global_", f"# python -m orchestrator +experiment={name}"]
    assert "???" not in found.yaml
    assert "${" not in found.yaml


def test_the_same_config_has_the_same_bytes_and_another_one_others() -> None:
    first, again = (resolved("+experiment=layers_m1_2_30") for _ in range(2))
    other = resolved("+experiment=layers_m1_2_30", "job.steps=3")
    assert first.yaml == again.yaml
    assert first.yaml != other.yaml
    assert OmegaConf.create(first.yaml) == OmegaConf.create(first.config)


def test_an_override_wins_over_the_experiment_and_both_stand() -> None:
    found = resolved("+experiment=layers_m1_2_30", "wiring.layers=[2,30,58]", "wiring.d2t=absolute")
    assert found.config["wiring"]["layers"] == [2, 30, 58]
    assert found.config["wiring"]["d2t"] == "absolute"
    assert found.config["wiring"]["convention"] == "output"
    assert found.overrides == (
        "+experiment=layers_m1_2_30",
        "wiring.layers=[2,30,58]",
        "wiring.d2t=absolute",
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], r"not set: wiring\.convention, wiring\.layers; .*\+experiment=layers_m1_2_30"),
        (["wiring.layers=[1,2,3]"], r"not set: wiring\.convention; say what the layer ids mean"),
        (["+experiment=layers_m1_2_30", "data=path"], r"not set: data\.path"),
        (["+experiment=layers_m1_2_30", "tracking=server"], r"not set: tracking\.uri"),
        (
            ["+experiment=layers_m1_2_30", "wiring.layers=[-5,2,30]"],
            "layer id -5 in the convention 'output' names no state",
        ),
        (
            ["+experiment=layers_m1_2_30", "job=capture_states", "job.out=/x"],
            r"wiring\.layers is set by .*layers_m1_2_30\.yaml, but the job does not read it",
        ),
        (
            ["job=capture_states", "job.out=/x", "wiring.d2t=identity"],
            r"wiring\.d2t is set by an override, but the job capture_states has no such setting",
        ),
        (["+experiment=layers_m1_2_30", "job.steps=0"], r"job\.steps is 0, but must be at least 1"),
        (["+experiment=layers_m1_2_30", "job.threads=0"], r"job\.threads is 0"),
        (["+experiment=layers_m1_2_30", "job.max_samples=-1"], r"job\.max_samples is -1"),
        (["+experiment=layers_m1_2_30", "data.capture.batch=0"], r"data\.capture\.batch is 0"),
        (["+experiment=layers_m1_2_30", "data.states=[0,5,5]"], "each canonical state once"),
        (["+experiment=layers_m1_2_30", "predict=better"], "is no comparison"),
        (["+experiment=layers_m1_2_30", "+wiring.extra=1"], r"wiring\.extra is no setting"),
        (["+experiment=layers_m1_2_30", "+job.extra=1"], r"job\.extra is no setting"),
        (["+experiment=layers_m1_2_30", "+extra=1"], "extra is set by an override, but the job"),
        (
            ["+experiment=layers_m1_2_30", "job.steps=3", "job.steps=2"],
            r"job\.steps is given twice, as job\.steps=3 and job\.steps=2",
        ),
        (["+experiment=layers_m1_2_30", "job.name=nope"], "job.name is 'nope'; the jobs are"),
        (["+experiment=layers_m1_2_30", "claim=1"], r"claim in override claim: 1 is no str"),
        (["+experiment=layers_m1_2_30", "strict='no'"], "'no' is no bool"),
        (
            ["+experiment=layers_m1_2_30", "tracking=server", "tracking.uri=http://u:pw@h:1"],
            "tracking.uri holds a password",
        ),
    ],
)
def test_what_cannot_run_as_written_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolved(*overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job.timeout_s=true"], "'True' of type 'bool' could not be converted to Float"),
        (["wiring.d2t=off"], r"Invalid value 'off', expected one of \[offset"),
        (["wiring.d2t=1"], r"expected one of \[offset"),
        (["wiring.layers=3"], "int is not a ListConfig"),
        (["wiring.lyers=[1]"], "'lyers' not in 'WiringConfig'.*did you mean 'layers'"),
        (["job.lyers=1"], "'lyers' not in 'DrafterTestJob'.* it has name, steps"),
        (["drafter=nope"], "Could not find 'drafter/nope'"),
        (["+experiment=nope"], "Could not find 'experiment/nope'"),
    ],
)
def test_what_hydra_itself_refuses(overrides: list[str], words: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        resolved(*overrides)
    assert re.search(words, explain(caught.value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GLOBAL + "claim: x\n", "sets nothing, so it would test the defaults"),
        (GLOBAL + WIRED + "strict: 'no'\n", r"strict in .*mine\.yaml: 'no' is no bool"),
        (GLOBAL + WIRED + "claim: off\n", r"claim in .*mine\.yaml: False is no str"),
    ],
)
def test_an_experiment_with_a_wrong_value_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolved("+experiment=mine", extra=experiment(tmp_path, "mine", text))


def test_a_value_that_a_later_default_overrides_is_refused(tmp_path: Path) -> None:
    # _self_ before the group file: the group's own value wins, and the experiment's is lost.
    text = GLOBAL + "defaults:\n  - _self_\n  - /mine@wiring: other\n" + WIRED
    experiment(tmp_path, "mine", text)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "other.yaml").write_text("layers: [4, 5, 6]\n")
    with pytest.raises(
        InputError, match=r"wiring\.layers=\[1, 2, 3\] is set by .*holds \[4, 5, 6\]"
    ):
        resolved("+experiment=mine", extra=tmp_path)


def test_a_choice_that_is_passed_over_is_refused(tmp_path: Path) -> None:
    # Of two experiments that choose the same group, Hydra takes one and says nothing of the other.
    for name, data in (("one", "path"), ("two", "capture")):
        choice = f"defaults:\n  - override /data: {data}\n"
        experiment(tmp_path, name, GLOBAL + choice + WIRED)
    with pytest.raises(InputError, match=r"chooses data=\w+, but the config uses"):
        resolved("+experiment=[one,two]", "data.path=/x", extra=tmp_path)


def test_an_experiment_may_choose_groups(tmp_path: Path) -> None:
    text = GLOBAL + "defaults:\n  - override /data: path\n" + WIRED + "data: {path: /d}\n"
    found = resolved("+experiment=mine", extra=experiment(tmp_path, "mine", text))
    assert found.config["data"]["path"] == "/d"
    assert found.config["data"]["name"] == "/d"


def test_a_resolver_that_counts_is_asked_once() -> None:
    calls = iter(range(100))
    OmegaConf.register_new_resolver("next_number", lambda: next(calls), replace=True)
    found = resolved("+experiment=layers_m1_2_30", "claim='run ${next_number:}'")
    assert f"claim: {found.config['claim']}" in found.yaml
    assert next(calls) == 1


@pytest.mark.parametrize(
    ("value", "kind", "fine"),
    [
        ("host", Where, True),
        (Where.host, Where, True),
        (True, Where, False),
        ("elsewhere", Where, False),
        (3, float, True),
        (True, int, False),
        ([1, 2], list[int], True),
        (3, list[int], False),
        (None, str | None, True),
        (None, str, False),
        ("${x}", int, True),
    ],
)
def test_raw_types(value: object, kind: object, fine: bool) -> None:
    assert (type_problem(value, kind) is None) is fine


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("OPENAI_KEY", "x", True),
        ("PGPASS", "x", True),
        ("DB_PWD", "x", True),
        ("HTTPS_PROXY", "http://me:pw@proxy:8080", True),
        ("ANY", "hf_abcdefghijklmnop", True),
        ("HTTPS_PROXY", "http://proxy:8080", False),
        ("VLLM_ALLOW_LONG_MAX_TOKEN_LEN", "1", False),
        ("KEYBOARD", "us", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
    ],
)
def test_what_looks_like_a_secret_is_not_filed(name: str, value: str, secret: bool) -> None:
    host = {"env": {name: value}, "gpus": None, "ssh_config": None, "alias": None, "name": "x"}
    if not secret:
        check_host(host)
        return
    with pytest.raises(InputError, match=f"host.env.{name} looks like a secret"):
        check_host(host)


@pytest.mark.parametrize("gpus", [[], [0, 0], [-1]])
def test_each_gpu_is_named_once(gpus: list[int]) -> None:
    with pytest.raises(InputError, match="name each GPU once"):
        check_host({"env": {}, "gpus": gpus, "ssh_config": None, "alias": None})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["results="], "results is empty"),
        (["host.alias=gpu8"], "choose host=ssh with it"),
        (["host=ssh"], "host.alias"),
        (["host=ssh", "host.alias=gpu8", "host.work=relative/x"], "give its absolute path"),
        (["job.threads=1", "job.threads=2"], "job.threads is given twice"),
        (["host.gpus=[0]", "host.gpus=[1]"], "host.gpus is given twice"),
        (["job=script", "job.path=x.py", "job.args=[5]"], "5 is no str; quote it"),
        (["job=script", "job.path=x.py", "job.args=[hf_abcdefghijklmnop]"], "looks like a secret"),
    ],
)
def test_a_slip_on_the_command_line_is_told_as_what_it_is(overrides: list[str], words: str) -> None:
    first = [] if "job=script" in overrides else ["+experiment=layers_m1_2_30"]
    with pytest.raises(InputError, match=re.escape(words)):
        resolved(*first, *overrides)


def test_results_are_absolute_and_tilde_is_the_home() -> None:
    config = resolved("+experiment=layers_m1_2_30", "results='~/my results'").config
    assert config["results"] == str(Path.home() / "my results")
    assert config["host"]["work"] == str(Path.home() / "my results" / "host")


def test_a_tree_takes_both_of_its_sizes() -> None:
    found = resolved(WIRED_HERE, CONVENTION, "job.tree.topk=4", "job.tree.draft_tokens=16")
    assert found.config["job"]["tree"] == {"topk": 4, "draft_tokens": 16}
    with pytest.raises(InputError, match=r"both job\.tree\.topk and job\.tree\.draft_tokens"):
        resolved(WIRED_HERE, CONVENTION, "job.tree.topk=4")


def test_a_trainers_figures_are_of_a_drafter_as_it_was_trained() -> None:
    asked = (WIRED_HERE, CONVENTION, "job.metrics=[ours,specforge]")
    assert resolved(*asked).config["job"]["metrics"] == ["ours", "specforge"]
    for switch in ("decoder_layer=skipped", "d2t=absolute", "residual=raw", "window=none"):
        with pytest.raises(InputError, match=f"as it was trained.*wiring.{switch}"):
            resolved(*asked, f"wiring.{switch}")
    for metrics in ("[]", "[specforge]"):
        with pytest.raises(InputError, match="must hold 'ours'"):
            resolved(WIRED_HERE, CONVENTION, f"job.metrics={metrics}")
    with pytest.raises(InputError, match=r"job\.ttt_steps is for a trainer's"):
        resolved(WIRED_HERE, CONVENTION, "job.ttt_steps=7")


def test_inspecting_data_takes_no_drafter_and_no_wiring() -> None:
    found = resolved("job=inspect_data")
    assert "drafter" not in found.config
    with pytest.raises(InputError, match=r"wiring\.layers.*inspect_data has no such setting"):
        resolved("job=inspect_data", WIRED_HERE)


WIRED_HERE, CONVENTION = "wiring.layers=[-1,2,30]", "wiring.convention=output"
