"""Draft trees against SGLang's own functions, taken from the source of its wheel.

Its modules import GPU kernels, so the functions are compiled alone. The tree's links and the greedy
verification are GPU kernels of scalar code; they run here over a stand-in for Triton's language.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.chain import draft_to_target_ids
from eagle3.tree import Candidates, draft_trees, judge_trees, most_probable
from eagle3.wiring import D2T
from tests.eagle3.small import SHAPE, random_drafter

LENGTH = 20  # of a text


class Pointer:
    """Triton's pointer into a tensor."""

    def __init__(self, tensor: Tensor, offset: int = 0) -> None:
        self.tensor, self.offset = tensor.view(-1), offset

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + int(by))

    def __sub__(self, by: Any) -> Pointer:
        return self + -by


class Triton:
    """The few words of triton.language that these kernels use, for one program at a time."""

    constexpr = int
    program = 0

    def program_id(self, axis: int) -> int:
        return self.program

    def cast(self, value: Any, dtype: Any) -> Tensor:
        return torch.as_tensor(value, dtype=dtype)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = None) -> Any:
        return pointer.tensor[pointer.offset].clone() if mask else other

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        if mask:
            pointer.tensor[pointer.offset] = value


def functions(path: Path, names: set[str], **known: Any) -> dict[str, Any]:
    """Functions of a source file without its imports and decorators, over the `known` names."""
    found = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert {node.name for node in found} == names, f"{path} has others: {[n.name for n in found]}"
    for node in found:
        node.decorator_list = []
    annotations = ast.parse("from __future__ import annotations").body
    scope: dict[str, Any] = {"torch": torch, **known}
    exec(compile(ast.Module([*annotations, *found], []), str(path), "exec"), scope)
    return scope


@pytest.fixture(scope="module")
def sglang(peers_sglang_source: Path) -> SimpleNamespace:
    root = peers_sglang_source / "sglang"
    speculative = root / "srt" / "speculative"
    topk = functions(root / "srt" / "utils" / "common.py", {"fast_topk"})["fast_topk"]
    select = functions(
        speculative / "spec_utils.py",
        {"_select_top_k_tokens_first", "_select_top_k_tokens_later", "select_top_k_tokens"},
        fast_topk=topk,
    )["select_top_k_tokens"]
    organize = functions(
        speculative / "eagle_utils.py",
        {"organize_draft_results"},
        maybe_detect_oob=lambda *_: None,
    )["organize_draft_results"]
    triton = Triton()
    kernels = functions(
        root / "kernels" / "ops" / "speculative" / "spec_tree.py",
        {"sgl_build_tree_kernel_efficient_triton", "verify_tree_greedy_kernel_triton"},
        tl=triton,
    )
    return SimpleNamespace(
        fast_topk=topk,
        select=select,
        organize=organize,
        triton=triton,
        build=kernels["sgl_build_tree_kernel_efficient_triton"],
        verify=kernels["verify_tree_greedy_kernel_triton"],
    )


