"""A server that a person runs is checked, told of, and left alone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import BadInput
from jobs.engines import attached
from jobs.engines.attached import attach, differences, untold
from jobs.engines.engine import Draft
from jobs.engines.records import Facts
from tests.jobs.engines.conftest import ENGINES, Serve

BOTH = pytest.mark.parametrize("name", ["sglang", "vllm"])
IDS = (-1, 2, 30)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def anything() -> Iterator[str]:
    """A server that answers `[]` to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def write_ids(folder: Path, ids: list[int] | None, place: str = "eagle_config") -> None:
    """A drafter's config.json with these ids."""
    folder.mkdir(exist_ok=True)
    key = "eagle_aux_hidden_state_layer_ids"
    block: dict[str, Any] = {} if ids is None else {key: ids}
    (folder / "config.json").write_text(json.dumps({place: block} if place else block))


@BOTH
def test_a_running_server_is_attached_by_its_address(
    name: str, serve: Serve, draft: Draft, target: Path
) -> None:
    address = serve(name, draft=draft)
    for url in (address.url, f"127.0.0.1:{address.port}", f"{address.url}/v1"):
        running = attach(ENGINES[name](), url, "speculative")
        assert running.facts.model == str(target)
        assert (running.server, running.command) == (None, ())
    assert list(differences(running.facts, target, draft, IDS)) == []


def test_sglang_tells_its_flags_and_vllm_does_not(serve: Serve, draft: Draft) -> None:
    sglang = attach(ENGINES["sglang"](), serve(draft=draft).url, "speculative").facts
    assert sglang.drafter == str(draft.folder)
    assert sglang.printed_accept_length == 2.6
    words, unknown = untold(sglang, draft.folder)
    assert "has the weights of" in unknown  # neither folder has any
    assert words.startswith("the server's cache of prefixes is emptied before each pass")
    assert "whether it simulates acceptance is not known" in words
    vllm = attach(ENGINES["vllm"](), serve("vllm", draft=draft).url, "speculative").facts
    words, cached = untold(vllm, draft.folder)
    assert words.startswith("vllm does not tell its flags or its drafter")
    assert cached.startswith("where the server caches prefixes")


def test_a_drafter_of_other_weights_under_the_same_ids_is_told(
    serve: Serve, draft: Draft, tmp_path: Path
) -> None:
    for name in ("served", "asked", "same"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"1" if name == "asked" else b"0")
    served = replace(draft, folder=tmp_path / "served")
    facts = attach(ENGINES["sglang"](), serve(draft=served).url, "speculative").facts
    target = Path(str(facts.model))
    (told,) = differences(facts, target, served, None, source=tmp_path / "asked")
    assert told == f"its drafter {tmp_path / 'served'} has other weights than {tmp_path / 'asked'}"
    assert list(differences(facts, target, served, None, source=tmp_path / "same")) == []
    missing = tmp_path / "nowhere"
    assert list(differences(facts, target, served, None, source=missing)) == []
    assert f"has the weights of {missing} is not known" in untold(facts, missing)[-1]


@pytest.mark.parametrize(
    ("asked", "there", "words"),
    [("sglang", "vllm", "/health_generate"), ("vllm", "sglang", "/version")],
)
def test_another_engine_at_the_address_is_refused(
    asked: str, there: str, words: str, serve: Serve
) -> None:
    url = serve(there).url
    with pytest.raises(
        BadInput, match=rf"engine\.url={url} does not answer as {asked}: .*({words})"
    ):
        attach(ENGINES[asked](), url, "speculative")


@BOTH
def test_a_server_of_another_kind_is_refused(name: str, anything: str) -> None:
    with pytest.raises(BadInput, match=rf"^engine\.url={anything} does not answer as {name}: "):
        attach(ENGINES[name](), anything, "speculative")


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://gpu8:port", "ftp://gpu8"])
def test_an_address_at_which_nobody_answers_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match=rf"^engine\.url={re.escape(url)} does not answer as sglang"):
        attach(ENGINES["sglang"](), url, "speculative")


