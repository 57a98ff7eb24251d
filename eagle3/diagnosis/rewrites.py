"""Python programs that rewrite a drafter's tensors so that every engine computes what was trained.

Each is whole and needs torch and safetensors alone: it reads the folder's safetensors, changes what it
says it changes and writes the files in place, with their number types and metadata kept. It is to be
run on a copy. No torch here: these are texts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

BEGIN = """\
# {what}
# python this.py DRAFTER{more}, on a copy of the drafter: its files are written over
import json
import os
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

files = {{}}
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, "pt") as file:
        files[path] = {{name: file.get_tensor(name) for name in file.keys()}}, file.metadata()
if not files:
    sys.exit(f"{{sys.argv[1]}} holds no *.safetensors")
t = {{name: tensor for held, _ in files.values() for name, tensor in held.items()}}
block = "layers.0." if "layers.0.self_attn.q_proj.weight" in t else "midlayer."
new = {{}}  # by name; None: left out

"""
END = """\

where = {}
for path, (held, metadata) in files.items():
    held = {name: new.pop(name, tensor) for name, tensor in held.items()}
    if path == list(files)[-1]:
        held |= new  # names that no file had
    held = {name: tensor.contiguous() for name, tensor in held.items() if tensor is not None}
    where |= {name: path.name for name in held}
    save_file(held, path.with_suffix(".new"), metadata)
    os.replace(path.with_suffix(".new"), path)
index = Path(sys.argv[1]) / "model.safetensors.index.json"
if index.exists():
    index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": where}))
"""


def program(what: str, body: str, more: str = "") -> str:
    """A whole program around what it does to `t`, the tensors by name, into `new`."""
    return BEGIN.format(what=what, more=more) + textwrap.dedent(body).strip("\n") + "\n" + END


def ascending_chunks(states: Sequence[int]) -> str:
    """fc's chunks, and the norms in front of them, in ascending order of their states."""
    order = sorted(range(len(states)), key=lambda i: states[i])
    return program(
        f"fc's chunks are of the states {list(states)}: put them in ascending order, as engines have it",
        f"""
        order = {order}  # new chunk i is the old chunk order[i]


        def chunks(x):
            return torch.cat([x.chunk(len(order), -1)[i] for i in order], -1)


        for name in ("fc.weight", "input_norm.weight"):
            if name in t:
                new[name] = chunks(t[name])
        old_names = [f"aux_norm_{{which}}.weight" for which in ("low", "mid", "high")]
        for names in ([f"fc_norm.{{i}}.weight" for i in range(len(order))], old_names):
            if names[0] in t:
                new |= {{names[to]: t[names[i]] for to, i in enumerate(order)}}
        """,
    )


def offsets(reading: str) -> str:
    """d2t as offsets, from a table of target ids ('absolute') or one that was not read ('identity')."""
    ids = 't["d2t"].long()' if reading == "absolute" else 'torch.arange(len(t["d2t"]))'
    return program(
        f"d2t holds what training read as '{reading}': write it as the offsets that engines read",
        f"""
        ids = {ids}  # the target id of every draft id
        new["d2t"] = (ids - torch.arange(len(ids))).to(t["d2t"].dtype)
        if "t2d" in t:
            mask = torch.zeros(len(t["t2d"]), dtype=torch.bool)
            mask[ids] = True
            new["t2d"] = mask.to(t["t2d"].dtype)
        """,
    )


def head_in_target_order() -> str:
    """The head's rows in the target's order, for an engine that reads no d2t of a whole vocabulary."""
    return program(
        "put lm_head's rows in the target's order, so that d2t is all zero",
        """
        ids = t["d2t"].long() + torch.arange(len(t["d2t"]))
        new["lm_head.weight"] = torch.empty_like(t["lm_head.weight"])
        new["lm_head.weight"][ids] = t["lm_head.weight"]
        new["d2t"] = torch.zeros_like(t["d2t"])
        """,
    )


def swapped_halves() -> str:
    """The columns of the first layer's q, k and v, for cat(embedding, hidden)."""
    return program(
        "q, k and v were trained on cat(hidden, embedding): swap the halves of their columns",
        """
        for part in "qkv":
            name = f"{block}self_attn.{part}_proj.weight"
            hidden, embedding = t[name].chunk(2, -1)
            new[name] = torch.cat([embedding, hidden], -1)
        """,
    )


