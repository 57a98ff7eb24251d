"""Draft trees, held against examples on paper and against a loop that grows one tree at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3 import chain
from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.errors import BadInput
from eagle3.metrics import (
    Count,
    Truth,
    count_chains,
    judge_chains,
    scored_rows,
    served_walk,
    summarise,
)
from eagle3.model import Drafter, DrafterShape
from eagle3.tree import (
    Ancestry,
    Candidates,
    Trees,
    count_trees,
    draft_trees,
    judge_trees,
    walk_trees,
)
from eagle3.wiring import D2T, DecoderLayer, Token
from tests.eagle3.small import SHAPE, random_drafter

TWO_LAYERS = replace(SHAPE, num_layers=2)


class Bigram:
    """A drafter that looks at the last token only: table [V_d, V_d] of next-token probabilities.

    Target token 10 + i is draft token i.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def inputs(self) -> tuple[Any, Tensor]:
        """Itself and the embedding that goes with it."""
        return self, torch.cat([torch.zeros(10, len(self.table)), torch.eye(len(self.table))])

    def fuse(self, aux: Tensor) -> Tensor:
        return aux

    def feedback(self, y: Tensor) -> Tensor:
        return y

    def step(self, embedded: Tensor, g: Tensor, rows: Tensor, cache: list[Any]) -> Tensor:
        cache.append([(embedded[:, None], embedded[:, None])])
        return embedded

    def logits(self, y: Tensor, head: Tensor | None = None) -> Tensor:
        return (y @ self.table).log()


# From the root 10: level 0 is 11 (.6), 12 (.3); level 1 is 11-13 (.30), 11-10 (.24), 12-10 (.27),
# 12-11 (.021), of which 11-13 and 12-10 go on; level 2 is 11-13-13 (.21), 11-13-12 (.06),
# 12-10-11 (.162), 12-10-12 (.081). The six best are .6 .3 .30 .27 .24 .21.
PAPER = torch.tensor(
    [
        [0.04, 0.6, 0.3, 0.06],
        [0.4, 0.02, 0.08, 0.5],
        [0.9, 0.07, 0.02, 0.01],
        [0.08, 0.02, 0.2, 0.7],
    ]
)


def paper_trees(ids: Tensor, rows: Tensor, *, table: Tensor = PAPER, **sizes: int) -> Trees:
    drafter, embedding = Bigram(table).inputs()
    aux, to_target = torch.zeros(len(ids), 4), torch.arange(10, 14)
    return draft_trees(drafter, embedding, ids, aux, rows, to_target=to_target, **sizes)


def test_the_tree_on_paper() -> None:
    trees = paper_trees(torch.tensor([13, 10]), torch.tensor([0]), steps=3, topk=2, draft_tokens=7)
    assert trees.tokens.tolist() == [[10, 11, 12, 13, 10, 10, 13]]
    assert trees.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 3]]
    assert trees.depth.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    paths = torch.tensor([[11, 13, 13], [11, 13, 12], [12, 10, 11], [12, 11, 13], [13, 13, 13]])
    copies = Trees(
        tokens=trees.tokens.expand(5, -1),
        parents=trees.parents.expand(5, -1),
        depth=trees.depth.expand(5, -1),
        steps=3,
    )
    assert walk_trees(copies, paths).sum(1).tolist() == [3, 2, 2, 1, 0]


