"""What servers are asked: a person's prompts, or those of the data, and how long the answers are.

Refused are prompts without tokens and prompts that look drawn at random: on such a target says what it
says nowhere else, and the accept length means nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eagle3.errors import BadInput
from eagle3.samples import Sample, answer_start
from jobs.engines.records import Prompt

# Of tokens that are drawn evenly so many pairs would be alike by chance before that can be told…
ENOUGH_PAIRS = 50
# …and of a text at least so many times as many are.
TEXT_LIKE = 1.5


def from_ids(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Prompt]:
    """Prompts of a file, each with an answer of `new_tokens`."""
    return [
        Prompt(name=str(number), ids=tuple(ids), new_tokens=new_tokens)
        for number, ids in enumerate(prompts)
    ]


def from_sample(sample: Sample, new_tokens: int | None) -> Prompt:
    """The part of a text that the target did not write, with an answer of `new_tokens`, or as long as
    the text's own. Raises BadInput where nothing stands in front of the answer.
    """
    start = answer_start(sample.loss_mask)
    if start == 0:
        raise BadInput(f"{sample.path} has no prompt: its first token counts as the target's own")
    own = len(sample.input_ids) - start
    return Prompt(
        name="/".join(sample.path.parts[-2:]),
        ids=tuple(sample.input_ids[:start].tolist()),
        new_tokens=new_tokens or own,
    )


def check(prompts: Sequence[Prompt], vocab: int) -> None:
    """Raises BadInput for prompts that measure nothing."""
    if not prompts:
        raise BadInput("there are no prompts to ask")
    for prompt in prompts:
        if not prompt.ids:
            raise BadInput(f"prompt {prompt.name} holds no tokens")
        if outside := [token for token in prompt.ids if not 0 <= token < vocab]:
            raise BadInput(
                f"prompt {prompt.name} holds token {outside[0]}, but the target's vocabulary has {vocab}"
            )
        if prompt.new_tokens < 2:
            raise BadInput(
                f"prompt {prompt.name} asks for {prompt.new_tokens} token; the first is the prefill's, "
                "so that at least 2 are needed"
            )
    if looks_random(prompts, vocab):
        raise BadInput(
            "the prompts look like token ids drawn at random: no token comes back more often than by "
            "chance; ask what your users ask (job.prompts=FILE), since behind noise no accept length "
            "means anything"
        )


def looks_random(prompts: Sequence[Prompt], vocab: int) -> bool:
    """Whether tokens are as evenly spread as drawn ones; False where there are too few to tell."""
    counts = Counter(token for prompt in {p.ids for p in prompts} for token in prompt)
    total = sum(counts.values())
    by_chance = total * (total - 1) / 2 / vocab
    alike = sum(n * (n - 1) // 2 for n in counts.values())
    return by_chance >= ENOUGH_PAIRS and alike < TEXT_LIKE * by_chance


def notes(prompts: Sequence[Prompt]) -> list[str]:
    """What a reader should know of them."""
    again = len(prompts) - len({prompt.ids for prompt in prompts})
    return [f"{again} of {len(prompts)} prompts repeat earlier ones"] if again else []
