"""What the accept length that an engine reports says, beside the one that its wiring predicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3.conventions import Evidence as Ground
from eagle3.diagnosis.answer import LIKELY, POSSIBLE, Cause
from eagle3.diagnosis.causes import OPEN_LENGTH
from eagle3.diagnosis.evidence import Evidence, Scored
from eagle3.diagnosis.fixes import Fix
from eagle3.diagnosis.heard import NEAR_LENGTH, Counted, Heard, gains_more
from eagle3.diagnosis.words import rate_words
from eagle3.doctor.server import flags_of
from eagle3.metrics import Rate

STEPS = ("speculative_num_steps", "num_speculative_tokens")  # flags of SGLang and of vLLM
EXACTLY = 0.02  # a figure this near to the predicted one less 1 lacks the bonus token
LOSES = (
    "something behind the engine loses the rest (the drafter's cache not rebuilt behind accepted "
    "tokens, prefix cache, another target build, other prompts)"
)
RECORD = "record what fc is fed: job=engine_probe with engine.python=…, which starts its own server"
AGAIN = (
    "serve once with the prefix cache off and one request at a time, and compare",
    "compare the first round's accept length with the later ones",
)
NO_BONUS = "the engine's figure leaves the bonus token out"
BEHIND = (
    "something between the target's states and what is accepted loses the rest (a norm, a shift or a "
    "cast in front of fc, the drafter's cache, its kernels)"
)


def engine_causes(e: Evidence) -> Iterator[Cause]:
    """At most one cause; where two readings explain the figure, the other one is in its words."""
    if e.heard is not None and e.heard.shift and not reaches(e.counted):
        yield moved(e.heard, LIKELY if e.counted is not None else POSSIBLE)
        return
    if e.heard is not None and e.heard.accept_length is not None and e.counted is None:
        return  # what it was counted at is of other texts, or of another kind of round
    measured, predicted = e.engine_accept_length, e.as_served
    if measured is None or predicted is None or comparable(e) is not None:
        return
    if e.counted is not None:
        yield from counted_causes(e, e.counted)
        return
    length = predicted.accept_length
    if inside(measured, length):
        return
    if abs(measured + 1 - length.value) <= EXACTLY:
        why = f"it is {length.value:.2f} less 1: {NO_BONUS}; if it does not, {LOSES}"
        yield measurement(e, why, LIKELY)
    elif inside(measured + 1, length):
        yield engine_state(e, predicted, f", or {NO_BONUS} (it is about {length.value:.2f} less 1)")
    elif e.tree is not None and inside(measured, e.tree):
        why = f"a tree gains more than a chain: {rate_words(e.tree)} are expected of the tree"
        yield measurement(e, why, LIKELY)
    elif measured > length.high:
        why = "served so, no chain of it gains so much on this data: a tree, other texts, or more steps"
        yield measurement(e, why, POSSIBLE)
    else:
        yield engine_state(e, predicted)


def counted_causes(e: Evidence, counted: Counted) -> Iterator[Cause]:
    """At most one cause, of what a running server was seen to accept of these very texts' prompts."""
    served, alone, lost = counted.served, counted.alone, counted.lost
    beside = (
        f"the server was counted at {rate_words(served)} on the prompts of {counted.texts} texts, where "
        f"the drafter alone, wired as it is served, has {rate_words(alone)}"
    )
    known = e.served is not None and e.served.measured
    shown: dict[str, Any] = {
        "trained": f"alone {alone.value:.2f}",
        "served": f"counted {served.value:.2f}",
        "cost": None,
        "evidence": Ground.run.value,
    }
    if lost.low > NEAR_LENGTH:
        left = BEHIND if known else f"its states are not those of the tables, or {BEHIND}"
        yield Cause(
            kind="engine-state",
            what=f"{beside}: {left}",
            fixes=(to_do(RECORD, *AGAIN),),
            confidence=LIKELY if known else POSSIBLE,
            **shown,
        )
    elif gains_more(counted):
        why = (
            "no such wiring gains so much; it simulates what it accepts, accepts what the target would "
            "not have said, or says other texts"
        )
        if not known:
            as_trained = rate_words(e.trained.accept_length)
            why = f"what it feeds is not what was read; as trained it would be {as_trained}"
        yield Cause(
            kind="measurement",
            what=f"{beside}: {why}",
            fixes=(to_do("compare its answers with the target's own at temperature 0"),),
            confidence=POSSIBLE,
            **shown,
        )


