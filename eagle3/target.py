"""What a drafter takes from its target: token embedding, final norm and head, read from its shards.

Tensors stay in the numbers they are stored in and are mapped, so only the rows that are asked for are
read. The rest of the target is never touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.checkpoints.reading import is_number
from eagle3.errors import BadInput
from eagle3.files import first_line, read_json
from eagle3.headers import TensorInfo, find_tensors

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
ROWS_AT_ONCE = 8192  # of a table that is hashed; bounds what is copied
HEAD_ROWS = 2048  # that are multiplied at a time; bounds what is copied
# Targets whose final norm multiplies by 1 + w. Source: transformers 5.24, `1.0 + self.weight` in the
# norm that their models end in; Gemma 3n and 4 have left it. A multimodal target's own type stands
# beside its language model's: some configs nest one without a type.
ONE_PLUS = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "muse_glimmer",
        "muse_glimmer_text",
        "muse_spark",
        "muse_spark_text",
        "paligemma",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "shieldgemma2",
        "step3p5",
        "step3p7",
        "vaultgemma",
    }
)
# Models that share embedding and head unless their config says otherwise.
TIED_BY_DEFAULT = ("gemma", "paligemma", "shieldgemma2", "vaultgemma")


@dataclass(frozen=True, kw_only=True)
class FinalNorm:
    """The norm in front of the target's head: x / rms(x) · w, or · (1 + w)."""

    weight: Tensor  # [H] float32, as stored
    eps: float
    one_plus: bool

    @property
    def factor(self) -> Tensor:
        """What the normed state is multiplied by, [H]."""
        return self.weight + 1 if self.one_plus else self.weight

    def __call__(self, h: Tensor) -> Tensor:
        """h [..., H] → [..., H], float32."""
        return F.rms_norm(h.float(), self.weight.shape, self.factor, self.eps)


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """What a drafter takes from its target's checkpoint."""

    folder: Path
    config: Mapping[str, Any]  # of the language model
    device: str
    num_layers: int
    embedding: Tensor  # [V, H] as stored, mapped where it lies on the CPU
    base: str  # what the names of the language model's tensors begin with
    fingerprint: str  # sha256 over config.json and the embedding, not over all weights

    @property
    def vocab(self) -> int:
        """V."""
        return int(self.embedding.shape[0])

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.embedding.shape[1])

    def final_norm(self) -> FinalNorm:
        """The final norm; read on first use. Raises BadInput where it is none of a known kind."""
        return self._norm

    def head(self) -> Tensor:
        """The head [V, H] as stored, or the embedding where the two are tied; read on first use."""
        return self._head

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of `embedding` or `head`, [len(ids), H] in float32."""
        if name not in ("embedding", "head"):
            raise BadInput(f"a target has no table named '{name}', but embedding and head")
        table = self.embedding if name == "embedding" else self.head()
        return table[ids.to(table.device)].float()

    def logits(self, h: Tensor, *, normed: bool) -> Tensor:
        """head(norm(h)), or head(h) where h is normed already; h [..., H] → [..., V] float32."""
        h = h.float() if normed else self.final_norm()(h)
        scores = torch.cat(list(self._scores(h)), -1)
        cap = self.config.get("final_logit_softcapping")
        if cap and not is_number(cap):
            raise BadInput(
                f"{self.folder / 'config.json'}: 'final_logit_softcapping' must be a positive number, "
                f"not {cap!r}"
            )
        return torch.tanh(scores / cap) * cap if cap else scores

    def _scores(self, h: Tensor) -> Iterator[Tensor]:
        """h [..., H] float32 times the head, in blocks of its rows."""
        head = self.head()
        if head.dtype is torch.float32:
            yield F.linear(h, head)
            return
        # One block's memory for all of them: new memory for each costs more than the conversion.
        block = torch.empty((min(HEAD_ROWS, len(head)), self.hidden), device=head.device)
        for rows in head.split(HEAD_ROWS):
            yield F.linear(h, block[: len(rows)].copy_(rows))

    @cached_property
    def _norm(self) -> FinalNorm:
        name = f"{self.base}norm.weight"
        found = find_tensors(self.folder, [name, f"{self.base}norm.bias"])
        if name not in found:
            raise BadInput(f"{self.folder} holds no {name}, the target's final norm")
        if len(found) > 1:
            raise BadInput(
                f"{self.folder}: the final norm is no RMSNorm ({', '.join(found)}), which this version "
                "does not run"
            )
        eps: Any = self.config.get("rms_norm_eps")
        if not is_number(eps):
            raise BadInput(
                f"{self.folder / 'config.json'} states no rms_norm_eps above zero for the target's "
                f"final norm (it has {eps!r}); write the one that the target was trained with, which "
                "is its model class's default where the config leaves it out"
            )
        kind = str(self.config.get("model_type"))
        weight = read_tensor(found[name]).float().to(self.device)
        if weight.shape != (self.hidden,):
            raise BadInput(f"{name} is {list(weight.shape)}, expected [{self.hidden}]")
        return FinalNorm(weight=weight, eps=float(eps), one_plus=kind in ONE_PLUS)

    @cached_property
    def _head(self) -> Tensor:
        path = self.folder / "config.json"
        for key in ("logit_scale", "logits_scaling"):
            if self.config.get(key) not in (None, 1, 1.0):
                raise BadInput(f"{path} sets {key}, which this version's head does not run")
        tied = self.config.get("tie_word_embeddings")
        if tied is None:
            tied = str(self.config.get("model_type")).startswith(TIED_BY_DEFAULT)
        found = self._beside_embedding(HEAD)
        if found is None and not tied:
            found = find_tensors(self.folder, [HEAD]).get(HEAD)
        if found is not None:
            head = read_tensor(found)
            if head.shape != self.embedding.shape:
                raise BadInput(
                    f"{found.file}: {found.name} is {list(head.shape)}, but the embedding is "
                    f"{list(self.embedding.shape)}"
                )
            return head.to(self.device)
        if not tied:
            raise BadInput(
                f"{self.folder} holds no {HEAD}, and its config.json does not tie it to the embedding"
            )
        return self.embedding

    def _beside_embedding(self, suffix: str) -> TensorInfo | None:
        """The tensor of the model that the embedding is of; others may have a head of their own."""
        parts = self.base.split(".")[:-1]
        for count in range(len(parts), -1, -1):
            name = ".".join([*parts[:count], suffix])
            found = find_tensors(self.folder, [name]).get(name)
            if found is not None and found.name == name:
                return found
        return None


def load_target_parts(folder: Path, device: str = "cpu") -> TargetParts:
    """The parts of a target in Hugging Face's layout; norm and head are read when they are used."""
    config_path = folder / "config.json"
    whole = read_json(config_path)
    text = whole.get("text_config", whole)  # multimodal targets nest the language model
    if not isinstance(text, Mapping) or type(text.get("num_hidden_layers")) is not int:
        raise BadInput(f"{config_path} lacks 'num_hidden_layers'")
    # What the outer config says of the whole holds where the language model's is silent.
    outer = {key: whole.get(key) for key in ("tie_word_embeddings", "model_type")}
    stated = {key: value for key, value in text.items() if value is not None or key not in outer}
    found = find_tensors(folder, [EMBEDDING]).get(EMBEDDING)
    if found is None:
        raise BadInput(f"{folder} holds no tensor named *.{EMBEDDING} in safetensors files")
    embedding = read_tensor(found)
    if embedding.dim() != 2:
        raise BadInput(f"{found.file}: {found.name} is {list(embedding.shape)}, expected [V, H]")
    digest = hashlib.sha256(config_path.read_bytes())
    for rows in embedding.contiguous().view(torch.uint8).split(ROWS_AT_ONCE):
        digest.update(rows.numpy().data)
    return TargetParts(
        folder=folder,
        config={**outer, **stated},
        device=device,
        num_layers=text["num_hidden_layers"],
        embedding=embedding.to(device),
        base=found.name.removesuffix(EMBEDDING),
        fingerprint=f"sha256:{digest.hexdigest()}",
    )


def read_tensor(info: TensorInfo) -> Tensor:
    """A floating-point tensor of a safetensors file, mapped, not copied."""
    try:
        with safe_open(info.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(info.name)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{info.file} is damaged or truncated: {first_line(error)}") from error
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise BadInput(
            f"{info.file}: {info.name} holds {tensor.dtype}; quantised tables are not read"
        )
    return tensor
