"""What is wrong with a host is said before anything is copied, with what to do."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.channel import open_local
from orchestrator.check_code import modules_of
from orchestrator.errors import InputError
from orchestrator.plan import Input
from orchestrator.preflight import (
    Found,
    answer_of,
    checks,
    last_environment,
    numbers,
    question,
    refuse,
)

GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "host": {"gpus": None, "work": "/data/work", "python": "python3", "env": {}, "checkouts": []},
    "job": {"name": "drafter_test", "device": "cpu"},
    "data": {"capture": None},
}
INPUTS = {"target": Input(path="~/target"), "drafter": Input(path="/d"), "data": Input(path="/s")}


def there(path: str, size: int = 1000) -> dict[str, Any]:
    return {
        "path": path,
        "exists": True,
        "is_dir": True,
        "readable": True,
        "bytes": size,
        "weights": size,
    }


def found(**more: Any) -> Found:
    environment = {
        "python": "3.11.7",
        "executable": "/opt/python",
        "packages": {"torch": "2.13.0+cu130", "safetensors": "0.8.0", "transformers": "5.24.0"},
        "torch": {"version": "2.13.0+cu130", "cuda": "13.0", "hip": None},
    }
    sound: dict[str, Any] = {
        "environment": environment,
        "paths": {"~/target": there("/home/g/target"), "/d": there("/d"), "/s": there("/s")},
        "memory": {"available": 8 * GIB, "total": 16 * GIB},
        "gpus": [{"index": 0, "name": "RTX 6000"}, {"index": 1, "name": "RTX 6000"}],
        "free": 10 * GIB,
        "modules": {},
    }
    return Found(**{**copy.deepcopy(sound), **more})


def said(
    config: dict[str, Any],
    host: Found,
    *,
    inputs: dict[str, Input] = INPUTS,
    to_send: int = 0,
    made: bool = False,
) -> str:
    """What is wrong, '' where nothing is."""
    try:
        refuse("gpu8", checks(config, inputs, host, to_send, made))
    except InputError as error:
        return str(error)
    return ""


def config(**more: Any) -> dict[str, Any]:
    changed = copy.deepcopy(CONFIG)
    for section, values in more.items():
        changed[section].update(values)
    return changed


def test_a_sound_host_passes() -> None:
    assert said(CONFIG, found()) == ""
    assert said(config(job={"device": "cuda"}, host={"gpus": [1]}), found()) == ""


def packages(**changed: str | None) -> dict[str, Any]:
    host = found()
    host.environment["packages"].update(changed)
    kept = {k: v for k, v in host.environment["packages"].items() if v is not None}
    return {**host.environment, "packages": kept}


def path(role: str, **changed: Any) -> dict[str, Any]:
    host = found()
    host.paths[role].update(changed)
    return host.paths


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"environment": {**packages(), "python": "3.9.2"}}, "Python 3.9.2; set host.python"),
        ({"environment": packages(torch=None)}, "torch is not installed for /opt/python; install"),
        ({"environment": packages(torch="2.5.1")}, "torch 2.5.1 is older than 2.6; update it"),
        ({"environment": packages(safetensors=None)}, "safetensors is not installed"),
        ({"paths": path("~/target", exists=False)}, "/home/g/target does not exist there"),
        ({"paths": path("/s", readable=False)}, "/s cannot be read by this user"),
        ({"free": 100 << 20}, "0.1 GiB free below /data/work, but 0.2 GiB are needed"),
        ({"paths": path("/d", weights=9 * GIB)}, "the weights to load are 9.0 GiB; set job.device"),
    ],
)
def test_each_failing_check_says_what_to_do(host: dict[str, Any], words: str) -> None:
    assert words in said(CONFIG, found(**host))


def test_all_failures_are_told_at_once() -> None:
    sentence = said(CONFIG, found(environment=packages(torch=None, safetensors=None), free=0))
    for word in ("torch", "safetensors", "free below"):
        assert word in sentence


def test_what_is_to_be_sent_must_fit() -> None:
    assert said(CONFIG, found(), to_send=9 * GIB) == ""
    assert "10.2 GiB are needed" in said(CONFIG, found(), to_send=10 * GIB)


@pytest.mark.parametrize(
    ("device", "gpus", "host", "words"),
    [
        ("cuda", [2], {}, r"host.gpus names [2], but the GPUs there are: 0 (RTX 6000), 1"),
        ("auto", [2], {"gpus": None}, "the GPUs there are: none"),
        ("cuda", None, {"gpus": None}, "nvidia-smi finds no GPU there; set job.device=cpu"),
        ("cuda", None, {"gpus": {"error": "driver mismatch"}}, "driver mismatch; mend the driver"),
        ("cuda", None, {"cpu_build": True}, "torch 2.13.0+cpu is a build without CUDA"),
        ("auto", None, {"gpus": None}, ""),
        ("cuda", None, {"gpus": {"error": "no nvidia-smi", "missing": True}}, ""),
        ("cuda", [0], {"gpus": {"error": "no nvidia-smi", "missing": True}}, "no nvidia-smi"),
        ("cpu", None, {"gpus": None, "cpu_build": True}, ""),
    ],
)
def test_a_gpu_that_is_asked_for_is_there(
    device: str, gpus: list[int] | None, host: dict[str, Any], words: str
) -> None:
    changed = dict(host)
    if changed.pop("cpu_build", False):
        build = {"version": "2.13.0+cpu", "cuda": None, "hip": None}
        changed["environment"] = {**packages(), "torch": build}
    sentence = said(config(job={"device": device}, host={"gpus": gpus}), found(**changed))
    assert words in sentence
    assert bool(words) == bool(sentence)


def test_transformers_is_needed_only_where_states_are_captured() -> None:
    without = {"environment": packages(transformers=None)}
    capturing = config(data={"capture": {"states": [0]}})
    prompts = Input(path="prompts", tree=None)
    host = found(**without, paths={**found().paths, "prompts": there("prompts")})
    inputs = {**INPUTS, "prompts": prompts}
    assert said(CONFIG, found(**without)) == ""
    assert "transformers is not installed" in said(capturing, host, inputs=inputs)
    assert said(capturing, host, inputs=inputs, made=True) == ""
    # A server that runs the target is asked in the place of loading it, however large it is.
    url, large = {"url": "http://127.0.0.1:30000"}, {"~/target": there("/home/g/target", 99 * GIB)}
    asked = config(
        job={"name": "capture_states", "device": "cpu"}, data={"capture": {"states": [0]}}
    )
    host = found(**without, paths={**host.paths, **large})
    assert said({**asked, "engine": url}, host, inputs=inputs) == ""
    sentence = said({**asked, "engine": {"url": None}}, host, inputs=inputs)
    assert "transformers is not installed" in sentence
    assert "the weights to load are" in sentence


def test_arrow_is_needed_only_for_a_dataset_that_is_its() -> None:
    without = found(**{"environment": packages(pyarrow=None)})
    assert said(CONFIG, without) == ""
    theirs = config(data={"capture": None, "layout": "speculators"})
    assert "pyarrow is not installed" in said(theirs, without)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_script_is_asked_for_python_and_what_it_imports(device: str) -> None:
    script = config(job={"name": "script", "device": device})
    del script["data"]
    bare = {"environment": {**packages(torch=None, safetensors=None), "torch": None}}
    assert said(script, found(**bare), inputs={}) == ""
    missing = found(**bare, modules={"numpy": True, "helper": False})
    sentence = said(script, missing, inputs={})
    assert "helper, which the script imports, is not installed for /opt/python" in sentence
    assert "job.files=[helper.py]" in sentence
    assert "numpy" not in sentence


def test_only_what_a_script_is_sure_to_import_is_asked_for(tmp_path: Path) -> None:
    script, helper = tmp_path / "my_test.py", tmp_path / "helper.py"
    script.write_text(
        "from __future__ import annotations\nimport os.path, torch as t\nimport helper\n"
        "from safetensors.torch import load_file\nfrom eagle3 import layers\nfrom . import x\n"
        "try:\n    import maybe\nexcept ImportError:\n    pass\n\n\ndef f():\n    import later\n"
    )
    helper.write_text("import numpy\n")
    assert modules_of([script, helper]) == ["numpy", "os", "safetensors", "torch"]


def test_a_folder_that_is_to_be_made_must_not_be_there() -> None:
    out = {"out": Input(path="/s", made=True)}
    assert "/s exists already" in said(CONFIG, found(), inputs=out)
    assert said(CONFIG, found(paths=path("/s", exists=False)), inputs=out) == ""


def test_the_question_is_answered_by_the_interpreter_that_jobs_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(host={"python": sys.executable, "env": {"PYTHONPATH": str(tmp_path / "more")}})
    (tmp_path / "more" / "made_up-1.2.dist-info").mkdir(parents=True)
    (tmp_path / "json.py").write_text("raise SystemExit('not the json that was meant')")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input").write_bytes(b"12345")
    with open_local(tmp_path / "root", sys.executable) as channel:
        modules = ["os", "torch", "no_such_module", "json"]
        request = question(asked, [str(tmp_path / "input"), "/nowhere"], modules)
        (reply,) = channel.pipeline([request], check=False)
        answer = answer_of(channel, reply)
        assert answer.environment["packages"]["made-up"] == "1.2"
        assert answer.environment["packages"]["torch"]
        assert answer.paths[str(tmp_path / "input")]["bytes"] == 5
        assert not answer.paths["/nowhere"]["exists"]
        assert answer.gpus is None
        assert answer.free > 0
        assert [name for name, there in answer.modules.items() if not there] == ["no_such_module"]
        for python, words in (("/nowhere/python", "cannot be run"), ("/bin/false", "cannot tell")):
            other = question(config(host={"python": python}), [])
            (reply,) = channel.pipeline([other], check=False)
            with pytest.raises(InputError, match=words):
                answer_of(channel, reply)


def test_the_last_run_on_the_same_host_is_compared_with(tmp_path: Path) -> None:
    for name, host in (("1-a", "gpu8"), ("2-b", "gpu8"), ("3-c", "other"), ("4-d", "gpu8")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"host": host}))
        (tmp_path / name / "preflight.json").write_text(json.dumps({"environment": {"id": name}}))
    (tmp_path / "2-b" / "preflight.json").unlink()
    (tmp_path / "4-c").mkdir()
    (tmp_path / "4-c" / "run.json").write_text(json.dumps({"host": "gpu8"}))
    (tmp_path / "4-c" / "preflight.json").touch()  # as a power cut may leave it
    assert last_environment(tmp_path, "gpu8", "4-d") == ("1-a", {"id": "1-a"})
    assert last_environment(tmp_path, "new", "4-d") == (None, None)


def test_versions_compare_by_number() -> None:
    assert numbers("2.13.0+cu130") == (2, 13)
    assert numbers("2.9.1") < numbers("2.13.0")
    assert numbers("2.14.0a0+git12") == (2, 14)
    assert said(CONFIG, found(environment=packages(torch="unknown"))) == ""
