"""Counters in the text form of Prometheus, as both engines give them at /metrics."""

from __future__ import annotations

import re
from collections import defaultdict

SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+([-+0-9.eE]+|[+-]?Inf|NaN)\s*$")
LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


def totals(text: str) -> dict[str, int]:
    """Every counter summed over its labels: replicas and models of one server together."""
    found: dict[str, float] = defaultdict(float)
    for name, _, value in samples(text):
        found[name] += value
    return {name: round(value) for name, value in found.items()}


def by_label(text: str, name: str, label: str) -> dict[str, int]:
    """One counter, summed for each value of one of its labels."""
    found: dict[str, float] = defaultdict(float)
    for sample, labels, value in samples(text):
        if sample == name and label in labels:
            found[labels[label]] += value
    return {key: round(value) for key, value in found.items()}


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample that is a finite number."""
    found = []
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None or not match[3][-1].isdigit():
            continue
        found.append((match[1], dict(LABEL.findall(match[2] or "")), float(match[3])))
    return found
