"""What a resolved config asks of a host: inputs to have there, and the request for the job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.check_bench import JOBS as SERVED
from orchestrator.check_bench import OF_SERVERS
from orchestrator.check_capture import READ as ASKED
from orchestrator.check_search import JOBS as SEARCHES
from orchestrator.errors import InputError
from orchestrator.push import Load, Tree, tree_of

SHIPPED_PATCH = "embedding_capture"  # jobs/engines/shipped.py
CASE = "case"  # a plain run is a job with one case


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a job reads or makes: sent along as `tree` where it lies here, else a path on the host.

    `file` is the one file of the tree that is meant; `made` says that the job makes it.
    """

    path: str
    tree: Tree | None = None
    file: str | None = None
    made: bool = False


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An input as the host sees it: its path there, and a digest where it was sent along."""

    path: str
    digest: str


def inputs_of(config: Mapping[str, Any]) -> dict[str, Input]:
    """The inputs of a config's job by role. Raises InputError where one is not here or not named."""
    job = config["job"]
    if job["name"] == "script":
        return {"script": script_input(job)}
    inputs = {"target": section_input("target", config["target"])}
    if job["name"] == "capture_states":
        inputs["out"] = Input(path=host_path("job.out", job["out"]), made=True)
        if config["data"]["target_argmax"] is not None:
            raise InputError(
                "data.target_argmax is what a capture makes; it is read by job=drafter_test"
            )
        if config["data"]["capture"] is None and config["data"]["path"] is not None:
            return {**inputs, "data": section_input("data", config["data"])}
        if job["dtype"] is not None:
            raise InputError(
                "job.dtype is for the texts of a dump; for prompts: data.capture.dtype"
            )
        return {**inputs, "prompts": prompts_input(config)}
    if job["name"] in ("drafter_test", *SERVED, *SEARCHES):
        inputs["drafter"] = section_input("drafter", config["drafter"])
    if job.get("prompts") is not None:
        path = job["prompts"]
        tree = local_tree("job.prompts", path)
        inputs["asked"] = Input(path=path, tree=tree, file=Path(path).name)
    if (known_good := job.get("known_good")) is not None:
        inputs["known_good"] = Input(path=host_path("job.known_good", known_good))
    if config.get("engine", {}).get("patch") not in (None, SHIPPED_PATCH):
        inputs["patch"] = patch_input(config["engine"]["patch"])
    if (checkout := config.get("engine", {}).get("checkout")) is not None:
        inputs["checkout"] = Input(path=host_path("engine.checkout", checkout))
    if (argmax := config["data"]["target_argmax"]) is not None:
        inputs["argmax"] = Input(path=host_path("data.target_argmax", argmax))
    if config["data"]["capture"] is not None:
        return {**inputs, "prompts": prompts_input(config)}
    if config["data"]["path"] is None:
        raise InputError("data has neither a path nor a capture; set data.path")
    return {**inputs, "data": section_input("data", config["data"])}


def section_input(role: str, section: Mapping[str, Any]) -> Input:
    """The target, the drafter or the data, wherever the section says it lies."""
    if section["where"] == "host":
        return Input(path=host_path(f"{role}.path", section["path"]))
    return Input(path=section["path"], tree=local_tree(f"{role}.path", section["path"]))


def patch_input(path: str) -> Input:
    """A diff of the engine's source, which lies on this machine."""
    if not Path(path).expanduser().is_file():
        raise InputError(
            f"engine.patch: {path} is no file on this machine, and no patch that is shipped; name a "
            f"unified diff, or engine.patch={SHIPPED_PATCH}"
        )
    return Input(path=path, tree=local_tree("engine.patch", path), file=Path(path).name)


def prompts_input(config: Mapping[str, Any]) -> Input:
    """The prompts file, which always lies on this machine."""
    if config["data"]["capture"] is None:
        raise InputError(
            "job=capture_states needs data=capture with data.capture.prompts and states, or data=path "
            "with the dump whose texts the target is to be run on"
        )
    path = config["data"]["capture"]["prompts"]
    return Input(path=path, tree=local_tree("data.capture.prompts", path), file=Path(path).name)


