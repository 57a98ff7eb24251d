"""The verb `diagnose`: what is asked becomes an experiment's file, and that file is what runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator import diagnose
from orchestrator.asked import flags_of, host_of
from orchestrator.config import Resolved
from orchestrator.errors import InputError
from orchestrator.paths import CLONE
from orchestrator.session import open_channel
from orchestrator.stated_target import stated_target
from tests.orchestrator.test_config import resolved

LAB = ("drafter=lab", "data=lab")
KIMI = ("engine=sglang", "engine_version=0.5.12", "engine_class=kimi_k25", "engine_ids=[2,30,58]")
DUMP = ("drafter=/models/eagle3", "data=/data/states", "target=/models/target")


def content(*arguments: str) -> dict[str, Any]:
    """The experiment as its file holds it."""
    asked = diagnose.parse(arguments)
    text = diagnose.as_yaml(diagnose.experiment_of(asked, host_of(asked)), "again")
    assert text.splitlines()[:2] == ["# @package _global_", "# again"]
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def composed(*arguments: str) -> Resolved:
    asked = diagnose.parse(arguments)
    return diagnose.composed(diagnose.experiment_of(asked, host_of(asked)))


def test_what_is_asked_becomes_an_experiment() -> None:
    found = content(
        *DUMP,
        *KIMI,
        *("states=[0,3,31,59]", "target_argmax=/data/argmax", "max_samples=40"),
        *("accept_length=1.6", "trained_accuracy=0.75", "engine_checkout=/opt/sglang"),
        *("engine_flags=--topk 4 --num-steps=3", "job.threads=8", "+job.axes.only.rope=[declared]"),
        *("claim=a: #b", "data.damaged=skip"),
    )
    chosen = {key: option for entry in found["defaults"] for key, option in entry.items()}
    assert chosen == {
        "override /job": "diagnose",
        "override /drafter": "path",
        "override /data": "path",
        "override /target": "path",
        "override /engine": "sglang",
    }
    assert found["drafter"] == {"path": "/models/eagle3"}
    assert found["target"] == {"path": "/models/target"}
    assert found["data"] == {
        "path": "/data/states",
        "states": [0, 3, 31, 59],
        "target_argmax": "/data/argmax",
        "damaged": "skip",
    }
    assert found["job"] == {
        "trained_accuracy": 0.75,
        "max_samples": 40,
        "threads": 8,
        "axes": {"only": {"rope": ["declared"]}},
    }
    assert found["engine"] == {
        "version": "0.5.12",
        "engine_class": "kimi_k25",
        "ids": [2, 30, 58],
        "checkout": "/opt/sglang",
        "flags": {"--topk": 4, "--num-steps": 3},
        "accept_length": 1.6,
    }
    assert found["claim"] == "a: #b"
    assert "host" not in found
    assert "results" not in found


def test_the_shipped_lab_goes_by_its_names_and_brings_its_target() -> None:
    found = composed("drafter=lab_speculators", "data=lab").config
    assert found["drafter"]["name"] == "lab_speculators"
    assert (found["target"]["layout"], found["target"]["where"]) == ("lab", "local")
    assert found["data"]["capture"]["states"] == [0, 3, 31, 59]
    assert found["engine"]["name"] is None
    assert composed("drafter=lab", "data=/d").config["target"]["name"] == "lab"
    assert composed("drafter=/d", "data=lab").config["target"]["name"] == "lab"


def test_paths_are_of_here_only_where_the_host_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("drafter=my/eagle3", "data=states", "target=../target")
    here = content(*given)
    assert here["drafter"]["path"] == str(tmp_path / "my/eagle3")
    assert here["data"]["path"] == str(tmp_path / "states")
    with pytest.raises(InputError, match=r"drafter: 'my/eagle3' is relative"):
        content(*given, "host=gpu8")
    there = content("drafter=~/eagle3", "data=/d", "target=/t", "host=gpu8")
    assert there["drafter"]["path"] == "~/eagle3"
    assert there["host"]["alias"] == "gpu8"


def test_the_file_repeats_the_question_to_the_byte(tmp_path: Path) -> None:
    asked = diagnose.parse(
        [*DUMP, *KIMI, "states=0,3,31,59", f"results={tmp_path}/my results", "job.threads=1"]
    )
    experiment = diagnose.experiment_of(asked, host_of(asked))
    first = diagnose.composed(experiment)
    folder = tmp_path / "a run's folder"
    folder.mkdir()
    diagnose.keep(experiment, folder)
    line = (folder / "experiment" / "diagnose.yaml").read_text().splitlines()[1]
    assert line == f"# {diagnose.how_to_repeat(folder)}"
    again = resolved("+experiment=diagnose", extra=folder)
    assert again.yaml == first.yaml
    assert (again.experiment, again.overrides) == ("diagnose", ("+experiment=diagnose",))


def test_a_running_server_is_named_in_the_file() -> None:
    url = "engine.url=http://127.0.0.1:30000"
    found = content(*LAB, "engine=sglang", url)
    assert found["engine"] == {"url": "http://127.0.0.1:30000"}
    assert composed(*LAB, "engine=sglang", url).config["engine"]["url"] == "http://127.0.0.1:30000"
    with pytest.raises(InputError, match="is what a server is told"):
        composed(*LAB, "engine=sglang", url, "engine_ids=[2,30,58]")
    with pytest.raises(InputError, match="set without an engine"):
        composed(*LAB, url)


def test_a_host_of_ones_own_is_written_out(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "host").mkdir(parents=True)
    (own / "host" / "mine.yaml").write_text(
        "name: mine\nalias: gpu8\nwork: ~/work\npython: /opt/venv/bin/python\nenv: {A: '1'}\n"
    )
    arguments = (*DUMP, "host=mine", "--config-dir", str(own), "host.gpus=[1]")
    found = content(*arguments)
    assert found["host"] == {
        "name": "mine",
        "alias": "gpu8",
        "ssh_config": None,
        "work": "~/work",
        "python": "/opt/venv/bin/python",
        "env": {"A": "1"},
        "gpus": [1],
        "checkouts": [],
        "patience_s": 60.0,
    }
    first = composed(*arguments)
    diagnose.keep(diagnose.experiment_of(diagnose.parse(arguments), found["host"]), tmp_path)
    (own / "host" / "mine.yaml").unlink()
    again = resolved("+experiment=diagnose", extra=tmp_path)
    assert again.config["host"] == first.config["host"] == found["host"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["drafter=lab"], "diagnose needs data=PATH"),
        (["data=lab"], "diagnose needs drafter=PATH"),
        (["drafer=lab", "data=lab"], "did you mean drafter="),
        ([*LAB, "trained_acuracy=0.7"], "did you mean trained_accuracy="),
        ([*LAB, "jobs.threads=1"], "did you mean job."),
        ([*LAB, "job.thread=1"], "did you mean 'threads'"),
        ([*LAB, "drafter=lab"], "drafter is given twice"),
        (
            [*LAB, "max_samples=2", "job.max_samples=3"],
            "job.max_samples is given twice, as 2 and 3",
        ),
        ([*LAB, "job.threads=1,2"], "answers one question"),
        ([*LAB, "engine=sgalng"], "did you mean sglang?"),
        ([*LAB, "engine=zzz"], "there are sglang, vllm"),
        ([*LAB, "engine_version=0.5.12"], "without an engine"),
        ([*LAB, "accept_length=1.6"], "accept_length is what an engine shows"),
        ([*LAB, "engine=sglang", "accept_length=0.5"], "must be at least 1"),
        ([*LAB, "engine=sglang", "engine_ids=[a]"], "such as [2,30,58]"),
        ([*LAB, "engine=sglang", "engine_flags={"], "no JSON"),
        ([*LAB, "trained_accuracy=75"], "for 75 % write 0.75"),
        ([*LAB, "trained_accuracy=x"], "give a number"),
        ([*LAB, "max_samples=many"], "give a whole number"),
        ([*LAB, "max_samples=0"], "must be at least 1"),
        ([*LAB, "states=[a]"], "canonical states"),
        ([*LAB, "detach=maybe"], "detach=true"),
        ([*LAB, "predict=better"], "is no comparison"),
        ([*LAB, "--config-dir", "/nothing"], "is no folder"),
        ([*LAB, "wiring.d2t=absolute"], "not set: wiring.convention, wiring.layers"),
    ],
)
def test_a_slip_is_told_before_anything_is_asked(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        composed(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("role", ["drafter", "data", "target", "target_argmax", "engine_checkout"])
def test_a_path_that_is_not_here_is_said_before_anything_is_filed(
    tmp_path: Path, role: str
) -> None:
    results = tmp_path / "results"
    given = {
        **{"drafter": str(tmp_path), "data": str(tmp_path), "engine": "sglang"},
        **{role: str(tmp_path / "nowhere"), "results": str(results)},
    }
    with pytest.raises(
        InputError, match=f"{role}={tmp_path}/nowhere does not exist on this machine"
    ):
        diagnose.run([f"{key}={value}" for key, value in given.items()])
    given[role] = "~nosuchuser/x"
    with pytest.raises(InputError, match=f"{role}=~nosuchuser/x cannot be read on this machine"):
        diagnose.run([f"{key}={value}" for key, value in given.items()])
    assert not results.exists()


@pytest.mark.parametrize("arguments", [["-h"], [], ["drafter=lab", "--help"]])
def test_usage_is_shown_without_anything_slow(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom orchestrator.__main__ import main\n"
        f"code = main(['diagnose', *{arguments!r}])\n"
        "slow = {'torch', 'mlflow', 'hydra', 'numpy'} & set(sys.modules)\n"
        "sys.exit(code or ', '.join(slow) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CLONE, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("python -m orchestrator diagnose [host=NAME] drafter=PATH")
    assert "lab_two_layers" in done.stdout


def stated(tmp_path: Path, drafter: str | None, data: str | None) -> str:
    host = host_of(diagnose.parse([*LAB, f"results={tmp_path / 'results'}"]))
    with open_channel(host) as channel:
        channel.hello()
        return stated_target(channel, host, drafter, data)


def folder_saying(folder: Path, name: str, said: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(said))
    return str(folder)


def verifier(name: str) -> dict[str, Any]:
    return {"speculators_config": {"verifier": {"name_or_path": name}}}


def test_the_target_is_taken_from_what_the_files_say(tmp_path: Path) -> None:
    target = folder_saying(tmp_path / "target", "config.json", {})
    said = folder_saying(tmp_path / "eagle3", "config.json", verifier(target))
    silent = folder_saying(tmp_path / "silent", "config.json", {"speculators_config": 3})
    dump = folder_saying(tmp_path / "dump", "capture.json", {"target_folder": target})
    assert stated(tmp_path, said, None) == target
    assert stated(tmp_path, silent, dump) == target
    hub = folder_saying(tmp_path / "hub", "config.json", verifier("org/model"))
    assert stated(tmp_path, hub, dump) == target


@pytest.mark.parametrize("where", ["org/model", "/nowhere/at/all"])
def test_a_target_that_is_no_folder_there_is_asked_for(tmp_path: Path, where: str) -> None:
    hub = folder_saying(tmp_path / "hub", "config.json", verifier(where))
    with pytest.raises(InputError, match=rf"names '{where}', which is no .* name it: target="):
        stated(tmp_path, hub, str(tmp_path))


def test_where_nobody_names_a_target_it_is_asked_for(tmp_path: Path) -> None:
    silent = folder_saying(tmp_path / "silent", "config.json", {})
    with pytest.raises(InputError, match=r"neither the drafter's config\.json nor .* target="):
        stated(tmp_path, silent, silent)
    with pytest.raises(InputError, match="/nowhere does not exist there"):
        stated(tmp_path, "/nowhere", silent)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_flags_that_are_quoted_twice_are_the_same_flags(quote: str) -> None:
    assert flags_of(f"{quote}num_steps=4,topk=1{quote}") == {"num_steps": 4, "topk": 1}