def links(
    sglang: SimpleNamespace, parents: Tensor, chosen: Tensor, *, topk: int, steps: int, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What SGLang makes of a selection: depth, index, first child and next sibling, each [R, N]."""
    count = len(chosen)
    mask = torch.ones(count * nodes * nodes, dtype=torch.bool)
    depth = torch.empty(count, nodes, dtype=torch.long)
    index, child, sibling = torch.full((3, count, nodes), -1)
    lengths = torch.zeros(count, dtype=torch.long)
    for sglang.triton.program in range(count):
        sglang.build(
            *map(Pointer, (parents.contiguous(), chosen, lengths, lengths, mask, depth, index)),
            Pointer(child),
            Pointer(sibling),
            topk,
            steps,
            nodes,
            tree_mask_mode=1,
            batch_size=count,
            parent_list_stride=parents.shape[1],
            selected_index_stride=chosen.shape[1],
        )
    return depth, index, child, sibling


def parents_of(child: Tensor, sibling: Tensor) -> list[list[int]]:
    """Each node's parent from first children and next siblings; siblings come in rising order."""
    trees = []
    for children, siblings in zip(child.tolist(), sibling.tolist(), strict=True):
        parents = [-1] * len(children)
        for node, following in enumerate(children):
            met = []
            while following != -1:
                parents[following] = node
                met.append(following)
                following = siblings[following]
            assert met == sorted(met)
        trees.append(parents)
    return trees


@pytest.mark.parametrize("unlinked", [False, True])
@pytest.mark.parametrize(
    ("steps", "topk", "nodes"), [(1, 4, 4), (3, 2, 7), (4, 4, 16), (5, 8, 64), (3, 3, 22)]
)
def test_selection_of_random_probabilities_is_sglangs(
    sglang: SimpleNamespace, steps: int, topk: int, nodes: int, unlinked: bool
) -> None:
    """Both pick from the same random tables: which nodes, in which order, under which parents.

    `unlinked`: scores that rise with the depth, as no probability does, so that parents are lost.
    """
    generator = torch.Generator().manual_seed(steps * topk)
    count, vocab = 20, 50
    scores = beams = None
    lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    ours = Candidates([], [], [])
    for level in range(steps):
        fed = count if level == 0 else count * topk
        p, token = most_probable(torch.randn(fed, vocab, generator=generator) * 2, topk)
        p = p * 5 if unlinked else p
        before = beams
        _, _, scores, info = sglang.select(level, p, token, torch.empty(0), scores, topk)
        for collected, each in zip(lists, info, strict=True):
            collected.append(each)
        beams = info[2] if level else info[2][:, 1:]
        roots = torch.full((count, 1), -1)
        ours.add(
            token.view(count, -1),
            info[0].flatten(1),
            (roots if before is None else before).repeat_interleave(topk, 1),
        )
    parents, chosen, tokens = sglang.organize(*lists, nodes)
    depth, _, child, sibling = links(
        sglang, parents.long(), chosen, topk=topk, steps=steps, nodes=nodes
    )
    found = ours.best(torch.zeros(count, dtype=torch.long), nodes)
    assert torch.equal(found[0][:, 1:], tokens)
    theirs = parents_of(child, sibling)
    assert found[1].tolist() == theirs
    lost = sum(parent == -1 for tree in theirs for parent in tree[1:])
    assert (lost > 0) == (unlinked and steps > 1 and nodes < 1 + topk + (steps - 1) * topk**2)
    if not lost:
        assert torch.equal(found[2], depth)


@pytest.mark.parametrize(
    ("seed", "layers", "steps", "topk", "nodes"),
    [(0, 1, 4, 4, 16), (1, 1, 3, 2, 6), (2, 2, 5, 3, 12), (3, 1, 2, 8, 32), (4, 2, 4, 4, 16)],
)
def test_drafting_and_verifying_as_sglang_does(
    sglang: SimpleNamespace, seed: int, layers: int, steps: int, topk: int, nodes: int
) -> None:
    """Its loop of drafting, one text at a time, with its cache of slots, down to what is accepted."""
    drafter = random_drafter(seed, replace(SHAPE, num_layers=layers))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SHAPE.vocab, (LENGTH,), generator=generator)
    aux = torch.randn(LENGTH, SHAPE.num_aux * SHAPE.target_hidden, generator=generator)
    embedding = torch.randn(SHAPE.vocab, SHAPE.hidden, generator=generator)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.arange(9)
    trees = draft_trees(
        drafter,
        embedding,
        ids,
        aux,
        rows,
        steps=steps,
        topk=topk,
        draft_tokens=nodes,
        to_target=to_target,
    )
    for t in rows.tolist():
        cache: list[Any] = []
        text = torch.arange(t + 1)
        g = drafter.fuse(aux[: t + 1])[None]
        hidden = drafter.step(embedding[ids[1 : t + 2]][None], g, text, cache)[0, -1:]
        scores, lists = None, ([], [], [])
        for level in range(steps):
            p, token = sglang.fast_topk(drafter.logits(hidden).softmax(-1), topk, dim=-1)
            fed, hidden, scores, info = sglang.select(
                level, p, to_target[token], hidden, scores, topk
            )
            for collected, each in zip(lists, info, strict=True):
                collected.append(each)
            if level == steps - 1:
                break
            slots, fed_back = torch.full((topk,), t), drafter.feedback(hidden)[None]
            hidden = drafter.step(embedding[fed][None], fed_back, slots, cache)[0]
        parents, chosen, tokens = sglang.organize(*lists, nodes)
        depth, index, child, sibling = links(
            sglang, parents.long(), chosen, topk=topk, steps=steps, nodes=nodes
        )
        assert trees.tokens[t].tolist() == [int(ids[t + 1]), *tokens[0].tolist()]
        assert trees.parents[t].tolist() == parents_of(child, sibling)[0]
        assert trees.depth[t].tolist() == depth[0].tolist()

        # Every path of the tree, and one that leaves it, as what the target wants.
        mask, seen = torch.ones(LENGTH, dtype=torch.bool), set()
        for node in range(nodes):
            path, above = [], node
            while above > 0:
                path.insert(0, int(trees.tokens[t, above]))
                above = int(trees.parents[t, above])
            wanted = ids.clone()
            wanted[t + 2 : t + 2 + len(path)] = torch.tensor(path, dtype=torch.long)
            truths = wanted[t + 2 : t + 2 + steps + 1]
            row = rows[t : t + 1]
            one = replace(
                trees,
                tokens=trees.tokens[t : t + 1],
                parents=trees.parents[t : t + 1],
                depth=trees.depth[t : t + 1],
            )
            judged = judge_trees(one, row, wanted, mask, wanted, drafter.t2d)
            predicted, accepted = torch.empty(nodes, dtype=torch.long), torch.zeros(1).long()
            sglang.triton.program = 0
            sglang.verify(
                Pointer(predicted),
                Pointer(torch.empty(1, steps + 1, dtype=torch.long)),
                Pointer(accepted),
                Pointer(trees.tokens[t].contiguous()),
                *map(Pointer, (index, child, sibling)),
                Pointer(truths[depth[0]].contiguous()),
                batch_size=1,
                num_speculative_tokens=steps + 1,
                num_draft_tokens=nodes,
            )
            assert int(judged.correct.sum()) == int(accepted), f"node {node}"
            seen.add(int(accepted))
        assert max(seen) == int(trees.depth[t].max())
