"""Attention over the cache, as torch.ops.sgl_kernel.*.

The cache of a layer is k_buffer and v_buffer [slots, kv_heads, d]; row r of req_to_token has the slots
of the tokens of a request, in their order. Lengths count the tokens that are being computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel.operators import operator, store_cache


def refuse(logit_cap: float, cross: bool, sinks: Tensor | None, *scales: float) -> None:
    """Raises where a call asks for what no model of the tests has."""
    if logit_cap or cross or sinks is not None or any(scale != 1 for scale in scales):
        raise NotImplementedError(
            "the stand-in for sgl_kernel has no capped, cross, sink or scaled attention"
        )


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [T, heads, d] over k and v [S, kv_heads, d] where `seen` [T, S] → [T, heads, d]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1).float() for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


def in_window(rows: Tensor, columns: Tensor, window: int) -> Tensor:
    """Which columns each row may look back to; a window counts the row itself, 0 is none."""
    seen = columns <= rows[:, None]
    return seen & (columns > rows[:, None] - window) if window else seen


def decode_attention(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor | None,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One token a request; its own key and value, where given, are put into the cache first."""
    refuse(logit_cap, cross, sinks, k_scale, v_scale)
    if key is not None and value is not None and loc is not None:
        store_cache(key, value, k_buffer, v_buffer, loc, 0)
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for i, (row, length) in enumerate(rows):
        slots = req_to_token[row, :length].long()
        seen = in_window(torch.tensor([length - 1]), torch.arange(length), window)
        output[i] = attend(query[i : i + 1], k_buffer[slots], v_buffer[slots], seen, scale)[0]


def extend_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The last tokens of each request, over its prefix in the cache and over each other.

    `tree_mask` says for each of them which it sees, request by request: of the new tokens alone
    (QLEN_ONLY), or of the prefix too (FULL_MASK); which of the two its length tells.
    """
    refuse(logit_cap, cross, sinks, k_scale, v_scale)
    if not is_causal or (tree_mask is not None and window):
        raise NotImplementedError(
            "the stand-in for sgl_kernel has neither bidirectional attention nor windows over trees"
        )
    new_lengths = extend_seq_lens.tolist()
    of_new_alone = tree_mask is not None and len(tree_mask) == sum(n * n for n in new_lengths)
    starts, of_requests = extend_start_loc.tolist(), req_pool_indices.tolist()
    at = 0  # in the mask
    for row, start, new, length in zip(
        of_requests, starts, new_lengths, seq_lens.tolist(), strict=True
    ):
        prefix = length - new
        slots = req_to_token[row, :prefix].long()
        k = torch.cat((k_buffer[slots], key[start : start + new].to(k_buffer.dtype)))
        v = torch.cat((v_buffer[slots], value[start : start + new].to(v_buffer.dtype)))
        if tree_mask is None:
            seen = in_window(torch.arange(prefix, length), torch.arange(length), window)
        elif of_new_alone:
            mask = tree_mask[at : at + new * new].view(new, new).bool()
            seen = torch.cat((torch.ones(new, prefix, dtype=torch.bool), mask), 1)
            at += new * new
        else:
            seen = tree_mask[at : at + new * length].view(new, length).bool()
            at += new * length
        output[start : start + new] = attend(query[start : start + new], k, v, seen, scale)


operator(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, "
    "float v_scale, Tensor(c!) output, Tensor? key, Tensor? value, Tensor? loc, Tensor attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float scale, float logit_cap, "
    "bool cross, int window, Tensor? encoder_lens, Tensor? sinks) -> ()",
    decode_attention,
)
operator(
    "extend_attention_cpu(Tensor query, Tensor key, Tensor value, Tensor(a!) output, "
    "Tensor k_buffer, Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "int max_extend_len, float scale, float logit_cap, bool cross, int window, "
    "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()",
    extend_attention,
)
