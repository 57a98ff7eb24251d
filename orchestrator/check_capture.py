"""What a capture of a target's states may ask of a running engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.check_bench import RETURNING
from orchestrator.errors import InputError

READ = ("name", "url", "version", "engine_class")


def check_capture(config: Mapping[str, Any]) -> None:
    """The engine of a capture. Raises InputError for what will not do."""
    job = config["job"]
    if job["name"] != "capture_states":
        return
    engine, capture = config["engine"], config["data"]["capture"]
    if stated := [key for key, value in engine.items() if key not in READ and value]:
        raise InputError(
            f"engine.{stated[0]} is not read by job=capture_states, which starts no engine: it asks one "
            "that runs, engine.url=http://HOST:PORT; leave it out"
        )
    if engine["url"] is None:
        if stated := [key for key in READ if engine[key]]:
            raise InputError(
                f"engine.{stated[0]} is set without engine.url, so that the target would be loaded in "
                "transformers; name the server that runs it (engine.url=http://HOST:PORT), or leave the "
                "engine out"
            )
        if job["request_s"] is not None:
            raise InputError("job.request_s is for the server at engine.url; leave it out")
        return
    if engine["name"] not in RETURNING:
        raise InputError(
            f"engine.url is of {engine['name'] or 'no engine'}, which returns no states over HTTP; they "
            "are taken of a running SGLang: engine=sglang"
        )
    if capture is None:
        raise InputError(
            "engine.url is for states of prompts (data=capture); the target's choices for a dump's "
            "texts are made in transformers: leave it out"
        )
    if job["device"] != "cpu":
        raise InputError(
            f"job.device is {job['device']}, but the server at engine.url has the GPUs; leave it out"
        )
