"""What a benchmark of an engine may be set to, and what it asks of a host."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hydra.errors import HydraException

from jobs.engines import shipped
from orchestrator.check_bench import ENGINES, NOT_READ, OF_SERVERS, check_variables
from orchestrator.errors import InputError
from orchestrator.plan import SHIPPED_PATCH, inputs_of
from tests.orchestrator.test_config import experiment, resolved
from tests.orchestrator.test_plan import DUMP, WIRED, request

ROOT = Path(__file__).parents[2]
JOB = "engine_bench"
SGLANG = (f"job={JOB}", "engine=sglang", *WIRED)
PROBE = ("job=engine_probe", "engine=sglang", *WIRED)
VLLM = (f"job={JOB}", "engine=vllm", *WIRED)
TREE = ("job.topk=2", "job.draft_tokens=6")
LAUNCH = "engine.launch=[serve,--port,'{port}','{drafter}']"
BASELINE = "engine.baseline_launch=[serve,--port,'{port}']"
DOCKER = "engine.launch=[docker,run,--name,a,-p,'{port}:1','{drafter}']"
NAMED = (*SGLANG, "engine.version=0.5.23")
LAUNCHED = (*NAMED, LAUNCH, BASELINE)
CONTROL = "job.control=true"
URL = "engine.url='http://gpu8:30000'"


def test_a_benchmark_is_asked_with_its_engine_its_draft_and_its_budget() -> None:
    asked = request(*SGLANG, *DUMP, "drafter=path", "drafter.path=/models/mine")
    assert asked["job"] == "engine_bench"
    assert asked["engine"] == {
        "name": "sglang",
        "version": None,
        "engine_class": None,
        "checkout": None,
        "flags": {},
        "ids": None,
        "accept_length": None,
        "python": None,
        "env": {},
        "launch": None,
        "baseline_launch": None,
        "patch": None,
        "url": None,
        "baseline_url": None,
    }
    assert [asked[key] for key in ("steps", "topk", "draft_tokens")] == [4, 1, None]
    assert (asked["concurrency"], asked["max_prompts"]) == ([1], 16)
    assert asked["budget"] == {
        "pairs": 8,
        "least": 3,
        "precision": 0.03,
        "minutes": 30.0,
        "restarts": 4,
        "repeats": 3,
    }
    (case,) = asked["cases"]
    assert (case["wiring"]["layers"], case["wiring"]["convention"]) == ([-1, 2, 30], "output")
    assert asked["inputs"]["drafter"] == {"path": "/models/mine", "layout": None}
    assert asked["inputs"]["prompts"] is None


def test_what_the_machine_is_told_is_told_once() -> None:
    asked = request(*SGLANG, "job.timeout_s=60", "job.threads=3")
    assert (asked["timeout_s"], asked["threads"], asked["device"]) == (60.0, 3, "auto")


def test_prompts_of_ones_own_are_pushed_and_named(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    config = resolved(*SGLANG, f"job.prompts='{file}'").config
    found = inputs_of(config)["asked"]
    assert (found.path, found.file) == (str(file), "asked.jsonl")
    assert found.tree is not None
    asked = request(*SGLANG, f"job.prompts='{file}'")
    assert asked["inputs"]["prompts"].endswith("asked.jsonl")
    assert "prompts" not in {*asked} - {"inputs"}


def test_prompts_that_are_not_there_are_an_error() -> None:
    with pytest.raises(InputError, match=r"job\.prompts"):
        inputs_of(resolved(*SGLANG, "job.prompts=/nowhere/asked.jsonl").config)


def test_a_patch_of_ones_own_is_pushed_and_the_shipped_one_is_only_named(tmp_path: Path) -> None:
    file = tmp_path / "my.patch"
    file.write_text("--- a\n")
    found = inputs_of(resolved(*SGLANG, f"engine.patch='{file}'").config)["patch"]
    assert (found.path, found.file) == (str(file), "my.patch")
    assert found.tree is not None
    assert request(*SGLANG, f"engine.patch='{file}'")["inputs"]["patch"].endswith("/my.patch")
    asked = request(*SGLANG, f"engine.patch={SHIPPED_PATCH}")
    assert (asked["engine"]["patch"], asked["inputs"]["patch"]) == (shipped.NAME, None)


@pytest.mark.parametrize("name", ["nowhere.patch", "."])
def test_a_patch_that_is_no_file_is_an_error(name: str, tmp_path: Path) -> None:
    config = resolved(*SGLANG, f"engine.patch='{tmp_path / name}'").config
    with pytest.raises(
        InputError, match=r"engine\.patch: .* is no file .* engine\.patch=embedding_c"
    ):
        inputs_of(config)


def test_flags_and_environment_of_ones_own_are_handed_on() -> None:
    asked = request(
        *SGLANG,
        *("+engine.flags={mem_fraction_static: 0.4, disable_cuda_graph: true}",),
        *("+engine.env={OMP_NUM_THREADS: '1'}", "engine.python=/opt/sglang/bin/python"),
        *("job.concurrency=[1,8]", "job.topk=4", "job.draft_tokens=16"),
    )
    assert asked["engine"]["flags"] == {"mem_fraction_static": 0.4, "disable_cuda_graph": True}
    assert asked["engine"]["env"] == {"OMP_NUM_THREADS": "1"}
    assert asked["engine"]["python"] == "/opt/sglang/bin/python"
    assert (asked["concurrency"], asked["topk"], asked["draft_tokens"]) == ([1, 8], 4, 16)


def test_arms_beside_are_asked_for_openly() -> None:
    assert request(*SGLANG, "job.simulate=true")["simulate"] is True
    asked = request(*SGLANG, *TREE, "job.chain=true")
    assert (asked["simulate"], asked["chain"]) == (False, True)


def test_a_known_good_drafter_is_an_input_on_the_host() -> None:
    known_good = "job.known_good=/models/public"
    found = inputs_of(resolved(*VLLM, known_good).config)["known_good"]
    assert (found.path, found.tree) == ("/models/public", None)
    asked = request(*VLLM, known_good)
    assert asked["inputs"]["known_good"] == "/models/public"
    assert "known_good" not in {*asked} - {"inputs"}
    assert request(*VLLM)["inputs"]["known_good"] is None
    with pytest.raises(InputError, match=r"job\.known_good: 'public' is relative; name it by its"):
        inputs_of(resolved(*VLLM, "job.known_good=public").config)


def test_a_server_of_ones_own_is_handed_on() -> None:
    asked = request(*VLLM, URL, "engine.baseline_url='http://gpu8:30001'")["engine"]
    assert (asked["url"], asked["baseline_url"]) == ("http://gpu8:30000", "http://gpu8:30001")
    assert request(*VLLM, URL)["engine"]["baseline_url"] is None


def test_a_running_server_may_be_probed_where_it_returns_its_states() -> None:
    asked = request(*PROBE, URL)
    assert (asked["job"], asked["engine"]["url"]) == ("engine_probe", "http://gpu8:30000")
    assert request(*PROBE, "engine.ids=[-1,2,30]")["engine"]["ids"] == [-1, 2, 30]


def test_a_chain_may_say_the_tokens_that_it_has_anyway() -> None:
    assert request(*VLLM, "job.steps=3", "job.draft_tokens=4")["draft_tokens"] == 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # The engine.
        (
            [f"job={JOB}", *WIRED],
            "job=engine_bench starts and asks sglang and vllm; name the engine: engine=sglang",
        ),
        ([f"job={JOB}", "engine=tensorrt_llm", *WIRED], "starts and asks sglang and vllm"),
        ([f"job={JOB}", "engine=llama_cpp", *WIRED], "starts and asks sglang and vllm"),
        (
            [*SGLANG, "engine.checkout=/src/sglang"],
            "engine.checkout is not read by job=engine_bench; leave it out",
        ),
        (
            [*SGLANG, "engine.ids=[-1,2,30]"],
            "engine.ids is not read by job=engine_bench; the wiring says which states are fed; leave "
            "it out",
        ),
        ([*SGLANG, "engine.accept_length=2.5"], "engine.accept_length is not read by"),
        (
            ["job=engine_probe", "engine=vllm", *WIRED, URL],
            "a running vllm returns no states, so that engine.url cannot be probed; leave it out and "
            "name the interpreter that serves, engine.python=…: a server is then started and recorded",
        ),
        (
            [*PROBE, URL, "engine.baseline_url='http://gpu8:30001'"],
            "engine.baseline_url is not read by job=engine_probe; no baseline is asked; leave it out",
        ),
        (
            [*PROBE, URL, "engine.ids=[-1,2,30]"],
            "engine.ids is for servers that are started, but engine.url names one that runs",
        ),
        ([*PROBE, URL, "engine.python=/opt/python"], "engine.python is for servers that are"),
        # The draft.
        (
            [*SGLANG, "job.steps=3", "job.draft_tokens=6"],
            "job.draft_tokens is 6, but a chain (job.topk=1) of 3 steps has 4 tokens; leave it out",
        ),
        (
            [*SGLANG, "job.topk=2"],
            "job.topk is more than 1; say how many tokens the tree has: job.draft_tokens=N",
        ),
        (
            [*VLLM, "job.topk=2", "job.draft_tokens=6"],
            "job.topk=2 is a tree, which vllm does not draft; set job.topk=1",
        ),
        # The servers.
        (
            [*SGLANG, "engine.baseline_url='http://gpu8:30001'"],
            "engine.baseline_url stands without engine.url; name both servers, or none",
        ),
        (
            [*SGLANG, URL, "engine.python=/opt/python"],
            "engine.python is for servers that are started, but engine.url names one that runs",
        ),
        (
            [*SGLANG, URL, f"engine.patch={SHIPPED_PATCH}"],
            "engine.patch is for servers that are st",
        ),
        (
            [*SGLANG, f"engine.patch={SHIPPED_PATCH}", "job.control=true"],
            "engine.patch is for servers with the drafter, and job.control starts none; leave it out",
        ),
        ([*SGLANG, URL, "+engine.env={A: b}"], "engine.env is for servers that are started"),
        ([*SGLANG, URL, "+engine.flags={a: b}"], "engine.flags is for servers that are started"),
        (
            [*VLLM, "job.simulate=true"],
            "job.simulate sets SGLANG_SIMULATE_ACC_LEN, which vllm does not read; leave it out",
        ),
        (
            [*SGLANG, URL, "job.simulate=true"],
            "job.simulate starts servers of its own making, but engine.url names a server that runs",
        ),
        (
            [*SGLANG, "job.control=true", "job.simulate=true"],
            "job.simulate has no drafter with job.control; leave one of them out",
        ),
        (
            [*SGLANG, "job.chain=true"],
            "job.chain measures a chain beside a tree, but with job.topk=1 all that is drafted is a",
        ),
        (
            [*SGLANG, *TREE, URL, "job.chain=true"],
            "job.chain starts servers of its own making, but engine.url names a server that runs",
        ),
        (
            [*SGLANG, *TREE, "job.control=true", "job.chain=true"],
            "job.chain has no drafter with job.control; leave one of them out",
        ),
        (
            [*LAUNCHED, "job.simulate=true"],
            "job.simulate starts servers of its own making, but engine.launch names one whole command",
        ),
        (
            [*SGLANG, URL, "job.known_good=/models/public"],
            "job.known_good starts servers of its own making, but engine.url names a server that runs",
        ),
        (
            [*LAUNCHED, "job.known_good=/models/public"],
            "job.known_good starts servers of its own making, but engine.launch names one whole command",
        ),
        (
            [*SGLANG, CONTROL, "job.known_good=/models/public"],
            "job.known_good has no drafter with job.control; leave one of them out",
        ),
        (
            [*LAUNCHED, *TREE, "job.chain=true"],
            "job.chain starts servers of its own making, but engine.launch names one whole command",
        ),
        # Commands of one's own.
        (
            [*NAMED, LAUNCH],
            "engine.baseline_launch is missing: the server with the drafter and the one without need",
        ),
        ([*NAMED, BASELINE], "engine.launch is missing: the server with"),
        (
            [*NAMED, BASELINE, "engine.launch=[]"],
            "engine.launch is missing: the server with the drafter",
        ),
        ([*LAUNCHED, URL], "engine.launch is for servers that are started, but engine.url names"),
        *(
            ([*LAUNCHED, setting], f"engine.{key} is for servers that the job itself puts together")
            for key, setting in (
                ("python", "engine.python=/opt/python"),
                ("flags", "+engine.flags={a: b}"),
                ("patch", f"engine.patch={SHIPPED_PATCH}"),
            )
        ),
        ([*SGLANG, LAUNCH, BASELINE], "engine.launch starts a release that is not known before"),
        (
            [*NAMED, BASELINE, "engine.launch=[serve,'{drafter}']"],
            "engine.launch has no {port}; the job chooses a free port, so write {port} where",
        ),
        (
            [*NAMED, LAUNCH, "engine.baseline_launch=[serve]"],
            "engine.baseline_launch has no {port}",
        ),
        (
            [*NAMED, BASELINE, "engine.launch=[serve,'{port}']"],
            "engine.launch has no {drafter}; the job",
        ),
        (
            [*NAMED, LAUNCH, "engine.baseline_launch=[serve,'{port}','{drafter}']"],
            "engine.baseline_launch has {drafter}, but is the server without one",
        ),
        (
            [*NAMED, BASELINE, "engine.launch=[docker,run,-p,'{port}:1','{drafter}']"],
            "engine.launch starts a container without --name NAME, by which it would be stopped",
        ),
        (
            [*NAMED, BASELINE, "engine.launch=[docker,compose,up,'{port}','{drafter}']"],
            "engine.launch: of docker, only `docker run --name NAME …` is understood",
        ),
        (
            [*NAMED, DOCKER, "engine.baseline_launch=[docker,run,--name,a,'{port}']"],
            "engine.launch and engine.baseline_launch both name their container a; they stand at",
        ),
        (
            [*NAMED, LAUNCH, "engine.baseline_launch=[docker,run,--name,a,'{port}']", CONTROL],
            "job.control starts engine.baseline_launch twice, and its container is named a; write",
        ),
        (
            [*NAMED, BASELINE, DOCKER, "+engine.env={A: b}"],
            "engine.env is not seen in the container of engine.launch; write it there: -e NAME=VALUE",
        ),
        # How much is asked.
        (
            [*SGLANG, "job.concurrency=[]"],
            "job.concurrency is []; name each level once, from 1 up: [1,8,32]",
        ),
        ([*SGLANG, "job.concurrency=[0,1]"], "job.concurrency is [0, 1]; name each level once"),
        ([*SGLANG, "job.concurrency=[8,8]"], "job.concurrency is [8, 8]; name each level once"),
        (
            [*SGLANG, "job.concurrency=[1,32]"],
            "job.concurrency asks 32 prompts at once, but job.max_prompts is 16; ask more prompts",
        ),
        (
            [*SGLANG, "job.budget.least=9"],
            "job.budget.least is more than job.budget.pairs",
        ),
        *(
            ([*SGLANG, f"job.{key}={value}"], f"job.{key} is {value}, but must be at least")
            for key, value in (
                ("steps", 0),
                ("topk", 0),
                ("draft_tokens", 1),
                ("max_prompts", 0),
                ("new_tokens", 1),
                ("budget.pairs", 0),
                ("budget.least", 0),
                ("budget.restarts", 0),
                ("budget.repeats", -1),
            )
        ),
        # What would be filed.
        ([*SGLANG, "+engine.env={HF_TOKEN: abc}"], "engine.env.HF_TOKEN looks like a secret"),
        (
            [*SGLANG, "+engine.env={A: hf_abcdefghijklmnop}"],
            "engine.env.A looks like a secret",
        ),
        (
            [*NAMED, BASELINE, f"{LAUNCH[:-1]},-e,'HF_TOKEN=abc']"],
            "engine.launch: HF_TOKEN looks like a se",
        ),
        (
            [*NAMED, BASELINE, f"{LAUNCH[:-1]},--api-key,abc]"],
            "engine.launch: --api-key looks like a sec",
        ),
        ([*NAMED, LAUNCH, f"{BASELINE[:-1]},hf_abcdefghijklmnop]"], "looks like a secret"),
        ([*SGLANG, "+engine.flags={api-key: abc}"], "engine.flags.api-key looks like a secret"),
        (
            [*SGLANG, "engine.url='http://me:word@gpu8:30000'"],
            "engine.url looks like a secret",
        ),
    ],
)
def test_what_will_not_do_is_one_clear_error(overrides: list[str], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        resolved(*overrides)


@pytest.mark.parametrize("job", ["engine_bench", "engine_probe"])
@pytest.mark.parametrize("key", ["engine.env", "host.env"])
def test_variables_that_simulate_what_is_measured_are_refused(key: str, job: str) -> None:
    words = f"{key}.SGLANG_SIMULATE_ACC_LEN is set: accept lengths would be simulated, whatever the"
    with pytest.raises(InputError, match=re.escape(words)):
        resolved(f"job={job}", "engine=sglang", *WIRED, f"+{key}={{SGLANG_SIMULATE_ACC_LEN: '3'}}")


@pytest.mark.parametrize("name", ["SGLANG_SIMULATE_ACC_TOKEN_MODE", "SIMULATE_ACC_METHOD"])
def test_so_are_their_relatives_and_their_earlier_names(name: str) -> None:
    with pytest.raises(InputError, match=rf"engine\.env\.{name} is set"):
        check_variables({"host.env": {}, "engine.env": {"SGLANG_SIMULATION": "1", name: "3"}})
    check_variables({"engine.env": {"SGLANG_SIMULATION": "1", "OMP_NUM_THREADS": "1"}})


def test_what_measures_no_engine_may_be_run_beside_a_simulation() -> None:
    resolved("job=inspect_data", "+host.env={SGLANG_SIMULATE_ACC_LEN: '3'}")


@pytest.mark.parametrize(
    "words",
    [
        "podman,run,--name,a",
        "sudo,docker,run,--name,a",
        "/usr/bin/nerdctl,run",
        "sh,-c,'docker run -d --name a image'",
        "sh,-c,'cd /x;/usr/bin/docker run image'",
        "docker,run,--name,a,image,sh,-c,'docker run b'",
    ],
)
@pytest.mark.parametrize(("key", "other"), [("launch", BASELINE), ("baseline_launch", LAUNCH)])
def test_containers_that_would_not_be_stopped_are_refused(key: str, other: str, words: str) -> None:
    command = f"engine.{key}=[{words},'{{port}}']"
    with pytest.raises(InputError, match=rf"engine\.{key} has '.*': of containers only those are"):
        resolved(*NAMED, other, command)


def test_a_container_may_hold_what_is_only_named_like_one() -> None:
    words = "docker.io/lmsysorg/sglang,-v,'/srv/docker/m:/m',-v,'/var/run/docker.sock:/s'"
    resolved(*NAMED, BASELINE, f"{DOCKER[:-1]},{words}]")


def test_a_control_does_not_start_the_container_with_the_drafter() -> None:
    resolved(*NAMED, DOCKER, BASELINE, CONTROL)


def test_the_experiment_that_is_written_down_for_a_command_can_be_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "engines.md").read_text()
    (block,) = re.findall(r"```yaml\n(# @package _global_\n[^`]*launch:[^`]*)```", text)
    found = resolved("+experiment=mine", extra=experiment(tmp_path, "mine", block)).config
    assert (found["job"]["name"], found["engine"]["name"]) == (JOB, "sglang")
    assert found["engine"]["launch"][:4] == ["docker", "run", "--name", "drafted"]
    assert found["engine"]["baseline_launch"][:4] == ["docker", "run", "--name", "plain"]
    assert found["wiring"]["layers"] == [2, 30, 58]


def test_containers_may_be_named_by_their_port() -> None:
    named = DOCKER.replace("--name,a", "--name,'a-{port}'")
    resolved(*NAMED, named, "engine.baseline_launch=[docker,run,--name,'a-{port}']", CONTROL)


def test_commands_of_ones_own_are_handed_on_as_they_are_written() -> None:
    asked = request(*LAUNCHED, "+engine.env={A: b}")["engine"]
    assert asked["launch"] == ["serve", "--port", "{port}", "{drafter}"]
    assert asked["baseline_launch"] == ["serve", "--port", "{port}"]
    named = request(*NAMED, BASELINE, f"{DOCKER[:-1]},-e,HF_TOKEN,--key-dim,'1']")["engine"][
        "launch"
    ]
    assert named[-4:] == ["-e", "HF_TOKEN", "--key-dim", "1"]


@pytest.mark.parametrize("override", [LAUNCH, BASELINE])
def test_a_probe_starts_its_own_server(override: str) -> None:
    with pytest.raises(InputError, match=r"launch is not read by job=engine_probe"):
        resolved("job=engine_probe", "engine=sglang", *WIRED, override)


def test_flags_that_only_sound_like_secrets_are_none() -> None:
    resolved(*SGLANG, "+engine.flags={max_total_tokens: 8192, tokenizer_path: /t, key_dim: 1}")


@pytest.mark.parametrize(
    "override",
    [
        "engine.python=/opt/python",
        "engine.patch=my.patch",
        LAUNCH,
        BASELINE,
        "+engine.env={A: b}",
        "engine.baseline_url='http://gpu8:30001'",
    ],
)
def test_a_diagnosis_is_told_nothing_of_servers(override: str) -> None:
    key = re.sub(r"^\+|=.*", "", override)
    words = re.escape(f"{key} is read by job=engine_bench and job=engine_probe; leave it out")
    with pytest.raises(InputError, match=words):
        resolved("job=diagnose", "engine=sglang", "engine.version=0.5.12", override)
    asked = request("job=diagnose", "engine=sglang", "engine.version=0.5.12")["engine"]
    assert asked.keys().isdisjoint(OF_SERVERS)
    assert set(NOT_READ[JOB]) <= asked.keys()


@pytest.mark.parametrize("job", ["drafter_test", "inspect_data", "wiring_search"])
def test_a_job_without_an_engine_reads_none_of_its_settings(job: str) -> None:
    wired = WIRED if job == "drafter_test" else ()
    with pytest.raises(InputError, match=r"engine\.python is set by an override, but the job"):
        resolved(f"job={job}", *wired, "engine.python=/opt/python")


@pytest.mark.parametrize(
    "override",
    ["job.truth=next_token", "job.metrics=[ours]", "job.budget.hours=1", "job.tree.topk=1"],
)
def test_a_setting_that_nobody_reads_is_refused(override: str) -> None:
    with pytest.raises((InputError, HydraException)):
        resolved(*SGLANG, override)


def test_a_benchmark_needs_its_wiring() -> None:
    with pytest.raises(InputError, match=r"not set: wiring\.convention, wiring\.layers"):
        resolved(f"job={JOB}", "engine=sglang")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "metric",
    ["accept_length", "accept_length_standalone", "tok_s", "tok_s_baseline", "speedup"],
)
def test_what_it_measures_may_be_predicted(engine: str, metric: str) -> None:
    found = resolved(f"job={JOB}", f"engine={engine}", *WIRED, f"predict='{metric} >= 1.5'")
    assert found.config["predict"] == f"{metric} >= 1.5"
