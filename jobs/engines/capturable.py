"""Whether data can be made of what a running server returns."""

from __future__ import annotations

from pathlib import Path

from eagle3.errors import BadInput
from jobs.engines.attached import attach, other_model
from jobs.engines.naming import CAPTURE_ONLY
from jobs.engines.records import Facts
from jobs.engines.returned import LABEL, Returning, why_not_whole
from jobs.engines.sglang import SGLang

FULL = "--return-hidden-states-mode full"
SPELLED = {"half": "float16", "float": "float32"}


def attached(url: str, target: Path) -> Returning:
    """The server there, which runs this target and returns its states. Raises BadInput."""
    engine = SGLang()
    running = attach(engine, url, LABEL)
    found = (other_model(running.facts, target), why_not_captured(running.facts))
    if problems := [problem for problem in found if problem]:
        raise BadInput(f"engine.url={url}: {'; '.join(problems)}")
    return Returning(engine=engine, running=running)


def why_not_captured(facts: Facts) -> str | None:
    """Why no data can be made of what a server returns, by its flags; None: it can."""
    flags = facts.flags
    if flags.get("preferred_sampling_params"):
        return "its --preferred-sampling-params change the target's greedy text; start it without"
    if flags.get(CAPTURE_ONLY):
        if flags.get("return_hidden_states_mode") == "last":
            return f"it returns the last position's states alone; start it with {FULL}"
        return None
    if lacking := why_not_whole(facts):
        return lacking
    if flags.get("speculative_algorithm") != "EAGLE3":
        return (
            f"its speculative_algorithm is {flags.get('speculative_algorithm')}, with which it returns "
            "states behind the final norm; start it with an EAGLE3 drafter, or for the states of layers "
            "alone with --enable-return-aux-hidden-states"
        )
    return None


def check_kind(facts: Facts, wanted: str, url: str) -> None:
    """Raises BadInput where the server's target does not run in the number type that is asked for."""
    said = str(facts.flags.get("dtype"))
    if wanted not in ("auto", SPELLED.get(said, said)):
        raise BadInput(
            f"data.capture.dtype is {wanted}, but the server at {url} runs its target with --dtype "
            f"{said}; start it with that, or set data.capture.dtype=auto to take what it runs in"
        )


def check_pieces(facts: Facts, longest: int) -> None:
    """Raises BadInput where the server takes long texts in in pieces, of which it returns the last."""
    size = facts.flags.get("chunked_prefill_size")
    if isinstance(size, int) and 0 < size < longest:
        raise BadInput(
            f"the longest text may have {longest} tokens, but the server takes texts in in pieces of "
            f"{size} and returns the last piece's states alone; start it with --chunked-prefill-size "
            f"{longest} or more, or -1"
        )
