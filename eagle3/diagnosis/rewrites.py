"""Python programs that rewrite a drafter's tensors so that every engine computes what was trained.

Each is whole and needs torch and safetensors alone: it reads the folder's safetensors, changes what it
says it changes and writes the files in place, with their number types and metadata kept. It is to be
run on a copy. No torch here: these are texts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

BEGIN = """\
# {short}
# {what}
# python this.py DRAFTER{more}, on a copy of the drafter: its files are written over
import json
import os
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

NAME = {name!r}  # kept in the files, since once is enough
if len(sys.argv) < {count}:
    sys.exit(f"usage: python {{sys.argv[0]}} DRAFTER{more}, on a copy of the drafter")
files = {{}}
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, "pt") as file:
        files[path] = {{name: file.get_tensor(name) for name in file.keys()}}, file.metadata()
if not files:
    sys.exit(f"{{sys.argv[1]}} holds no *.safetensors")
t = {{name: tensor for held, _ in files.values() for name, tensor in held.items()}}
if any(NAME in (metadata or {{}}).get("patched", "").split("; ") for _, metadata in files.values()):
    sys.exit(f"{{sys.argv[1]}} was rewritten by this program already")
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
    patched = "; ".join(filter(None, ((metadata or {}).get("patched"), NAME)))
    save_file(held, path.with_suffix(".new"), {**(metadata or {}), "patched": patched})
    path.with_suffix(".new").chmod(path.stat().st_mode)
    os.replace(path.with_suffix(".new"), path)
    print(f"{path}: rewritten")
index = Path(sys.argv[1]) / "model.safetensors.index.json"
if index.exists():
    index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": where}))
