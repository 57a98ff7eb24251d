"""The fault bench: faults are planted in the lab's drafters, and the diagnosis has to name them.

    python -m bench.diagnosis [--held-out] [--sample 40 --seed 1] [--kind NAME] [--json FILE]

Without --held-out the cases are those that thresholds were fixed on: the first and the second drafter,
the kinds marked for tuning. With it they are what is reported: every kind on the third drafter, and the
kinds that were never used while tuning on all three. Exit code 1: a bar is missed, or, of a sample,
missed by more than chance explains.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.planted.cases import (
    GROUPS,
    OUTSIDE,
    PAIR,
    SINGLE,
    SOUND,
    Case,
    all_cases,
    draft_of,
    sample,
)
from bench.planted.draft import AXES, STEPS, Draft
from bench.planted.drafters import DRAFTERS, sound
from bench.planted.lab import Laboratory
from bench.planted.score import BARS, Answer, lower, too_low, upper
from eagle3.errors import BadInput
from jobs import drafter_test
from jobs.asked import asked_of
from jobs.diagnosing import diagnose_folder
from jobs.events import Events
from jobs.question import Kit

THREADS = 2


class Bench:
    """Answers cases in one process; what cases share is made once."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.laboratory = Laboratory(work)
        self.kits: dict[str, Kit] = {}
        self.alone: dict[tuple[object, ...], float] = {}

    def answer(self, case: Case) -> Answer:
        """Plant a case, ask the diagnosis, and keep what it says."""
        with tempfile.TemporaryDirectory(prefix="case.", dir=self.laboratory.work) as name:
            folder = Path(name)
            draft = draft_of(case)
            request = self.request(draft, draft.write(folder, self.laboratory))
            kit = self.kit(draft.target)
            causes: tuple[str, ...] = ()
            started, worked = time.perf_counter(), time.process_time()
            try:
                told = diagnose_folder(asked_of(request), kit).diagnosis
            except BadInput as error:
                verdict, said = "refused", str(error)
            else:
                verdict, said = told.verdict, told.headline
                causes = tuple(cause.kind for cause in told.causes)
            return Answer(
                case=case,
                verdict=verdict,
                causes=causes,
                said=said,
                seconds=time.perf_counter() - started,
                worked=time.process_time() - worked,
            )

    def kit(self, target: str) -> Kit:
        """A target's parts, read once."""
        if target not in self.kits:
            self.kits[target] = Kit(self.laboratory.target(target))
        return self.kits[target]

    def request(self, draft: Draft, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What jobs/diagnose is asked."""
        engine = draft.engine
        return {
            "job": "diagnose",
            "device": "cpu",
            "threads": THREADS,
            "steps": STEPS,
            "max_samples": None,
            "seed": 0,
            "axes": AXES,
            "start": None,
            "finalists": 8,
            "inputs": inputs,
            "engine": None
            if engine is None
            else {
                "name": engine.name,
                "version": engine.version,
                "engine_class": engine.engine_class,
                "checkout": None,
                "flags": draft.engine_flags,
                "ids": None if draft.engine_ids is None else list(draft.engine_ids),
                "accept_length": None
                if draft.measured is None
                else draft.measured(self.accept_length(draft)),
            },
            "trained_accuracy": draft.trained_accuracy,
            "cases": [{"case_id": "case"}],
        }

    def accept_length(self, draft: Draft) -> float:
        """Of the sound drafter, on the same texts."""
        key = (draft.drafter, draft.dump.texts, draft.dump.chosen)
        if key not in self.alone:
            self.alone[key] = self.measure(draft)
        return self.alone[key]

    def measure(self, draft: Draft) -> float:
        lab = DRAFTERS[draft.drafter]
        plain = sound(lab, draft.layout, "pt_shards", draft.dump.chosen)
        with tempfile.TemporaryDirectory(dir=self.laboratory.work) as name:
            folder = Path(name)
            wiring = {
                "layers": list(lab.states),
                "convention": "input",
                "d2t": "offset",
                "decoder_layer": "included",
                "embedding": "target",
            }
            request = {
                "device": "cpu",
                "steps": STEPS,
                "truth": "target_argmax",
                "seed": 0,
                "max_samples": None,
                "inputs": plain.write(folder, self.laboratory),
            }
            with Events(folder / "events.jsonl") as events:
                job = drafter_test.open_job(request, events)
                found = job.run_case({"case_id": "case", "wiring": wiring})
        return float(found["metrics"]["accept_length"]["value"])


def report(answers: Sequence[Answer]) -> bool:
    """Print the tables; whether every bar is reached."""
    kinds: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        name = answer.case.kind if answer.case.group != PAIR else "two at once"
        kinds.setdefault((answer.case.group, name), []).append(answer)
    print(f"{'':46}  cases  right  found  median s")
    for (group, name), found in sorted(kinds.items()):
        right, named = sum(a.right for a in found), sum(a.found for a in found)
        middle = statistics.median(a.seconds for a in found)
        print(f"{group + ' ' + name:46.46}  {len(found):5}  {right:5}  {named:5}  {middle:8.1f}")
    wrong = [answer for answer in answers if not answer.right]
    if wrong:
        print(f"\n{len(wrong)} wrong answers")
    for answer in wrong:
        print(f"- {answer.case.name}")
        print(f"  {answer.verdict}: {', '.join(answer.causes) or 'no cause'}. {answer.said}")
    print()
    reached = [figure(group, answers) for group in GROUPS]
    return all(reached)


MOST_S = 10  # that a case should take at most
MEANINGS = {
    SINGLE: "the right cause named first",
    PAIR: "the two causes named first are the two planted, in either order",
    SOUND: "nothing found in sound files",
    OUTSIDE: "answered as unknown",
}


def figure(group: str, answers: Sequence[Answer]) -> bool:
    """Print a group's figure; whether it reaches its bar."""
    found = [answer for answer in answers if answer.case.group == group]
    if not found:
        return True
    right, count = sum(a.right for a in found), len(found)
    low, high = lower(right, count), upper(right, count)
    text = f"{group:8} {right} of {count} ({right / count:.1%}, {low:.1%} to {high:.1%}): "
    text += f"{MEANINGS[group]}; at least {BARS[group]:.1%} is asked"
    if group == SOUND:
        text += f"; {count - right} false alarms, at most {upper(count - right, count):.1%}"
    print(text)
    return right >= BARS[group] * count


def machine() -> str:
    """Where the times were measured, and on what."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(": ")[2]
            break
    sizes = (
        "drafters of H_d 128, one or two layers, 512 or 704 of 1,024 tokens; 24 to 90 texts of 73 to "
        "144 tokens"
    )
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, Python {platform.python_version()}; float32; {sizes}"
    )


def default_work() -> Path:
    """Where targets, texts and dumps are kept from one run to the next."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "drafter-orchestrator" / "bench"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--held-out", action="store_true", help="what is reported, not tuned on")
    parser.add_argument("--sample", type=int, help="a stratified sample of so many cases")
    parser.add_argument("--seed", type=int, default=0, help="of the cases and of the sample")
    parser.add_argument("--kind", help="only cases with this in their kind's name")
    parser.add_argument("--group", choices=GROUPS, help="only cases of this group")
    parser.add_argument("--json", type=Path, help="write every answer to this file")
    parser.add_argument("--threads", type=int, default=THREADS, help="of torch")
    parser.add_argument("--work", type=Path, default=default_work(), help="what is made once")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask all cases and report; the exit code."""
    asked = parse(arguments)
    torch.set_num_threads(asked.threads)
    cases = all_cases(asked.seed, held_out=asked.held_out)
    cases = [c for c in cases if asked.group in (None, c.group)]
    cases = [c for c in cases if (asked.kind or "") in c.kind]
    if asked.sample:
        cases = sample(cases, asked.sample, asked.seed)
    if not cases:
        print(f"no case of these has '{asked.kind}' in its kind", file=sys.stderr)
        return 2
    bench = Bench(asked.work)
    answers = []
    for number, case in enumerate(cases, 1):
        answer = bench.answer(case)
        answers.append(answer)
        mark = "right" if answer.right else "WRONG"
        print(
            f"[{number}/{len(cases)}] {mark} {case.name}: {answer.verdict} "
            f"{', '.join(answer.causes)} {answer.seconds:.1f} s ({answer.worked:.1f})",
            file=sys.stderr,
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps([plain(a) for a in answers], indent=1) + "\n")
    reached = report(answers)
    seconds, worked = [a.seconds for a in answers], [a.worked for a in answers]
    print(
        f"{len(answers)} cases, {statistics.median(seconds):.1f} s a case in the median, "
        f"{max(seconds):.1f} s at most, {sum(s > MOST_S for s in seconds)} over the {MOST_S} s that are "
        f"asked; of processor time {statistics.median(worked):.1f} s and "
        f"{max(worked):.1f} s\n{machine()}"
    )
    if asked.sample or asked.kind or asked.group:
        counts = {g: [a.right for a in answers if a.case.group == g] for g in GROUPS}
        return int(any(too_low(sum(found), len(found), g) for g, found in counts.items()))
    return int(not reached)


def plain(answer: Answer) -> dict[str, Any]:
    """An answer as plain data."""
    return {
        **vars(answer.case),
        "verdict": answer.verdict,
        "causes": list(answer.causes),
        "said": answer.said,
        "seconds": round(answer.seconds, 2),
        "processor_seconds": round(answer.worked, 2),
        "right": answer.right,
        "found": answer.found,
    }


if __name__ == "__main__":
    sys.exit(main())
