"""What a capture from a running engine may be set to, and what it asks of a host."""

from __future__ import annotations

import pytest

from orchestrator.errors import InputError
from tests.orchestrator.test_config import resolved
from tests.orchestrator.test_plan import DUMP, WIRED, request

JOB = ("job=capture_states", "job.out=/data/new")
URL = "engine.url='http://127.0.0.1:30000'"
RUNNING = (*JOB, "engine=sglang", URL)


def test_a_capture_names_the_server_that_it_asks() -> None:
    asked = request(*RUNNING, "engine.version=0.5.23", "job.request_s=900")
    assert asked["engine"] == {
        "name": "sglang",
        "url": "http://127.0.0.1:30000",
        "version": "0.5.23",
        "engine_class": None,
    }
    assert (asked["job"], asked["request_s"], asked["device"]) == ("capture_states", 900.0, "cpu")
    (case,) = asked["cases"]
    assert (case["states"], case["out"], case["keep"]) == ([0, 3, 31, 59], "/data/new", False)


def test_a_capture_in_transformers_and_data_that_is_made_ask_no_server() -> None:
    assert "engine" not in request(*JOB)
    made = request(*WIRED)["inputs"]["data"]["capture"]
    assert "engine" not in made
    engine = ("engine=sglang", "engine.version=0.5.23", "engine.engine_class=llama")
    diagnosed = request("job=diagnose", *engine)
    assert "engine" not in diagnosed["inputs"]["data"]["capture"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((*JOB, "engine=vllm", URL), r"engine\.url is of vllm, which returns no states over HTTP"),
        ((*JOB, URL), r"engine\.url is of no engine, .* engine=sglang"),
        ((*JOB, "engine=sglang"), r"engine\.name is set without engine\.url"),
        (
            (*JOB, "engine=sglang", "engine.python=/opt/python"),
            r"engine\.python is not read by job=capture_states, which starts no engine",
        ),
        ((*RUNNING, "+engine.flags={tp_size: 8}"), r"engine\.flags is not read"),
        ((*RUNNING, "engine.ids=[2,30,58]"), r"engine\.ids is not read"),
        ((*RUNNING, "engine.patch=embedding_capture"), r"engine\.patch is not read"),
        ((*RUNNING, "engine.baseline_url=http://h:1"), r"engine\.baseline_url is not read"),
        ((*RUNNING, *DUMP), r"engine\.url is for states of prompts \(data=capture\)"),
        ((*RUNNING, "job.device=cuda"), r"job\.device is cuda, but the server at engine\.url has"),
        ((*JOB, "job.request_s=5"), r"job\.request_s is for the server at engine\.url"),
        ((*RUNNING, "job.request_s=0"), r"job\.request_s is 0\.0, but must be at least 1"),
    ],
)
def test_what_a_capture_would_not_read_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        resolved(*overrides)
    assert "\n" not in str(caught.value)