def test_the_served_walk_on_paper() -> None:
    # Behind row 0 the tree holds 11-13-13: 3 tokens and the bonus 10. Behind row 4, again from 10,
    # it holds 12-10 but not 13: 2 and the bonus. Row 7 starts from 13, whose tree has no 11: the
    # bonus alone. Row 8 has two tokens of text left, so a tree of three steps is not decided.
    ids = torch.tensor([13, 10, 11, 13, 13, 10, 12, 10, 13, 11, 13, 12])
    mask = torch.ones(len(ids), dtype=torch.bool)
    rows = scored_rows(mask)
    trees = paper_trees(ids, rows, steps=3, topk=2, draft_tokens=7)
    judged = judge_trees(trees, rows, ids, mask, ids, torch.ones(14, dtype=torch.bool))
    gained, whole = 1 + judged.correct.sum(1), judged.decided.all(1)
    assert [int(gained[row]) for row in (0, 4, 7)] == [4, 3, 1]
    assert whole.tolist() == [True] * 8 + [False] * 2
    assert served_walk(rows, gained, whole) == Count(8, 3)
    assert count_trees(judged)["accept_length_tree"] == Count(8, 3)


def random_text(seed: int, shape: DrafterShape, length: int = 14) -> tuple[Tensor, Tensor, Tensor]:
    """ids, aux, and a drafter's embedding."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(shape.vocab, (length,), generator=generator)
    aux = torch.randn(length, shape.num_aux * shape.target_hidden, generator=generator)
    return ids, aux, torch.randn(shape.vocab, shape.hidden, generator=generator)


@dataclass
class Branch:
    """A slot of the beam: what it was fed so far, and where it stands."""

    fed: list[tuple[int, Tensor]]  # tokens and the hidden states beside them
    hidden: Tensor
    score: float
    node: int  # among the candidates; -1 is the root


def plain_tree(
    drafter: Drafter,
    embedding: Tensor,
    to_target: Tensor,
    text: list[tuple[int, Tensor]],
    ancestry: Ancestry,
    *,
    steps: int,
    topk: int,
    draft_tokens: int,
) -> list[tuple[int, int, int]]:
    """One tree: every node is one full causal pass over the text and what the node may see.

    `text` pairs each position's next token with its fused state. Returns (token, parent, depth).
    """

    def state(fed: list[tuple[int, Tensor]]) -> Tensor:
        embedded = torch.stack([embedding[token] for token, _ in fed])[None]
        g = torch.stack([g for _, g in fed])[None]
        return drafter.step(embedded, g, torch.arange(len(fed)), [])[0, -1]

    candidates: list[tuple[float, int, int, int]] = []  # score, token, parent, depth
    beam = [Branch([], state(text), 1.0, -1)]
    for depth in range(1, steps + 1):
        level: list[tuple[float, int, Branch]] = []
        for branch in beam:
            p = drafter.logits(branch.hidden).float().softmax(-1)
            order = sorted(range(len(p)), key=lambda i: (-float(p[i]), i))[:topk]
            level += [(branch.score * float(p[i]), int(to_target[i]), branch) for i in order]
        first = len(candidates)
        candidates += [(score, token, branch.node, depth) for score, token, branch in level]
        best = sorted(range(len(level)), key=lambda i: (-level[i][0], i))[:topk]
        if depth == steps:
            break
        following = []
        for slot, i in enumerate(best):
            score, token, parent = level[i]
            seen = parent.fed if ancestry is Ancestry.path or depth == 1 else beam[slot].fed
            fed = [*seen, (token, drafter.feedback(parent.hidden))]
            following.append(Branch(fed, state(text + fed), score, first + i))
        beam = following
    kept = sorted(
        sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], i))[: draft_tokens - 1]
    )
    place = {-1: 0} | {candidate: 1 + n for n, candidate in enumerate(kept)}
    root = (text[-1][0], -1, 0)
    return [root, *((candidates[i][1], place[candidates[i][2]], candidates[i][3]) for i in kept)]


@pytest.mark.parametrize("ancestry", Ancestry)
@pytest.mark.parametrize(
    ("shape", "seed", "rows_at_once", "sizes"),
    [
        (SHAPE, 0, 512, {"steps": 4, "topk": 3, "draft_tokens": 12}),
        (SHAPE, 1, 4, {"steps": 5, "topk": 2, "draft_tokens": 6}),
        (SHAPE, 2, 7, {"steps": 3, "topk": 4, "draft_tokens": 37}),
        (SHAPE, 3, 512, {"steps": 1, "topk": 5, "draft_tokens": 4}),
        (TWO_LAYERS, 4, 512, {"steps": 4, "topk": 3, "draft_tokens": 16}),
        (
            replace(TWO_LAYERS, windows=(2, 5)),
            6,
            512,
            {"steps": 4, "topk": 3, "draft_tokens": 16},
        ),
        (
            replace(SHAPE, interleaved=True, hidden_first=True),
            7,
            5,
            {"steps": 4, "topk": 3, "draft_tokens": 12},
        ),
        (
            replace(SHAPE, kv_heads=6, feedback_normed=True),
            5,
            2,
            {"steps": 4, "topk": 4, "draft_tokens": 16},
        ),
    ],
)
def test_trees_of_all_rows_equal_a_loop_without_caches(
    shape: DrafterShape,
    seed: int,
    rows_at_once: int,
    sizes: dict[str, int],
    ancestry: Ancestry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain, "ROWS_AT_ONCE", rows_at_once)
    drafter = random_drafter(seed, shape)
    ids, aux, embedding = random_text(seed, shape)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, shape.vocab)
    rows = torch.tensor([0, 2, 3, 4, 7, 8, 12])
    trees = draft_trees(
        drafter, embedding, ids, aux, rows, to_target=to_target, ancestry=ancestry, **sizes
    )
    g = drafter.fuse(aux)
    for row, t in enumerate(rows.tolist()):
        text = [(int(ids[i + 1]), g[i]) for i in range(t + 1)]
        plain = plain_tree(drafter, embedding, to_target, text, ancestry, **sizes)
        drafted = torch.stack([trees.tokens[row], trees.parents[row], trees.depth[row]], 1)
        assert [tuple(node) for node in drafted.tolist()] == plain, f"row {t}"


@pytest.mark.parametrize("token", Token)
def test_another_token_beside_the_states_is_that_of_a_shifted_text(token: Token) -> None:
    """The root, which the target wrote, stays the token behind the row."""
    drafter = random_drafter(7)
    ids, aux, embedding = random_text(7, SHAPE)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.arange(2, 12)
    given: dict[str, Any] = {"steps": 3, "topk": 3, "draft_tokens": 8, "to_target": to_target}
    trees = draft_trees(drafter, embedding, ids, aux, rows, token=token, **given)
    beside = {Token.same: torch.cat([ids[:1], ids]), Token.next: ids, Token.after_next: ids[1:]}
    shifted = draft_trees(drafter, embedding, beside[token], aux, rows, **given)
    assert torch.equal(trees.tokens[:, 1:], shifted.tokens[:, 1:])
    assert torch.equal(trees.parents, shifted.parents)
    assert torch.equal(trees.tokens[:, 0], ids[rows + 1])


@pytest.mark.parametrize(("steps", "same"), [(2, True), (3, False)])
def test_the_two_ancestries_part_where_a_branch_left_its_slot(steps: int, same: bool) -> None:
    """From the third level on; the first two are drafted behind the text and in the first slots."""
    drafter = random_drafter(0)
    ids, aux, embedding = random_text(0, SHAPE)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    by_slot, by_path = (
        draft_trees(
            drafter,
            embedding,
            ids,
            aux,
            torch.arange(12),
            steps=steps,
            topk=3,
            draft_tokens=12,
            to_target=to_target,
            ancestry=ancestry,
        )
        for ancestry in (Ancestry.slot, Ancestry.path)
    )
    assert torch.equal(by_slot.tokens, by_path.tokens) == same


@pytest.mark.parametrize("layer", DecoderLayer)
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_tree_of_one_branch_is_the_chain(
    steps: int, with_head: bool, layer: DecoderLayer
) -> None:
    totals: dict[str, int] = {}
    for seed in range(4):
        drafter = random_drafter(seed)
        ids, aux, embedding = random_text(seed, SHAPE, length=40)
        to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
        head = torch.randn_like(drafter.lm_head.weight) if with_head else None
        mask = torch.arange(40) > 4
        rows = scored_rows(mask)
        common: dict[str, Any] = {
            "steps": steps,
            "to_target": to_target,
            "head": head,
            "decoder_layer": layer,
        }
        chains = draft_chains(drafter, embedding, ids, aux, rows, **common)
        trees = draft_trees(
            drafter, embedding, ids, aux, rows, topk=1, draft_tokens=steps + 1, **common
        )
        assert torch.equal(trees.tokens[:, 1:], chains)
        assert torch.equal(trees.tokens[:, 0], ids[rows + 1])
        assert torch.equal(trees.parents, torch.arange(-1, steps).expand(len(rows), -1))
        # A text that holds 0 to `steps` tokens of every fifth chain, and leaves the truth twice.
        wanted = ids.clone()
        for row in range(0, len(rows) - 5, 5):
            held = (row // 5 + seed) % (steps + 1)
            wanted[rows[row] + 2 : rows[row] + 2 + held] = chains[row, :held]
        truth = wanted.clone()
        truth[[13, 29]] += 1 - 2 * (truth[[13, 29]] > 0).long()
        a = judge_chains(chains, rows, wanted, mask, truth, drafter.t2d)
        b = judge_trees(trees, rows, wanted, mask, truth, drafter.t2d)
        assert torch.equal(a.decided, b.decided)
        assert torch.equal(a.in_vocab, b.in_vocab)
        assert torch.equal(a.correct.long().cumprod(1).bool(), b.correct)
        of_chains, of_trees = count_chains(a), count_trees(b)
        for name, count in of_trees.items():
            twin = name.replace("/tree_", "/").replace("accept_length_tree", "accept_length")
            assert count == of_chains[twin], name
            totals[name] = totals.get(name, 0) + count.numerator
    assert totals[f"step_accuracy/tree_cumulative@{steps - 1}"] > 0


def test_equal_scores_go_by_draft_id_and_to_parents_before_children() -> None:
    ids, rows = torch.tensor([13, 10]), torch.tensor([0])
    uniform = torch.full((4, 4), 0.25)
    trees = paper_trees(ids, rows, table=uniform, steps=3, topk=2, draft_tokens=5)
    assert trees.tokens.tolist() == [[10, 10, 11, 10, 11]]
    assert trees.parents.tolist() == [[-1, 0, 0, 1, 1]]
    certain = torch.eye(4) * (1 - 4e-30) + 1e-30  # three candidates of score 1, for two places
    trees = paper_trees(ids, rows, table=certain, steps=3, topk=2, draft_tokens=3)
    assert trees.tokens.tolist() == [[10, 10, 10]]
    assert trees.parents.tolist() == [[-1, 0, 1]]


CYCLE = torch.tensor([10, 11, 12, 13] * 6)


@pytest.mark.parametrize(("shift", "length"), [(1, 4.0), (2, 1.0)])
def test_a_perfect_drafter_reaches_the_ceiling_and_a_dead_one_the_floor(
    shift: int, length: float
) -> None:
    # Certain of its token, so that scores are 1 and 0 and equal all over the tree.
    table = torch.eye(4).roll(shift, 1) * (1 - 4e-30) + 1e-30
    mask = torch.ones(len(CYCLE), dtype=torch.bool)
    rows = scored_rows(mask)
    trees = paper_trees(CYCLE, rows, table=table, steps=3, topk=2, draft_tokens=4)
    assert torch.equal(trees.parents, torch.tensor([-1, 0, 1, 2]).expand(len(rows), -1))
    judged = judge_trees(trees, rows, CYCLE, mask, CYCLE, torch.ones(14, dtype=torch.bool))
    metrics, curves, notes = summarise([count_trees(judged)] * 2, Truth.next_token, 3)
    assert metrics["accept_length_tree"].value == length
    assert metrics["accept_length_tree_uniform"].value == length
    assert (metrics["accept_length_tree"].low == 1.0) == (length == 1.0)
    # Conditional figures of a dead drafter's deeper steps have no position at all.
    assert curves["step_accuracy/tree_cumulative"][-1][1].value == (length - 1) / 3
    assert len(notes) == (0 if length > 1 else 2)


def followed(tokens: list[int], parents: list[int], truths: list[int]) -> int:
    """How many tokens a target accepts, one node at a time."""
    node = taken = 0
    for truth in truths:
        children = [n for n, p in enumerate(parents) if p == node and tokens[n] == truth]
        if not children:
            break
        node, taken = children[0], taken + 1
    return taken


def test_the_walk_takes_the_first_of_equal_children() -> None:
    # Both children of the root say 5; only the second has the child 6.
    trees = Trees(
        tokens=torch.tensor([[1, 5, 5, 6]]),
        parents=torch.tensor([[-1, 0, 0, 2]]),
        depth=torch.tensor([[0, 1, 1, 2]]),
        steps=2,
    )
    assert walk_trees(trees, torch.tensor([[5, 6]])).tolist() == [[True, False]]


def test_walks_of_many_trees_equal_one_step_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    nodes, steps, count = 12, 4, 300
    parents = torch.cat(
        [torch.full((count, 1), -1)]
        + [torch.randint(-1, n, (count, 1), generator=generator) for n in range(1, nodes)],
        1,
    )
    tokens = torch.randint(3, (count, nodes), generator=generator)
    truths = torch.randint(3, (count, steps), generator=generator)
    trees = Trees(tokens=tokens, parents=parents, depth=torch.zeros_like(tokens), steps=steps)
    accepted = walk_trees(trees, truths)
    assert accepted.long().cumprod(1).equal(accepted.long())
    expected = [
        followed(*each)
        for each in zip(tokens.tolist(), parents.tolist(), truths.tolist(), strict=True)
    ]
    assert accepted.sum(1).tolist() == expected
    assert set(expected) == set(range(steps + 1))


def test_a_node_whose_parent_was_not_kept_hangs_nowhere() -> None:
    """Only a score that is no number is above its parent's; the node must not go to another."""
    level = torch.tensor([[0.5, 0.2]])
    candidates = Candidates([], [], [])
    candidates.add(torch.tensor([[3, 4]]), level, torch.tensor([[-1, -1]]))
    deeper = torch.tensor([[0.4, 0.3, float("nan"), 0.1]])
    candidates.add(torch.tensor([[5, 6, 7, 8]]), deeper, torch.tensor([[0, 0, 1, 1]]))
    tokens, parents, depth = candidates.best(torch.tensor([9]), 4)
    assert tokens.tolist() == [[9, 3, 5, 7]]
    assert parents.tolist() == [[-1, 0, 1, -1]]
    assert depth.tolist() == [[0, 1, 2, 2]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 0, 4), "at least 1"),
        ((0, 1, 4), "at least 1"),
        ((3, 2, 1), "draft_tokens of at least 2"),
        ((3, 5, 4), "topk of 5 is more than the draft vocabulary's 4 tokens"),
        ((3, 1, 6), "SGLang sets draft_tokens to steps \\+ 1; write 4 instead of 6"),
        ((3, 2, 12), "draft_tokens of 12 is more than the 11 that steps=3 and topk=2 can give"),
    ],
)
def test_sizes_that_no_tree_has_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    steps, topk, draft_tokens = sizes
    with pytest.raises(BadInput, match=message):
        paper_trees(
            torch.tensor([13, 10]),
            torch.tensor([0]),
            steps=steps,
            topk=topk,
            draft_tokens=draft_tokens,
        )


def test_the_greatest_possible_tree_holds_every_candidate() -> None:
    trees = paper_trees(torch.tensor([13, 10]), torch.tensor([0]), steps=3, topk=2, draft_tokens=11)
    assert trees.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3, 3, 5, 5]]
