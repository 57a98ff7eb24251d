"""The draft's tree, and which of it the target agrees with.

A request's tree has n nodes. Node 0 is the last accepted token, the others are drafted tokens in the
order in which they were proposed, so that a parent stands before its children. The tree is given to
verification as links: a node's first child, and the next child of the same parent; -1 is none.
"""

from __future__ import annotations

from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def parents_of(parent_list: list[int], selected: list[int], topk: int) -> list[int | None]:
    """The parent of each of the nodes 1..n-1; None where it is not in the tree.

    All proposals of a request are counted through: the first topk hang on the root, and from there on
    each topk on one that went on, which `parent_list` names, from place 1. `selected` are those that
    became nodes.
    """
    node = {proposal: i for i, proposal in enumerate(selected, 1)}
    return [
        node.get(parent_list[proposal // topk]) if proposal >= topk else 0 for proposal in selected
    ]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    tree_mask_mode: int,
) -> None:
    """Fills mask, positions and links; the links hold -1 and the mask True when they come."""
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError("the stand-in for sgl_kernel has no packed tree masks")
    at = 0  # in the mask
    for b, length in enumerate(seq_lens.tolist()):
        prefix = length if tree_mask_mode == FULL_MASK else 0
        size = num_nodes * (prefix + num_nodes)
        seen = tree_mask[at : at + size].view(num_nodes, -1)[:, prefix:]
        at += size
        seen.fill_(False)
        seen.fill_diagonal_(True)
        positions[b * num_nodes] = length
        last_child: dict[int, int] = {}
        parents = parents_of(parent_list[b].tolist(), selected_index[b].tolist(), topk)
        for i, parent in enumerate(parents, 1):
            if parent is None:  # it can be neither reached nor accepted
                positions[b * num_nodes + i] = length
                continue
            seen[i] |= seen[parent]
            positions[b * num_nodes + i] = positions[b * num_nodes + parent] + 1
            if parent in last_child:
                retrieve_next_sibling[b, last_child[parent]] = i
            else:
                retrieve_next_token[b, parent] = i
            last_child[parent] = i
        for i in range(num_nodes):
            retrieve_index[b, i] = b * num_nodes + i


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks from the root to the child that the target says, as far as there is one.

    `accept_index` gets the places of the nodes walked over, the root's first, `accept_token_num` how
    many there are behind it, and `predicts`, at each of these places, what the target says there.
    """
    tables = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    for b in range(len(candidates)):
        tokens, places, children, siblings, said = (table[b].tolist() for table in tables)
        node, walked = 0, [0]
        while len(walked) < accept_index.shape[1]:
            child = children[node]
            while child != -1 and tokens[child] != said[node]:
                child = siblings[child]
            if child == -1:
                break
            node = child
            walked.append(node)
        for i, node in enumerate(walked):
            accept_index[b, i] = places[node]
            predicts[places[node]] = said[node]
        accept_token_num[b] = len(walked) - 1
