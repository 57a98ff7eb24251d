"""What the advice predicts beside what an engine then does, with delays injected into the engine.

    python -m bench.engine_advice [--engine vllm] [--tokens 32]

The lab's drafter behind a real engine on a CPU (`python -m tests.engines.setup_engines` makes the
environments). A server without the drafter and two with it, of 1 and of 4 steps, give the times of a
plain step, a draft step and a verification, and the share of drafts that stand. Of those the tok/s of
decoding with 2 and with 3 steps are predicted, then measured on servers that the prediction never saw.
Delays stand in for what a GPU would have: a slow drafter, a slow target, a target that pays for every
token that it verifies, a slow head.

SGLang runs here with a stand-in for its CPU kernels, so that its own speed is not told by this; how its
rounds are made up of steps is.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eagle3.files import read_json
from eagle3.lab.layout import lay_out as lay_out_target
from eagle3.wiring import Wiring
from jobs.capture_states import read_prompts
from jobs.engines import figures
from jobs.engines.disturbance import look
from jobs.engines.engine import Draft, Wanted
from jobs.engines.folder import lay_out
from jobs.engines.hypothesis import served_as
from jobs.engines.limits import Limits, advise, split
from jobs.engines.load import run_pass
from jobs.engines.prompts import from_ids
from jobs.engines.records import Pass, Request
from jobs.engines.setup import ENGINES
from jobs.engines.started import Patience, Running, started
from tests.engines import serving, setup_engines
from tests.engines.setup_engines import RELEASES
from tests.engines.slowed import Delays

LAB = Path(__file__).parents[1] / "lab"
TRAINED = {
    "layers": [-1, 2, 30],
    "convention": "output",
    "d2t": "offset",
    "decoder_layer": "included",
    "embedding": "target",
}
LAYERS = 61
FEWER, MOST = 1, 4  # steps that are measured for the prediction
UNSEEN = (2, 3)
PROMPTS = 3
AIM = 0.15  # how far a prediction may be off
SLOW: Mapping[str, Mapping[str, float]] = {
    "nothing": {},
    "the drafter": {"draft": 0.06},
    "the drafter's head": {"head": 0.06},
    "the target": {"target": 0.12},
    "each token verified": {"row": 0.03},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One set of flags under one delay: decode tok/s of one request."""

    engine: str
    slow: str
    steps: int  # 0: without the drafter
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """Of what was measured, by how much the prediction is off."""
        return self.predicted / self.measured - 1


@contextmanager
def serving_it(
    engine: str, target: Path, draft: Draft | None, delays: Delays, first: Request, folder: Path
) -> Iterator[Running]:
    """A ready server that reads the delays."""
    wanted = Wanted(
        python=str(serving.engine_python(engine)),
        target=target,
        port=0,
        draft=draft,
        flags=serving.flags(engine),
    )
    with started(
        ENGINES[engine](),
        wanted,
        delays.environment(serving.environment(engine)),
        folder,
        label=f"{draft.steps if draft else 0}-steps",
        number=0,
        first=first,
        patience=Patience(start_s=300.0, first_s=300.0),
        say=lambda _: None,
    ) as running:
        yield running


def passes(
    engine: str, running: Running, requests: Sequence[Request], delays: Delays
) -> list[Pass]:
    """One pass under each delay, behind one that is not counted."""
    found = []
    for number, seconds in enumerate(({}, *SLOW.values())):
        delays.set(**seconds)
        found.append(
            run_pass(
                ENGINES[engine](),
                running.address,
                requests,
                arm=running.label,
                server=0,
                number=number,
                concurrency=1,
                look=lambda: look(running.pids()),
            )
        )
    delays.set()
    return found[1:]


def outcomes(engine: str, folder: Path, tokens: int) -> Iterator[Outcome]:
    """Every unseen set of flags under every delay."""
    target = folder / "target"
    if not target.exists():
        lay_out_target(LAB / "target", target)
    ids = read_prompts(LAB / "prompts.jsonl", target)[:PROMPTS]
    requests = [
        Request(prompt=prompt, ignore_eos=True, seconds=600.0) for prompt in from_ids(ids, tokens)
    ]
    served = served_as(
        read_json(LAB / "drafter" / "config.json"),
        target,
        Wiring.parse(TRAINED),
        engine=engine,
        version=RELEASES[engine],
        engine_class=None,
        num_layers=LAYERS,
    )
    work = folder / engine
    work.mkdir()
    drafter = lay_out(LAB / "drafter", work / "drafter", served.config)
    delays = Delays(work / "delays.json")
    by_steps: dict[int, list[Pass]] = {}
    for steps in (0, FEWER, *UNSEEN, MOST):
        draft = Draft(folder=drafter, steps=steps) if steps else None
        with serving_it(engine, target, draft, delays, requests[0], work) as running:
            by_steps[steps] = passes(engine, running, requests, delays)
        print(f"{engine}: {steps} steps measured", file=sys.stderr, flush=True)
    for place, slow in enumerate(SLOW):
        at = {steps: found[place] for steps, found in by_steps.items()}
        predicted = predict(at[0], at[FEWER], at[MOST])
        for steps in UNSEEN:
            token_s = figures.token_s([at[steps]])
            assert token_s is not None  # every answer has more than one token
            yield Outcome(
                engine=engine,
                slow=slow,
                steps=steps,
                predicted=predicted[steps],
                measured=1 / token_s,
            )


def predict(plain: Pass, fewer: Pass, most: Pass) -> Mapping[int, float]:
    """Decode tok/s by steps, as a benchmark's advice has them."""
    step_s, round_s, other_s = (
        figures.token_s([plain]),
        figures.round_s([most]),
        figures.round_s([fewer]),
    )
    length, stood = figures.accept_length([most], MOST + 1, 0), figures.per_position([most], MOST)
    if step_s is None or round_s is None or other_s is None or length is None or stood is None:
        raise SystemExit("the engine counted no rounds, so that nothing can be predicted")
    limits = Limits(
        concurrency=1, step_s=step_s, round_s=round_s, accept_length=length.value, steps=MOST
    )
    advice = advise(split(limits, FEWER, other_s), stood)
    assert advice is not None  # a round's parts are known
    return advice.by_steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(ENGINES), help="only this one")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    asked = parser.parse_args(arguments)
    engines = [asked.engine] if asked.engine else list(ENGINES)
    if faults := [fault for engine in engines if (fault := setup_engines.fault(engine))]:
        print(f"{faults[0]}; make it with `python -m tests.engines.setup_engines`", file=sys.stderr)
        return 2
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; the lab's 61 layers of width 128, float32; "
        f"{PROMPTS} prompts of 48 tokens, {asked.tokens} answered, one at a time"
    )
    print(f"{'engine':8}{'slow is':22}{'steps':>6}{'predicted':>11}{'measured':>10}{'off':>8}")
    found = []
    with tempfile.TemporaryDirectory(prefix="engine-advice.") as name:
        for engine in engines:
            for o in outcomes(engine, Path(name), asked.tokens):
                found.append(o)
                print(
                    f"{o.engine:8}{o.slow:22}{o.steps:>6}{o.predicted:>11.2f}{o.measured:>10.2f}"
                    f"{o.off:>+8.1%}",
                    flush=True,
                )
    off = [abs(o.off) for o in found]
    print(
        f"decode tok/s of one request; off by {statistics.median(off):.1%} in the median, "
        f"{max(off):.1%} at most; {sum(o <= AIM for o in off)} of {len(off)} within {AIM:.0%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
