"""Which slot of the cache a token lies in.

Row r of req_to_token [requests, pool_len] has the slots of the tokens of a request. What a function
fills is one of its arguments.
"""

from __future__ import annotations

import ctypes

from torch import Tensor


def spans(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    """(row, first, behind the last) of each request, as numbers."""
    columns = (req_pool_indices.tolist(), start.tolist(), end.tolist())
    return list(zip(*columns, strict=True))


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The new slots, request by request, go into the table at each request's span."""
    at = 0
    for row, start, end in spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The other way round: each request's span of the table, one behind the other."""
    at = 0
    for row, start, end in spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end]
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The topk · num_steps slots that lie behind each request's tokens."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A table with a row a branch: the request's tokens, then the branch's own num_steps slots.

    Behind a request's tokens the branches' slots lie one after the other.
    """
    table = req_to_token[req_pool_indices.long()].repeat_interleave(topk, 0)
    for i, length in enumerate(seq_lens.tolist()):
        own = table[i * topk, length : length + topk * num_steps].clone().view(topk, num_steps)
        table[i * topk : (i + 1) * topk, length : length + num_steps] = own
    return table


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request, which has `accept_stride` places."""
    last = accept_lens.long() - 1
    rows = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, last[:, None])[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The slots of all accepted tokens, one behind the other; -1 is a place without one."""
    accepted = accept_index.flatten().long()
    slots = out_cache_loc[accepted[accepted > -1]]
    accept_out_cache_loc[: len(slots)] = slots


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Each request's tokens move one to the front; the new one goes to the end or where it is told."""
    new_tokens = topk_index.flatten()
    spans_of = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for i, (start, length) in enumerate(spans_of):
        if not length:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        input_ids[end - 1 if select_index is None else int(select_index[i])] = new_tokens[i]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """In each buffer, given by address and bytes a slot, slots are copied; all are read before one
    is written, since targets may be sources.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, content in zip(targets, held, strict=True):
            ctypes.memmove(address + slot * size, content, size)