def script_input(job: Mapping[str, Any]) -> Input:
    """A person's script, with the files that are to lie beside it."""
    if job["where"] == "host":
        if job["files"]:
            raise InputError("job.files are sent along with a local script; job.where is host")
        return Input(path=host_path("job.path", job["path"]))
    files: dict[str, Path] = {}
    for role, path in (("job.path", job["path"]), *(("job.files", p) for p in job["files"])):
        source = Path(path).expanduser()
        if not source.is_file():
            raise InputError(f"{role}: {source.absolute()} is no file on this machine")
        if files.setdefault(source.name, source) is not source:
            raise InputError(f"{role}: two files are named {source.name}; rename one")
    return Input(path=job["path"], tree=tree_of(files), file=Path(job["path"]).name)


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


def loads_of(inputs: Mapping[str, Input]) -> list[Load]:
    """The trees to be sent along."""
    return [Load(kind="inputs", tree=i.tree) for i in inputs.values() if i.tree is not None]


def placed(
    inputs: Mapping[str, Input], root: str, expanded: Mapping[str, str]
) -> dict[str, Placed]:
    """The inputs as the host will see them; `expanded` says what its paths are without `~`."""
    found = {}
    for role, given in inputs.items():
        if given.tree is None:
            found[role] = Placed(path=expanded[given.path], digest="")
            continue
        folder = f"{root}/{Load(kind='inputs', tree=given.tree).folder}"
        path = f"{folder}/{given.file}" if given.file else folder
        found[role] = Placed(path=path, digest=given.tree.digest)
    return found


def request_of(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """The request of the config's job, with one case."""
    job = config["job"]
    if job["name"] == "script":
        return script_request(config, inputs["script"])
    if job["name"] == "capture_states":
        if "data" in inputs:
            return argmax_request(config, inputs, root)
        return capture_request(config, inputs, inputs["out"].path, root, keep=False)
    if job["name"] == "inspect_data":
        return inspect_data_request(config, inputs, root)
    if job["name"] in SEARCHES:
        return search_request(config, inputs, root)
    if job["name"] in SERVED:
        return engine_request(config, inputs, root)
    return drafter_test_request(config, inputs, root)


def target_spec(config: Mapping[str, Any], target: Placed, root: str) -> dict[str, Any]:
    """The target's entry in a request; the lab's full checkpoint is made below the host's root."""
    made = f"{root}/made/target-{target.digest[:16]}" if target.digest else ""
    return {"path": target.path, "layout": config["target"]["layout"], "made": made}


def made_data(config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str) -> str:
    """Where data that is made from this target, these prompts and these settings lies."""
    capture = {k: v for k, v in config["data"]["capture"].items() if k not in ("prompts", "batch")}
    target = inputs["target"]
    parts = [target.digest or target.path, inputs["prompts"].digest, capture]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{root}/made/data-{digest[:16]}"


def capture_request(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], out: str, root: str, *, keep: bool
) -> dict[str, Any]:
    """The request of a capture_states job with one case; `keep` takes data that is there already."""
    capture = config["data"]["capture"]
    settings = {k: capture[k] for k in capture if k not in ("prompts", "dtype")}
    prompts = inputs["prompts"].path
    return {
        **machine(config),
        "job": "capture_states",
        **asked_engine(config),
        "dtype": capture["dtype"],
        "inputs": {"target": target_spec(config, inputs["target"], root)},
        "cases": [{"case_id": CASE, "prompts": prompts, "out": out, "keep": keep, **settings}],
    }


def asked_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """The running server that a capture asks, where it asks one; jobs that make their data ask none."""
    if config["job"]["name"] != "capture_states" or config["engine"]["url"] is None:
        return {}
    engine = {key: config["engine"][key] for key in ASKED}
    return {"engine": engine, "request_s": config["job"]["request_s"]}


