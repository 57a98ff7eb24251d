"""A fix, and what one is asked for: the engine's rows, a config to change, a program to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from eagle3.conventions import Evidence, Rule
from eagle3.diagnosis.patched_config import Edit
from eagle3.diagnosis.rewrites import program_lines
from eagle3.doctor.report import architecture_of
from eagle3.doctor.subject import EngineAsked
from eagle3.engines import rule_for
from eagle3.errors import BadInput
from eagle3.form import DrafterForm, Rope
from eagle3.served import ServedWiring, engine_words
from eagle3.served_switches import plain_drafter
from eagle3.serving import Serving, serving_for
from eagle3.wiring import Wiring

FLAT_COPY = "the flat copy of config.json"
EVERY, TRAINING = "every engine", "training"
CODE = "no line of config.json changes it; look into the engine's code"


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One way to mend a cause, or why there is none there and what is left."""

    engine: str  # in words: whom the lines are for
    possible: bool
    # What to write, the shortest exact line first: of config.json (what to change and what to remove,
    # never the whole), flags, or what a program does, in one line, and then the program.
    lines: tuple[str, ...] = ()
    # config.json with this fix alone, None: unchanged. The one to write is `fixes.patched_config`'s.
    config: Mapping[str, Any] | None = None
    needs: str | None = None  # what has to be done besides, in a few words: a patch of the engine
    patched: bool = False  # whether a patch of the engine is among what it needs
    note: str | None = None  # how that works, and what else is worth a word
    left: str | None = None  # where it is not possible: a patch, another engine, retraining
    evidence: str  # run, read or inferred
    source: str = ""  # what was read
    snippet: str | None = (
        None  # the python program over the checkpoint's files, the last of `lines`
    )


class Mended(IntEnum):
    """How a cause is mended: the less has to be done, the lower."""

    by_lines = 0  # by what can be written alone: lines, flags, programs over the checkpoint
    by_patch = 1  # with a change of the engine's code as well
    not_there = 2  # not with this engine as it is, or by training again


def mended(fixes: Iterable[Fix]) -> Mended:
    """How a cause with these fixes is mended, by the one that asks for least."""
    ways = (Mended.by_patch if fix.patched else Mended.by_lines for fix in fixes if fix.possible)
    return min(ways, default=Mended.not_there)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a fix is asked for."""

    trained: Wiring
    served: ServedWiring | None
    form: DrafterForm
    config: Mapping[str, Any]
    asked: EngineAsked | None
    num_layers: int
    stored: tuple[int, ...]
    target_rope: Rope | None

    @property
    def name(self) -> str | None:
        """'sglang'."""
        return self.asked.name if self.asked is not None else None

    @property
    def words(self) -> str:
        """Whom the lines are for."""
        return engine_words(self.asked) if self.asked is not None else EVERY

    @property
    def run(self) -> Wiring | None:
        """What the engine runs, also where it does not start for another reason."""
        return self.served.run if self.served is not None else None

    @cached_property
    def rule(self) -> Rule | None:
        """The engine's row for layer ids."""
        if self.asked is None:
            return None
        return rule_for(self.asked.name, self.asked.version, self.asked.engine_class)

    @cached_property
    def serving(self) -> Serving | None:
        """The engine's row for the rest; None where it has no place for such a drafter."""
        if self.asked is None:
            return None
        architecture = architecture_of(self.asked.name, plain_drafter(self.config, self.form))
        try:
            return serving_for(self.asked.name, self.asked.version, architecture)
        except BadInput:
            return None

    @property
    def known(self) -> tuple[str, str]:
        """How it is known what the engine does, and from where: the ground of every fix for it."""
        row = self.serving or self.rule
        if row is None:
            return Evidence.read.value, "the rows of every engine; llama.cpp's is inferred"
        return row.evidence.value, row.source

    def edit(self) -> Edit:
        """The config to be changed, of a layout that the engine loads."""
        return Edit(self.config, self.name, self.form)

    def fix(self, *lines: str, snippet: str | None = None, **more: Any) -> Fix:
        """A fix by what the engine does with a drafter."""
        evidence, source = self.known
        known = {"engine": self.words, "possible": True, "evidence": evidence, "source": source}
        return Fix(
            **{**known, "lines": (*lines, *program_lines(snippet)), "snippet": snippet, **more}
        )

    def rewritten(self, snippet: str) -> Fix:
        """A program over the tensors; the layout of other engines' tensors is the same."""
        return self.fix(snippet=snippet)

    def none(self, *left: str, **more: Any) -> Fix:
        """That it cannot be expressed there, and what is left."""
        return self.fix(possible=False, left="; or ".join(left), **more)

    def edited(self, edit: Edit, *others: str, **more: Any) -> Fix:
        """A changed config.json; `others` are lines beside those that lead to it."""
        done = edit.done()
        lines = (*done.lines, *others)
        if not lines and more.get("snippet") is None:
            lines = ("nothing: config.json says so already, where this engine looks",)
            if edit.flattened:
                lines = ("nothing besides: the flat copy of config.json says so",)
        if edit.flattened:  # which is said once, by `fixes.flat_copy`
            more["needs"] = " and ".join(filter(None, (more.get("needs"), FLAT_COPY)))
        return self.fix(*lines, config=done.config, **more)


def needed(patch: str | None, way: str | None = None) -> dict[str, Any]:
    """A patch of an engine by its short name, with how it is had, and how it works."""
    name, _, how = (patch or "").partition(": ")
    needs = f"{name} ({way})" if name and way else name
    return {"needs": needs or None, "note": how or None, "patched": bool(name)}
