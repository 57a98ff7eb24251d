"""Faults of layers and states: which of them are fed, and from where."""

from __future__ import annotations

from tests.faults.edits import (
    ALL_DUMPS,
    earlier_end,
    fc_of_one,
    half,
    ids,
    one_aux,
    other_side,
    quantised,
    rounded,
    sglang,
    swapped,
    window_shifted,
    without_residual,
)
from tests.faults.form import By, Planted, Row
from tests.faults.planting import (
    captured_states_are,
    dump,
    in_turn,
    top,
    weights,
)
from tests.faults.sound import LAYERS, STATES

ROWS: tuple[Row, ...] = (
    Row(
        number=1,
        fault="Layer ids in another convention: every state is that of the layer beside it",
        serving="It starts and the text is right. From 0.1 of accept length up to nearly all of it is "
        "lost, the first drafted token as much as the others.",
        planted=(
            Planted(
                how="config.json: the ids are written as the other engine means them; the dump's "
                "capture.json says what was trained on",
                edit=ids([3, 4, 6], [2, 3, 5]),
                name="ids-mean-other-states",
                reads="but the drafter was trained on states 3, 4 and 6",
                also={"specforge": (), "speculators": ("ids-not-those-of-the-data",)},
            ),
        ),
        unseen=(
            Planted(
                how="the same ids, and no dump",
                edit=ids([3, 4, 6], [2, 3, 5]),
                data=None,
            ),
        ),
        cannot="No field of a drafter says which convention its ids are in. Without data=, states= or "
        "trainer= only lists that are somebody's default raise a suspicion "
        "(ids-of-another-convention).",
        instead="`python -m orchestrator layers` tells each reading; job=drafter_test tries them",
    ),
    Row(
        number=2,
        fault="The embedding output is in the window or missing from it: [0,3,4] for [3,4,6]",
        serving="The width is right and nothing fails. The first drafted token is hit hardest: every "
        "block of fc gets a state of another kind.",
        planted=(
            Planted(
                how="dump: the slots hold [embedding, 3, 4, 6], capture.json still says [3, 4, 6, end]",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(window_shifted),
                name="wrong-state",
                reads="declared state 3 (capture.json), but it is the embedding output",
                also=("wrong-teacher",),
            ),
            Planted(
                how="dump: capture.json says that the embedding is there, and it is not",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=captured_states_are(0, 3, 4, LAYERS),
                first_layers=0,
                name="embedding-missing",
                reads="declared state 0 (capture.json), but only 0.0% of its rows are those of the "
                "embedding",
            ),
            Planted(
                how="the dump says honestly that it holds [embedding, 3, 4] and the end; config.json "
                "still names 3, 4 and 6",
                data=captured_states_are(0, 3, 4, LAYERS),
                name="ids-mean-other-states",
                reads="feeds states 3, 4 and 6, but the drafter was trained on states 0, 3 and 4",
                also={"specforge": (), "speculators": ("ids-not-those-of-the-data",)},
            ),
        ),
    ),
    Row(
        number=3,
        fault="A new release reads the same ids otherwise",
        serving="Acceptance changes with an upgrade, and with nothing else.",
        planted=(
            Planted(
                how="the files are sound for SGLang 0.5.12; the engine is 0.5.13 and the target of "
                "DeepSeek's kind",
                layouts=("specforge",),
                only="SGLang does not load it, and vLLM, which does, has not changed the meaning",
                engine=sglang("0.5.13", "kimi_k25"),
                name="ids-mean-other-states",
                reads="sglang 0.5.13, class kimi_k25 feeds states 2, 3 and 5",
            ),
            Planted(
                how="config.json: speculators_version of before 0.5, when its ids were outputs of "
                "layers, and a dump of those states",
                layouts=("speculators",),
                only="it does not say which release wrote it",
                edit=top(speculators_version="0.4.0"),
                data=captured_states_are(4, 5, 7, LAYERS),
                name="ids-mean-other-states",
                reads="but the drafter was trained on states 4, 5 and 7",
            ),
            Planted(
                how="the same list is asked about for both releases",
                by=By.layers,
                layouts=(),
                only="it takes a list, and no files",
                reads="[2,3,5] is [3,4,6] in 0.5.12 and [2,3,5] in 0.5.13",
            ),
        ),
    ),
    Row(
        number=4,
        fault="The engine does not find the ids, and takes its default layers",
        serving="Acceptance is that of the default layers; editing the ids changes nothing.",
        planted=(
            Planted(
                how="config.json: the ids are moved to the place in which the other ecosystem keeps "
                "them",
                edit={
                    "specforge": top(eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
                    "speculators": top(
                        eagle_aux_hidden_state_layer_ids=None,
                        eagle_config={"eagle_aux_hidden_state_layer_ids": list(STATES)},
                    ),
                },
                name="ids-not-looked-up",
                reads="it takes its default states (states 2, 4 and 5)",
            ),
            Planted(
                how="config.json: the ids are taken out",
                edit={
                    "specforge": top(eagle_config=None),
                    "speculators": top(eagle_aux_hidden_state_layer_ids=None),
                },
                name="ids-mean-other-states",
                reads="no ids are found",
            ),
            Planted(
                how='config.json: the ids are text, "2,3,5"',
                edit=ids("2,3,5", "3,4,6"),
                name="ids-no-list",
                reads="not a list of layer ids",
                also=("file-and-config-disagree",),
                refused="must be a list of whole numbers, not ",
            ),
        ),
    ),
    Row(
        number=5,
        fault="The engine sorts the ids, or drops one that stands there twice",
        serving="In another order: acceptance about 0, since each block of fc gets another block's "
        "state. Twice: the server stops at a shape error.",
        planted=(
            Planted(
                how="config.json: the ids in descending order",
                edit=ids([5, 3, 2], [6, 4, 3]),
                name="ids-out-of-order",
                reads="do not ascend",
            ),
            Planted(
                how="config.json: one id stands there twice",
                edit=ids([2, 2, 5], [3, 3, 6]),
                name="ids-not-served",
                reads="a state that is named twice is captured once only",
                also={
                    "specforge": ("ids-mean-other-states",),
                    "speculators": ("ids-mean-other-states", "ids-not-those-of-the-data"),
                },
            ),
            Planted(
                how="dump: two aux slots are exchanged",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(swapped),
                name="wrong-state",
                reads="declared state 3 (capture.json), but it is state 6",
            ),
        ),
    ),
    Row(
        number=6,
        fault="The number of aux states is wrong, or fc is passed over where it is one",
        serving="The server stops at a shape error. With one state as wide as the drafter SGLang "
        "starts and leaves fc out: acceptance about 0.",
        planted=(
            Planted(
                how="config.json: two ids, where fc takes three states",
                edit=ids([2, 3], [3, 4]),
                name="file-and-config-disagree",
                reads="fc.weight is [32, 96], expected [32, 64]: 2 aux states",
                refused="fc.weight is [32, 96], expected [32, 64]: 2 aux states",
                also={
                    "specforge": ("ids-mean-other-states", "data-slots-do-not-fit"),
                    "speculators": (
                        "ids-mean-other-states",
                        "ids-not-those-of-the-data",
                        "data-slots-do-not-fit",
                        "fc-width-not-stated",
                    ),
                },
            ),
            Planted(
                how="one id, a dump of one aux state, and fc.weight cut to one block",
                layouts=("specforge",),
                only="vLLM, which serves it, always applies fc",
                edit=in_turn(ids([5], [6])["specforge"], weights(fc_of_one)),
                data=one_aux,
                name="fc-skipped",
                reads="applies it only where the two differ",
            ),
        ),
    ),
    Row(
        number=7,
        fault="A state on the other side of the target's final norm, or one layer before the end",
        serving="As aux state: the scale of a block is off, at every step. As teacher: see 15.",
        planted=(
            Planted(
                how="dump: the last slot is stored on the other side of the norm",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(other_side),
                name="slot-norm",
                reads="the final norm (divided by its weight",
            ),
            Planted(
                how="dump: an aux slot went through the final norm",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(lambda s: s.put(2, s.target.norm(s.states[6]))),
                name="slot-norm",
                reads="declared state 6, is declared before the target's final norm",
            ),
            Planted(
                how="dump: the last slot holds state 7 of 8",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=earlier_end(7),
                name="wrong-teacher",
                reads="is state 7 and not the target's end (state 8)",
                also=("wrong-state",),
            ),
        ),
    ),
    Row(
        number=8,
        fault="Aux states of one rank, from before an all-reduce, or without the residual",
        serving="Low acceptance at every step; the sizes of the blocks are others than in the dump.",
        planted=(
            Planted(
                how="dump: a slot holds what the layer adds to the stream, not the stream",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(without_residual),
                name="wrong-state",
                reads="it is not the state 4 that the target makes",
            ),
            Planted(
                how="dump: the columns of one rank of two are zero",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(half),
                name="wrong-state",
                reads="it is not the state 4 that the target makes",
            ),
        ),
        unseen=(
            Planted(
                how="dump: a slot without the residual, and no layer of the target is run",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(without_residual),
                first_layers=0,
            ),
        ),
        cannot="Where the target's layers do not fit in memory, no figure of a dump shows it; and what "
        "a running engine feeds stands in no file.",
        instead="the same prompts through one rank and through all of them, states compared",
    ),
    Row(
        number=9,
        fault="Aux states of a quantised or another build of the target",
        serving="A small loss, the same at every step.",
        planted=(
            Planted(
                how="the target's config.json: another quantisation than the dump was captured with",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                target=quantised,
                name="another-target",
                reads="was captured from another target",
                refused="was captured from another target",
            ),
        ),
        unseen=(
            Planted(
                how="dump: the states err by 1 %",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(rounded),
            ),
        ),
        cannot="Without a capture.json nothing tells of which build a state is: it errs by as little as "
        "rounding does. The fingerprint covers the target's config and its embedding, not every weight.",
        instead="accept length behind the engine against job=drafter_test on states of the served build",
    ),
)