def argmax_request(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """The request of a capture_states job that adds the target's own choices to a dump."""
    case = {"case_id": CASE, "data": data_spec(config, inputs), "out": inputs["out"].path}
    return {
        **machine(config),
        "job": "capture_states",
        "dtype": config["job"]["dtype"] or "auto",
        "inputs": {"target": target_spec(config, inputs["target"], root)},
        "cases": [case],
    }


def drafter_test_request(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """The request of a drafter_test job with one case; data that is not there is captured first."""
    job = config["job"]
    asked = ("steps", "truth", "metrics", "ttt_steps", "max_samples", "seed")
    return {
        **machine(config),
        "job": "drafter_test",
        **{key: job[key] for key in asked},
        "tree": None if job["tree"]["topk"] is None else job["tree"],
        "inputs": drafter_inputs(config, inputs, root),
        "cases": [{"case_id": CASE, "wiring": config["wiring"]}],
    }


def drafter_inputs(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """Target, drafter and data as every job that drafts is told of them."""
    return {
        "target": target_spec(config, inputs["target"], root),
        "drafter": {"path": inputs["drafter"].path, "layout": config["drafter"]["layout"]},
        "data": data_or_capture(config, inputs, root),
    }


def search_request(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """The request of a wiring_search or a diagnose job with one case."""
    job = config["job"]
    asked = ("steps", "max_samples", "finalists", "seed", "axes")
    request = {
        **machine(config),
        "job": job["name"],
        **{key: job[key] for key in asked},
        "start": config.get("wiring"),
        "inputs": drafter_inputs(config, inputs, root),
        "cases": [{"case_id": CASE}],
    }
    if job["name"] != "diagnose":
        return request
    engine = {k: v for k, v in config["engine"].items() if k not in OF_SERVERS}
    if config["engine"]["url"] is not None:
        engine["url"] = config["engine"]["url"]
    if engine["name"] is not None and "checkout" in inputs:
        engine = {**engine, "checkout": inputs["checkout"].path}
    return {
        **request,
        "engine": None if engine["name"] is None else engine,
        "trained_accuracy": job["trained_accuracy"],
    }


def engine_request(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """The request of a job that asks an engine, with one case."""
    own = ("name", "prompts", "known_good", "lease", "device", "threads", "timeout_s")
    sent = {
        key: inputs[role].path if role in inputs else None
        for key, role in (
            ("prompts", "asked"),
            ("patch", "patch"),
            ("known_good", "known_good"),
        )
    }
    return {
        **machine(config),
        "job": config["job"]["name"],
        **{key: value for key, value in config["job"].items() if key not in own},
        "engine": config["engine"],
        "inputs": {**drafter_inputs(config, inputs, root), **sent},
        "cases": [{"case_id": CASE, "wiring": config["wiring"]}],
    }


def inspect_data_request(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """The request of an inspect_data job with one case."""
    job = config["job"]
    return {
        **machine(config),
        "job": "inspect_data",
        **{key: job[key] for key in ("max_samples", "first_layers", "seed")},
        "inputs": {
            "target": target_spec(config, inputs["target"], root),
            "data": data_or_capture(config, inputs, root),
        },
        "cases": [{"case_id": CASE}],
    }


def data_spec(config: Mapping[str, Any], inputs: Mapping[str, Placed]) -> dict[str, Any]:
    """A dump's entry in a request."""
    data = config["data"]
    argmax = inputs["argmax"].path if "argmax" in inputs else None
    path = inputs["data"].path if "data" in inputs else None
    spec = {key: data[key] for key in ("states", "layout", "damaged")}
    return {"path": path, "target_argmax": argmax, **spec}


def data_or_capture(
    config: Mapping[str, Any], inputs: Mapping[str, Placed], root: str
) -> dict[str, Any]:
    """The data's entry in a request; with `capture`, how to make it where it is not there yet."""
    spec = data_spec(config, inputs)
    if config["data"]["capture"] is None:
        return spec
    path = made_data(config, inputs, root)
    made_by = capture_request(config, inputs, path, root, keep=True)
    return {**spec, "path": path, "capture": made_by}


def script_request(config: Mapping[str, Any], script: Placed) -> dict[str, Any]:
    """The request of a script job with one case."""
    job = config["job"]
    case = {"case_id": CASE, "args": job["args"], "metrics_file": job["metrics_file"]}
    return {
        **machine(config),
        "job": "script",
        "inputs": {"script": {"path": script.path}},
        "cases": [case],
    }


def machine(config: Mapping[str, Any]) -> dict[str, Any]:
    """What every request says about the machine; jobs that measure accuracy take no lease."""
    job, host = config["job"], config["host"]
    return {
        **{key: job[key] for key in ("device", "threads", "timeout_s")},
        "gpus": {"wanted": host["gpus"], "lease": job.get("lease", False)},
        "checkouts": host["checkouts"],
    }
