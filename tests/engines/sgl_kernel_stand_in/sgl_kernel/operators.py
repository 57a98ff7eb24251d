"""What a layer computes, as torch.ops.sgl_kernel.*."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("sgl_kernel", "DEF")


def operator(schema: str, function: object) -> None:
    """torch.ops.sgl_kernel has the function behind its schema."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Both in place: the residual takes x in, x becomes its norm."""
    residual += x
    x.copy_(normed(residual, weight, eps))


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """The cache has a row a position: the cosines of all pairs, then their sines."""
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        heads = x.reshape(len(cos), -1, head_size)
        of_pairs, rest = heads.split((2 * cos.shape[-1], head_size - 2 * cos.shape[-1]), -1)
        if is_neox:
            a, b = of_pairs.chunk(2, -1)
            of_pairs = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = of_pairs[..., ::2], of_pairs[..., 1::2]
            of_pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((of_pairs, rest), -1).view(x.shape)

    return turned(query), turned(key)


def store_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, indices: Tensor, row_dim: int
) -> None:
    rows = indices.long()
    k_cache[rows] = k.reshape(-1, *k_cache.shape[1:]).to(k_cache.dtype)
    v_cache[rows] = v.reshape(-1, *v_cache.shape[1:]).to(v_cache.dtype)


def convert_weight_packed(weight: Tensor) -> Tensor:
    """Only this module reads packed weights, so they stay as they are."""
    return weight.clone()


def weight_packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_vnni: bool) -> Tensor:
    return F.linear(x, weight, bias)


def init_cpu_threads_env(cpu_ids: str) -> str:
    """Threads stay where the operating system puts them: tests share the cores."""
    return cpu_ids


def initialize(size: int, rank: int) -> None:
    """Makes ready for shared memory between ranks; there is one."""
    if size != 1:
        raise NotImplementedError("the stand-in for sgl_kernel has no tensor parallelism")


operator("rmsnorm_cpu(Tensor x, Tensor weight, float eps) -> Tensor", normed)
operator(
    "fused_add_rmsnorm_cpu(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()",
    fused_add_rmsnorm,
)
operator("silu_and_mul_cpu(Tensor x) -> Tensor", silu_and_mul)
operator(
    "rotary_embedding_cpu(Tensor positions, Tensor query, Tensor key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox) -> (Tensor, Tensor)",
    rotary_embedding,
)
operator(
    "store_cache_cpu(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, "
    "int row_dim) -> ()",
    store_cache,
)
operator("convert_weight_packed(Tensor weight) -> Tensor", convert_weight_packed)
operator(
    "weight_packed_linear(Tensor x, Tensor weight, Tensor? bias, bool is_vnni) -> Tensor",
    weight_packed_linear,
)
operator("init_cpu_threads_env(str cpu_ids) -> str", init_cpu_threads_env)
operator("initialize(int size, int rank) -> ()", initialize)

# SGLang takes hold of these when it is imported; only models with images or sound call them.
for name in ("apply_rotary_pos_emb_cpu", "conv3d_embed_cpu", "flash_attn_varlen_func"):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
