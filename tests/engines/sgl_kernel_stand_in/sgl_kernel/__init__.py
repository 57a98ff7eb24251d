"""A stand-in for SGLang's kernels on a CPU, in plain PyTorch. For tests, and for nothing else.

The usual index has no CPU build of `sgl_kernel`. With this module in its place SGLang 0.5.23's own
server, scheduler, EAGLE worker, cache and metrics run on any CPU. It is written from how SGLang calls
each name, and has the names that a Llama target with an EAGLE-3 drafter comes to, in a chain or a
tree; what else a call may ask for is refused. What runs on it is no evidence about SGLang's real
kernels, and none about speed.

    operators   what a layer computes, under torch.ops.sgl_kernel
    attention   over the cache, under torch.ops.sgl_kernel
    slots       which slot of the cache a token lies in
    tree        the draft's tree, and which of it the target agrees with
"""

from __future__ import annotations

import torch

from sgl_kernel import attention, operators
from sgl_kernel.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "attention",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "operators",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def has_amx() -> bool:
    """SGLang takes the kernels that stand here only where it believes that the CPU has AMX."""
    return True


torch.cpu._is_amx_tile_supported = has_amx

# torchvision's CUDA build does not load its library, and then misses the schemas that it describes.
TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
