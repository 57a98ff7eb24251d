"""Holding a checkpoint's form against its file: the tensors that the form asks for, and no others."""

from __future__ import annotations

import re

from eagle3.form import DrafterForm, Shapes

# The drafter's own names are SpecForge's for the first layer and everybody's for the others.
FIRST_LAYER = "midlayer."
ALIAS = "layers.0."
# What SGLang's first drafters with a norm for each chunk called fc_norm.i.
LEGACY = {
    f"aux_norm_{which}.weight": f"fc_norm.{i}.weight"
    for i, which in enumerate(("low", "mid", "high"))
}
# What a file may hold unread: a table that old trainers saved, computed from the config by everybody.
PASSED_OVER = re.compile(r".*rotary_emb\.inv_freq")


def own_name(name: str) -> str:
    """A file's tensor name as the drafter's parameters are named."""
    name = LEGACY.get(name, name)
    return FIRST_LAYER + name.removeprefix(ALIAS) if name.startswith(ALIAS) else name


def expected_shapes(form: DrafterForm) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this form needs, by the drafter's own names."""
    hidden, target = form.hidden.value, form.target_hidden.value
    width = form.heads.value * form.head_dim.value
    kv_width = form.kv_heads.value * form.head_dim.value
    wide = form.intermediate.value
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, form.num_aux.value * target)}
    if form.fc_bias.value:
        shapes["fc.bias"] = (hidden,)
    if form.norm_before_fc.value:
        shapes["input_norm.weight"] = (form.num_aux.value * target,)
    if form.fc_norm.value:
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(form.num_aux.value)}
    for layer in range(form.num_layers.value):
        prefix = own_name(f"layers.{layer}.")
        inputs = hidden if layer else 2 * hidden
        sizes = {"q": (width, inputs), "k": (kv_width, inputs), "v": (kv_width, inputs)}
        sizes["o"] = (hidden, width)
        for part, size in sizes.items():
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = size
            if form.attention_bias.value:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = size[:1]
        if form.qk_norm.value:
            shapes |= {f"{prefix}self_attn.{p}_norm.weight": (form.head_dim.value,) for p in "qk"}
        for part, size in (
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            shapes[f"{prefix}mlp.{part}_proj.weight"] = size
            if form.mlp_bias.value:
                shapes[f"{prefix}mlp.{part}_proj.bias"] = size[:1]
        norms = ["input_layernorm", "post_attention_layernorm"] + ([] if layer else ["hidden_norm"])
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
    if form.head_norm.value:
        shapes["norm.weight"] = (hidden,)
    if form.head.value != "target":
        shapes["lm_head.weight"] = (form.draft_vocab.value, hidden)
    if form.embedding.value == "own":
        shapes["embed_tokens.weight"] = (form.vocab.value, hidden)
    if form.draft_vocab.value != form.vocab.value:
        shapes["d2t"] = (form.draft_vocab.value,)
    return shapes


def optional_shapes(form: DrafterForm) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint of this form may have or lack."""
    shapes: dict[str, tuple[int, ...]] = {
        "d2t": (form.draft_vocab.value,),
        "t2d": (form.vocab.value,),  # ModelOpt writes none, and nothing that drafts reads it
        "norm.weight": (form.hidden.value,),
    }
    return {name: shape for name, shape in shapes.items() if name not in expected_shapes(form)}


def disagreements(form: DrafterForm, shapes: Shapes | None) -> list[str]:
    """Where a file's tensors contradict the form: one sentence for each switch and each size."""
    faults = impossible_sizes(form)
    if shapes is None:
        return faults
    named: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for name, shape in shapes.items():
        first = names.setdefault(own_name(name), name)
        if first != name:
            faults.append(f"the file holds {first} and {name}, which are the same tensor")
        named[own_name(name)] = tuple(shape)
    switches = (
        ("norm_before_fc", form.norm_before_fc, r"input_norm\.weight"),
        ("fc_norm", form.fc_norm, r"fc_norm\.\d+\.weight"),
        ("attention_bias", form.attention_bias, r".*self_attn\.[qkvo]_proj\.bias"),
        ("mlp_bias", form.mlp_bias, r".*mlp\.\w+_proj\.bias"),
        ("fc_bias", form.fc_bias, r"fc\.bias"),
        ("qk_norm", form.qk_norm, r".*self_attn\.[qk]_norm\.weight"),
    )
    for switch, setting, pattern in switches:
        present = [name for name in named if re.fullmatch(pattern, name)]
        if present and not setting.value:
            faults.append(f"the file holds {present[0]}, but {switch} is false ({setting.origin})")
        if setting.value and not present:
            faults.append(f"{switch} is true ({setting.origin}), but the file has no such tensor")
    layers = {int(m[1]) for n in named if (m := re.match(r"layers\.(\d+)\.", n))}
    layers |= {0} if any(name.startswith(FIRST_LAYER) for name in named) else set()
    if layers and layers != set(range(form.num_layers.value)):
        faults.append(
            f"the file holds layer {', '.join(map(str, sorted(layers)))}, but num_layers is "
            f"{form.num_layers.value} ({form.num_layers.origin})"
        )
    extra = [n for n in named if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", n)]
    faults += [
        f"the file holds {name}, but only the first layer has a hidden_norm" for name in extra
    ]
    if form.norm_before_fc.value and form.fc_norm.value:
        faults.append(
            f"norm_before_fc ({form.norm_before_fc.origin}) and fc_norm ({form.fc_norm.origin}) "
            "exclude each other"
        )
    return faults + wrong_sizes(form, named)


def impossible_sizes(form: DrafterForm) -> list[str]:
    """Sizes of which no drafter can be built."""
    faults = []
    if form.head_dim.value % 2 or form.head_dim.value < 2:
        faults.append(
            f"head_dim is {form.head_dim.value}, but a rotary embedding needs an even one"
        )
    if form.heads.value % form.kv_heads.value:
        faults.append(
            f"{form.heads.value} heads cannot share {form.kv_heads.value} keys and values"
        )
    if form.draft_vocab.value > form.vocab.value:
        faults.append(
            f"draft_vocab is {form.draft_vocab.value} ({form.draft_vocab.origin}), more than the "
            f"target's vocabulary of {form.vocab.value} ({form.vocab.origin})"
        )
    return faults


def wrong_sizes(form: DrafterForm, named: Shapes) -> list[str]:
    """Tensors whose shape is not what the form's sizes make of it."""
    faults = []
    for name, want in {**expected_shapes(form), **optional_shapes(form)}.items():
        got = named.get(name)
        if got is None or tuple(got) == want:
            continue
        fault = f"{name} is {list(got)}, expected {list(want)}"
        if name == "fc.weight" and len(got) == 2 and got[0] == want[0]:
            fault += (
                f": {form.num_aux.value} aux states ({form.num_aux.origin}) of "
                f"{form.target_hidden.value} ({form.target_hidden.origin})"
            )
        elif name in SIZES:
            setting = getattr(form, SIZES[name])
            fault += f" ({SIZES[name]}: {setting.origin})"
        faults.append(fault)
    return faults


# Which size a wrong shape most likely goes back to.
SIZES = {
    "lm_head.weight": "draft_vocab",
    "d2t": "draft_vocab",
    "t2d": "vocab",
    "embed_tokens.weight": "vocab",
    "midlayer.mlp.gate_proj.weight": "intermediate",
    "midlayer.self_attn.q_proj.weight": "heads",
    "midlayer.self_attn.k_proj.weight": "kv_heads",
    "norm.weight": "hidden",
}