def swapped_norms() -> str:
    """The first layer's two norms, each under the other's name."""
    return program(
        "the first layer's norms were trained the other way round: swap the two tensors",
        """
        one, other = f"{block}input_layernorm.weight", f"{block}hidden_norm.weight"
        new[one], new[other] = t[other], t[one]
        """,
    )


def half_split_rows(head_dim: int) -> str:
    """The rows of q and k, trained on neighbouring pairs, for the half-split rotation."""
    return program(
        "q and k were trained with neighbouring numbers turning in pairs: put each head's rows for the "
        "half-split rotation",
        f"""
        rows = [*range(0, {head_dim}, 2), *range(1, {head_dim}, 2)]
        for name, tensor in t.items():
            if ".self_attn.q_" in name or ".self_attn.k_" in name:
                heads = tensor.reshape(-1, {head_dim}, *tensor.shape[1:])
                new[name] = heads[:, rows].reshape(tensor.shape)
        """,
    )


def idle_layers() -> str:
    """Decoder layers that add nothing to what goes through them."""
    return program(
        "the drafter was trained without its decoder layer: make the layer add nothing",
        """
        for name, tensor in t.items():
            if ".self_attn.o_proj." in name or ".mlp.down_proj." in name:
                new[name] = torch.zeros_like(tensor)
        """,
    )


def head_of_target() -> str:
    """The target's head rows of the draft vocabulary as the drafter's own head."""
    return program(
        "write the target's head rows of the draft vocabulary as lm_head.weight",
        """
        wanted = {}
        for path in sorted(Path(sys.argv[2]).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    for part in ("lm_head.weight", "embed_tokens.weight"):
                        if name == part or name.endswith(f".{part}"):
                            wanted[part] = path, name
        path, name = wanted.get("lm_head.weight", wanted.get("embed_tokens.weight"))  # tied
        with safe_open(path, "pt") as file:
            head = file.get_tensor(name)
        ids = torch.arange(len(head))
        if "d2t" in t:
            ids = t["d2t"].long() + torch.arange(len(t["d2t"]))
        new["lm_head.weight"] = head[ids].to(t["fc.weight"].dtype)
        """,
        " TARGET",
    )


def ones_before_head() -> str:
    """The final norm's weight at one, which leaves every row's ranking as without the norm."""
    return program(
        "the head was trained without the norm in front of it: with weights of one the norm divides "
        "each row by one number, which changes no ranking",
        """
        new["norm.weight"] = torch.ones(t["fc.weight"].shape[0], dtype=t["fc.weight"].dtype)
        """,
    )


def deeper_norms_as(name: str, layers: int) -> str:
    """The norm in front of the attention of the layers behind the first, under another name too."""
    return program(
        f"store the deeper layers' input_layernorm as {name}, where that engine looks",
        f"""
        for i in range(1, {layers}):
            new[f"layers.{{i}}.{name}.weight"] = t[f"layers.{{i}}.input_layernorm.weight"].clone()
        """,
    )


def ones_in_deeper_norms(layers: int) -> str:
    """The same norms at one."""
    return program(
        "the deeper layers were trained with norms of ones: write ones",
        f"""
        for i in range(1, {layers}):
            name = f"layers.{{i}}.input_layernorm.weight"
            new[name] = torch.ones_like(t[name])
        """,
    )


def renamed_block(prefix: str) -> str:
    """The first layer's tensors under the name that a release knows."""
    return program(
        f"call the first layer's tensors {prefix}*, as that release does",
        f"""
        for name, tensor in t.items():
            if name.startswith(block) and block != "{prefix}":
                new[name] = None
                new["{prefix}" + name.removeprefix(block)] = tensor
        """,
    )


def without(pattern: str, what: str) -> str:
    """A file without the tensors whose names match a regular expression."""
    return program(
        f"leave {what} out of the file",
        f"""
        import re

        new = {{name: None for name in t if re.fullmatch(r"{pattern}", name)}}
        """,
    )