def facts(target: Path, drafter: Path | None = None, **flags: Any) -> Facts:
    """Of an SGLang with a chain of three steps."""
    usual = {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    return Facts(
        engine="sglang",
        version="0.5.23",
        model=str(target),
        drafter=None if drafter is None else str(drafter),
        flags={**usual, **flags},
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, []),
        ({"speculative_algorithm": "EAGLE"}, []),
        ({"speculative_algorithm": None}, ["its speculative_algorithm is None, not EAGLE3"]),
        ({"speculative_algorithm": "NGRAM"}, ["its speculative_algorithm is NGRAM, not EAGLE3"]),
        (
            {"speculative_num_steps": 5, "speculative_num_draft_tokens": 6},
            [
                "its speculative_num_steps is 5, but the job asks for 3",
                "its speculative_num_draft_tokens is 6, but the job asks for 4",
            ],
        ),
        (
            {"speculative_eagle_topk": 4},
            ["its speculative_eagle_topk is 4, but the job asks for 1"],
        ),
    ],
)
def test_flags_that_are_not_the_hypothesis_are_named(
    flags: dict[str, Any], words: list[str], target: Path, draft: Draft
) -> None:
    assert list(differences(facts(target, **flags), target, draft, IDS)) == words


def test_another_model_is_named(tmp_path: Path, target: Path, draft: Draft) -> None:
    assert list(differences(facts(tmp_path / "x"), target, draft, IDS)) == [
        f"it serves the model {tmp_path / 'x'}, not {target}; if these are the same weights, name the "
        f"server's own path as the target, or make {tmp_path / 'x'} a link to it on this host"
    ]


def test_a_copy_of_the_target_is_the_target(
    tmp_path: Path, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, copy = tmp_path / "target", tmp_path / "copy"
    for folder in (target, copy):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    assert list(differences(facts(copy), target, draft, None)) == []
    monkeypatch.setattr(attached, "COMPARED", 6)
    assert len(list(differences(facts(copy), target, draft, None))) == 1
    monkeypatch.undo()
    (copy / "config.json").write_text('{"rope_theta": 1}')
    assert len(list(differences(facts(copy), target, draft, None))) == 1
    (copy / "config.json").write_text("{}")
    (copy / "model.safetensors").write_bytes(b"weighty")
    assert len(list(differences(facts(copy), target, draft, None))) == 1


def test_a_baseline_must_not_draft(target: Path) -> None:
    plain = facts(target, speculative_algorithm=None)
    assert list(differences(plain, target, None, None)) == []
    assert list(differences(facts(target), target, None, None)) == [
        "it drafts (EAGLE3), but is to be the baseline"
    ]


def test_ids_other_than_the_wirings_are_named(target: Path, draft: Draft, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    write_ids(mine, [-1, 2, 30])
    assert list(differences(facts(target, mine), target, draft, IDS)) == []
    write_ids(mine, [2, 30, 58])
    assert list(differences(facts(target, mine), target, draft, IDS)) == [
        f"its drafter {mine} names the layer ids [2, 30, 58], but the wiring is [-1, 2, 30] there"
    ]


@pytest.mark.parametrize("place", ["", "dflash_config"])
def test_ids_where_the_engine_does_not_look_are_none(
    place: str, target: Path, draft: Draft, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    write_ids(mine, [-1, 2, 30], place)
    assert list(differences(facts(target, mine), target, draft, IDS)) == [
        f"its drafter {mine} names no layer ids, but the wiring is [-1, 2, 30] there"
    ]


def test_a_drafter_that_cannot_be_read_from_here_is_not_held_against_it(
    target: Path, draft: Draft, tmp_path: Path
) -> None:
    assert list(differences(facts(target, tmp_path / "elsewhere"), target, draft, IDS)) == []
    write_ids(tmp_path / "mine", [2, 30, 58])
    assert list(differences(facts(target, tmp_path / "mine"), target, draft, None)) == []
