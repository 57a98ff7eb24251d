"""What a server that is started feeds its drafter, recorded while every prompt is asked twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from jobs.engines.engine import Draft
from jobs.engines.probing import Rows
from jobs.engines.recording import Recorder, prefill_of
from jobs.engines.records import Request
from jobs.engines.setup import Setup
from jobs.engines.talk import ServerError

LABEL = "probe"


def recorded(
    setup: Setup, recorder: Recorder, draft: Draft, requests: Sequence[Request]
) -> Iterator[Rows]:
    """A prompt at a time, alone, with the recorder armed. Raises ServerError and BadInput."""
    with setup.server(LABEL, 0, draft, requests) as running:
        for request in requests:
            takes = []
            for _ in range(2):
                setup.engine.forget(running.address)
                recorder.arm()
                try:
                    answer = setup.engine.ask(running.address, request, 0.0, alone=True)
                except ServerError as error:
                    raise running.reason(error) from error
                taken = recorder.take()
                prefill, later = prefill_of(taken.calls, len(request.prompt.ids))
                logits = taken.behind(len(taken.calls) - len(later))
                takes.append((answer, prefill, later, logits))
            (answer, prefill, later, logits), (_, again, _, logits_again) = takes
            yield Rows(
                text=torch.tensor([*request.prompt.ids, *answer.output]),
                answer=answer,
                prefill=prefill,
                again=again,
                later=later,
                logits=logits,
                logits_again=logits_again,
            )
