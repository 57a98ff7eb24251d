"""What a resolved config asks of a host: inputs to place there, data to make, a job to start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.push import Tree, tree_of

CASE = "case"  # a plain run is a job with one case


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An input as the host sees it: its path there, and a digest where it was sent along."""

    path: str
    digest: str


def local_tree(role: str, path: str) -> Tree:
    """An input that lies here, to be sent along; a folder, or one file under its own name."""
    source = Path(path).expanduser()
    if source.is_dir():
        files = {p.relative_to(source).as_posix(): p for p in source.rglob("*") if p.is_file()}
        if not files:
            raise InputError(f"{role}: {source} is an empty folder")
        return tree_of(files)
    if source.is_file():
        return tree_of({source.name: source})
    raise InputError(f"{role}: {source} does not exist on this machine")


def host_path(role: str, path: str) -> str:
    """A path on the host, which must be absolute since nothing there has a current folder."""
    if not path.startswith(("/", "~")):
        raise InputError(f"{role}: {path!r} is relative; name it by its absolute path on the host")
    return path


def target_spec(config: Mapping[str, Any], placed: Placed, root: str) -> dict[str, Any]:
    """The target's entry in a request; the lab's full checkpoint is made below the host's root."""
    made = f"{root}/made/target-{placed.digest[:16]}" if placed.digest else ""
    return {"path": placed.path, "layout": config["target"]["layout"], "made": made}


def made_data(config: Mapping[str, Any], target: Placed, prompts: Placed, root: str) -> str:
    """Where data that is made from this target, these prompts and these settings lies."""
    capture = {k: v for k, v in config["data"]["capture"].items() if k not in ("prompts", "batch")}
    parts = [target.digest or target.path, prompts.digest, capture]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{root}/made/data-{digest[:16]}"


def capture_request(
    config: Mapping[str, Any], target: Placed, prompts: Placed, out: str, root: str, keep: bool
) -> dict[str, Any]:
    """The request of a capture_states job with one case; `keep` takes data that is there already."""
    capture = config["data"]["capture"]
    case = {k: capture[k] for k in capture if k not in ("prompts", "dtype")}
    return {
        **machine(config),
        "job": "capture_states",
        "dtype": capture["dtype"],
        "inputs": {"target": target_spec(config, target, root)},
        "cases": [{"case_id": CASE, "prompts": prompts.path, "out": out, "keep": keep, **case}],
    }


def drafter_test_request(
    config: Mapping[str, Any], target: Placed, drafter: Placed, data: str, root: str
) -> dict[str, Any]:
    """The request of a drafter_test job with one case."""
    job = config["job"]
    return {
        **machine(config),
        "job": "drafter_test",
        **{key: job[key] for key in ("steps", "truth", "max_samples", "seed")},
        "inputs": {
            "target": target_spec(config, target, root),
            "drafter": {"path": drafter.path},
            "data": {"path": data, "states": config["data"]["states"]},
        },
        "cases": [{"case_id": CASE, "wiring": config["wiring"]}],
    }


def machine(config: Mapping[str, Any]) -> dict[str, Any]:
    """What every request says about the machine."""
    return {key: config["job"][key] for key in ("device", "threads", "timeout_s")}
