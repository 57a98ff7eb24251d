"""A person's own command line that starts a server: filled in, and what of it is not seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from jobs.engines.engine import Wanted
from jobs.engines.simulated import CONFIG_WORDS, PREFIXES, WHY

# One of them as a word's program, or in the script that a word is; an image "docker.io/…" is none.
RUNTIME = re.compile(
    r"""(?:^|[\s;&|()'"`/])((?:docker|podman|nerdctl)(?:-compose)?)(?=$|[\s;&|()'"`])"""
)


def filled(words: Sequence[str], wanted: Wanted) -> list[str]:
    """The command with port, model and drafter in their places; other braces stay as they are."""
    places = {"{port}": str(wanted.port), "{model}": str(wanted.target)}
    if wanted.draft is not None:
        places["{drafter}"] = str(wanted.draft.folder)
    command = []
    for word in words:
        for place, value in places.items():
            word = word.replace(place, value)
        command.append(word)
    return command


def in_container(words: Sequence[str]) -> bool:
    """Whether the command is `docker run …`, whose processes do not descend from it."""
    return Path(words[0]).name == "docker"


def hidden_runtime(words: Sequence[str]) -> str | None:
    """The word that starts containers otherwise than `docker …` does: nobody would stop them."""
    others = words[1:] if in_container(words) else words
    return next((word for word in others if RUNTIME.search(word)), None)


def container_name(words: Sequence[str]) -> str | None:
    """NAME of `--name NAME` or `--name=NAME`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--name":
            return following or None
        if word.startswith("--name="):
            return word.partition("=")[2] or None
    return None


def check_launch(asked: Mapping[str, Any]) -> None:
    """Raises BadInput for a command that makes its engine accept whatever is drafted."""
    for key in ("launch", "baseline_launch"):
        for word in asked[key] or ():
            written = word.replace("-", "_")
            if any(part in written for part in (*PREFIXES, *CONFIG_WORDS)):
                raise BadInput(f"engine.{key} has '{word}': {WHY}; leave it out")


def launch_notes(asked: Mapping[str, Any], *, advice: bool) -> list[str]:
    """What is not seen of servers that a person's own command starts."""
    notes = []
    if advice:
        notes.append(
            "drafting and verifying are not told apart, since engine.launch is one command with one "
            "number of steps"
        )
    if any(in_container(asked[key]) for key in ("launch", "baseline_launch")):
        notes.append(
            "servers run in containers: which processes are theirs, what else runs in there, and "
            "whether GPU memory was given back behind them is not seen; they are stopped by their names"
        )
    if asked["name"] != "sglang":
        notes.append(
            f"{asked['name']} does not tell its flags or its drafter: that the server drafts with this "
            "drafter, as the job has it, rests on engine.launch; where it caches prefixes, prompts that "
            "come again are answered from there"
        )
    return notes