def reaches(counted: Counted | None) -> bool:
    """Whether a server is settled to accept what the drafter alone has, so wired."""
    return counted is not None and counted.lost.high <= NEAR_LENGTH + OPEN_LENGTH


def moved(heard: Heard, confidence: str) -> Cause:
    """The server hands the states of other positions to its drafter, if the answer is not moved."""
    rows = f"row t of the states that the server returns is that of position t{heard.shift:+d}"
    return Cause(
        kind="engine-state",
        what=f"{rows}: the drafter is fed so, or the answer alone is moved",
        trained="row t is that of position t",
        served=rows,
        cost=None,
        fixes=(to_do(RECORD),),
        confidence=confidence,
        evidence=Ground.run.value,
    )


def inside(measured: float, predicted: Rate) -> bool:
    """Whether a figure behind the engine is the predicted one, whose prompts are others."""
    return predicted.low - NEAR_LENGTH <= measured <= predicted.high + NEAR_LENGTH


def comparable(e: Evidence) -> str | None:
    """Why the engine's figure cannot be set beside the predicted one; None: it can."""
    if e.engine_accept_length is not None and e.as_served is None:
        return unpredicted(e)
    steps, scored = stated_steps(e), e.trained.steps
    if steps is None:
        if e.engine_accept_length is None or e.as_served is None or scored == 1:
            return None
        one, all_ = 1 + e.as_served.accuracy.value, e.as_served.accept_length.value
        if all_ - one < NEAR_LENGTH:
            return None  # as many steps as it may draft, they gain nothing
        if e.engine_accept_length < 1 + e.as_served.accuracy.low - NEAR_LENGTH:
            return None  # too little for one step even
        return (
            f"nobody says how many steps the engine drafts, and its wiring gives {one:.2f} with one and "
            f"{all_:.2f} with {scored}; give engine_flags='num_steps=…,topk=…,num_draft_tokens=…' "
            "(vLLM: 'num_speculative_tokens=…')"
        )
    if str(steps) != str(scored):
        return (
            f"the engine drafts {steps} steps and {scored} were scored, so their accept lengths have "
            f"other ceilings; score with job.steps={steps}"
        )
    return None


def unpredicted(e: Evidence) -> str:
    """Why nothing is predicted that the engine's figure could be set beside."""
    if e.served is not None and e.served.wiring is None:
        return (
            f"an engine that reports one runs the drafter, which {e.served.engine} does not by what is "
            f"{e.served.evidence.value} of it; is that the release and class that runs, and this the "
            "checkpoint that it got?"
        )
    return f"what it feeds is not scored here: {e.why_not_served}"


def stated_steps(e: Evidence) -> Any:
    """How many steps the engine is told to draft; None: nobody says."""
    flags = flags_of(e.asked.flags) if e.asked is not None else {}
    return next((flags[name] for name in STEPS if name in flags), None)


def to_do(*lines: str) -> Fix:
    """Something to try, which nothing here has shown."""
    return Fix(engine="", possible=True, lines=lines, evidence=Ground.inferred.value)


def measurement(e: Evidence, why: str, confidence: str) -> Cause:
    """The figure behind the engine is another one than it is taken for."""
    assert e.as_served is not None
    length = e.as_served.accept_length
    return Cause(
        kind="measurement",
        what=f"the engine reports {e.engine_accept_length:.2f} where its wiring predicts "
        f"{rate_words(length)}; {why}",
        trained=f"predicted {length.value:.2f}",
        served=f"reported {e.engine_accept_length:.2f}",
        cost=None,
        fixes=(to_do("compare tokens a target forward, the bonus token included, on both sides"),),
        confidence=confidence,
        evidence=Ground.inferred.value,
    )


def engine_state(e: Evidence, predicted: Scored, other: str = "") -> Cause:
    """The engine accepts less than its own wiring gives on fresh states."""
    length = predicted.accept_length
    return Cause(
        kind="engine-state",
        what=f"the engine reports {e.engine_accept_length:.2f} where its wiring, on fresh states, gives "
        f"{rate_words(length)}: {LOSES}{other}",
        trained=f"predicted {length.value:.2f}",
        served=f"reported {e.engine_accept_length:.2f}",
        cost=None,
        fixes=(to_do(*AGAIN),),
        confidence=POSSIBLE,
        evidence=Ground.inferred.value,
    )
