"""Which target a drafter or a dump says it is of: asked on the host, where their files are."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.errors import HostError, InputError

if TYPE_CHECKING:
    from orchestrator.channel import Channel

# Run by the host's `probe`, given {"drafter", "data"}: paths there, or null. Prints one line of JSON:
# what is not there, and who names which target, with its path where that is a checkpoint's folder.
PROGRAM = b"""\
import json, os, sys
asked = json.loads(sys.argv[1])
missing, said = [], []
def read(role, name, keys):
    folder = os.path.expanduser(asked[role])
    if not os.path.exists(folder):
        missing.append(folder)
    try:
        with open(os.path.join(folder, name), "rb") as file:
            found = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError):
        return
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, str):
        path = os.path.expanduser(found)
        there = os.path.isabs(path) and os.path.isfile(os.path.join(path, "config.json"))
        said.append([os.path.join(folder, name), found, path if there else None])
if asked["drafter"]:
    read("drafter", "config.json", ("speculators_config", "verifier", "name_or_path"))
if asked["data"]:
    read("data", "capture.json", ("target_folder",))
print(json.dumps({"missing": missing, "said": said}))
"""
NAME_IT = "name it: target=/path/on/the/host"


def stated_target(
    channel: Channel, host: Mapping[str, Any], drafter: str | None, data: str | None
) -> str:
    """The target's folder on the host, as the drafter's or the dump's files there say.

    Raises InputError where nobody says one that is there.
    """
    from orchestrator.channel import Request

    fields = {
        "python": host["python"],
        "env": host["env"],
        "argument": json.dumps({"drafter": drafter, "data": data}),
    }
    (reply,) = channel.pipeline(
        [Request(op="probe", fields=fields, payload=zlib.compress(PROGRAM))], check=False
    )
    if not reply.ok:
        kind = InputError if reply.header.get("kind") == "python" else HostError
        raise kind(f"{channel.name}: {reply.header.get('error')}")
    try:
        told = json.loads(reply.payload)
    except ValueError as error:
        raise HostError(f"{channel.name}: the answer is no JSON ({error})") from None
    if told["missing"]:
        raise InputError(
            f"{channel.name}: {told['missing'][0]} does not exist there; name it by its path on the host"
        )
    for _, _, folder in told["said"]:
        if folder is not None:
            return str(folder)
    named = [
        f"{who} names {target!r}, which is no checkpoint's folder"
        for who, target, _ in told["said"]
    ]
    why = (
        "; ".join(named)
        or "neither the drafter's config.json nor the dump's capture.json names one"
    )
    raise InputError(f"{channel.name}: the target is left out, and {why}; {NAME_IT}")