"""


def program(short: str, what: str, body: str, more: str = "") -> str:
    """A whole program around what it does to `t`, the tensors by name, into `new`.

    `short` is that in one line, as exact as a line can be; `what` says why.
    """
    return (
        BEGIN.format(
            short=short,
            what=what,
            more=more,
            count=2 + len(more.split()),
            name=short.replace(";", ","),
        )
        + textwrap.dedent(body).strip("\n")
        + "\n"
        + END
    )


def in_short(snippet: str) -> str:
    """What a program of this module does, in its one line."""
    return snippet.partition("\n")[0].removeprefix("# ")


def program_lines(snippet: str | None) -> tuple[str, ...]:
    """The lines of a program: what it does, and itself."""
    return () if snippet is None else (in_short(snippet), snippet.rstrip("\n"))


def ascending_chunks(states: Sequence[int]) -> str:
    """fc's chunks, and the norms in front of them, in ascending order of their states."""
    order = sorted(range(len(states)), key=lambda i: states[i])
    return program(
        f"fc.weight: its chunks in the order {order} of the old ones",
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


# The target id of every draft id, as training read the table.
IDS = {
    "offset": 't["d2t"].long() + torch.arange(len(t["d2t"]))',
    "absolute": 't["d2t"].long()',
    "identity": 'torch.arange(len(t["d2t"]))',
}
SHORT = {"absolute": "d2t - arange(len(d2t))", "identity": "0"}


def offsets(reading: str) -> str:
    """d2t as offsets, from a table of target ids ('absolute') or one that was not read ('identity')."""
    return program(
        f"d2t = {SHORT[reading]}",
        f"d2t holds what training read as '{reading}': write it as the offsets that engines read",
        f"""
        ids = {IDS[reading]}  # the target id of every draft id
        new["d2t"] = (ids - torch.arange(len(ids))).to(t["d2t"].dtype)
        if "t2d" in t:
            mask = torch.zeros(len(t["t2d"]), dtype=torch.bool)
            mask[ids] = True
            new["t2d"] = mask.to(t["t2d"].dtype)
        """,
    )


def table_of_mask() -> str:
    """d2t made again from t2d, where the two name different tokens."""
    return program(
        "d2t = t2d.nonzero().flatten() - arange(len(d2t))",
        "d2t does not name the tokens of t2d: make it again from t2d, in ascending order",
        """
        if "t2d" not in t:
            sys.exit("there is no t2d to make d2t from")
        ids = t["t2d"].bool().nonzero().flatten()  # the target id of every draft id
        if len(ids) != len(t["d2t"]):
            sys.exit(f"t2d names {len(ids)} tokens, d2t {len(t['d2t'])}: not of one drafter")
        new["d2t"] = (ids - torch.arange(len(ids))).to(t["d2t"].dtype)
        """,
    )


def head_in_target_order(reading: str) -> str:
    """The head's rows in the target's order, for an engine that reads no d2t of a whole vocabulary."""
    return program(
        "lm_head.weight: row i of the target's token i, and d2t = 0",
        f"put lm_head's rows in the target's order; training read d2t as '{reading}'",
        f"""
        ids = {IDS[reading]}
        new["lm_head.weight"] = torch.empty_like(t["lm_head.weight"])
        new["lm_head.weight"][ids] = t["lm_head.weight"]
        new["d2t"] = torch.zeros_like(t["d2t"])
        """,
    )


def swapped_halves() -> str:
    """The columns of the first layer's q, k and v, for cat(embedding, hidden)."""
    return program(
        "q, k and v: swap the halves of their columns",
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
        "swap the first layer's input_layernorm.weight and hidden_norm.weight",
        "the first layer's norms were trained the other way round: swap the two tensors",
        """
        one, other = f"{block}input_layernorm.weight", f"{block}hidden_norm.weight"
        new[one], new[other] = t[other], t[one]
        """,
    )


def half_split_rows(head_dim: int) -> str:
    """The rows of q and k, trained on neighbouring pairs, for the half-split rotation."""
    return program(
        "q and k: each head's rows 0, 2, 4, … in front of 1, 3, 5, …",
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
        "o_proj = 0 and down_proj = 0",
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
        "lm_head.weight = the target's lm_head.weight[d2t + arange(len(d2t))]",
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
        "norm.weight = 1",
        "the head was trained without the norm in front of it: with weights of one the norm divides "
        "each row by one number, which changes no ranking",
        """
        new["norm.weight"] = torch.ones(t["fc.weight"].shape[0], dtype=t["fc.weight"].dtype)
        """,
    )


def deeper_norms_as(name: str, layers: int) -> str:
    """The norm in front of the attention of the layers behind the first, under another name too."""
    return program(
        f"layers.i.{name}.weight = layers.i.input_layernorm.weight, for i >= 1",
        f"store the deeper layers' input_layernorm as {name}, where that engine looks",
        f"""
        for i in range(1, {layers}):
            new[f"layers.{{i}}.{name}.weight"] = t[f"layers.{{i}}.input_layernorm.weight"].clone()
        """,
    )


def ones_in_deeper_norms(layers: int) -> str:
    """The same norms at one."""
    return program(
        "layers.i.input_layernorm.weight = 1, for i >= 1",
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
        f"rename the first layer's tensors to {prefix}*",
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
        f"leave {what} out",
        f"leave {what} out of the file",
        f"""
        import re

        new = {{name: None for name in t if re.fullmatch(r"{pattern}", name)}}
        """,
    )


# The norms in front of fc, by the switches of `eagle3.form`.
FC_NORMS = {
    "norm_before_fc": "input_norm[.]weight",
    "fc_norm": r"fc_norm[.]\d+[.]weight|aux_norm_(low|mid|high)[.]weight",
}


def norm_of_ones(name: str, chunks: int) -> str:
    """A norm in front of fc that the file does not have, at one; the other kind left out."""
    other = next(n for n in FC_NORMS if n != name)
    if name == "norm_before_fc":
        told, names = "input_norm.weight", ["input_norm.weight"]
    else:
        told, names = "fc_norm.i.weight", [f"fc_norm.{i}.weight" for i in range(chunks)]
    return program(
        f"{told} = 1",
        f"the drafter was trained behind a norm ({name}) that the file has no weights of: write ones",
        f"""
        import re

        new = {{name: None for name in t if re.fullmatch(r"{FC_NORMS[other]}", name)}}
        width = t["fc.weight"].shape[1] // {len(names)}
        new |= {{name: torch.ones(width, dtype=t["fc.weight"].dtype) for name in {names}}}
        """,
    )


def no_biases() -> str:
    """The first layer's biases on q, k and v at zero; o's stay."""
    return program(
        "the biases of the first layer's q, k and v = 0",
        "the drafter was trained without them: zero adds nothing",
        """
        for part in "qkv":
            name = f"{block}self_attn.{part}_proj.bias"
            new[name] = torch.zeros_like(t[name])
        """,
    )
