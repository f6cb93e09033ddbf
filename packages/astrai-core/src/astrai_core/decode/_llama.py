# SPDX-License-Identifier: Apache-2.0
"""The arguments of `build_model` from a Llama of transformers, which is not imported for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from astrai_core.attn import PagedKVCache

from ._arguments import Weights
from ._checks import positive
from ._config import DTYPES, Config

__all__ = ["Llama", "from_transformers", "kv_cache_of"]

_PAGE_SIZE = 128
_SOURCE = "transformers.models.llama.modeling_llama"
_PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {"in_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


class Llama(NamedTuple):
    """A model as `build_model` and `prefill` take it; the weights are those of the modules.

    Attributes:
        weights: the `weights` of the contract.
        cfg: the `cfg` of the contract, with the ``page_size`` of `new_cache`.
    """

    weights: dict[str, Any]
    cfg: dict[str, Any]

    def new_cache(self, tokens: int, batch: int = 1) -> PagedKVCache:
        """A cache of this model for so many sequences of so many tokens, on its device."""
        c = self.cfg
        embed = self.weights["embed"]
        return PagedKVCache(
            c["layers"],
            batch * -(-tokens // c["page_size"]),
            c["page_size"],
            c["n_kv"],
            c["hd"],
            dtype=embed.dtype,
            device=embed.device,
            layout="HND",
        )


def from_transformers(model: nn.Module, *, page_size: int = _PAGE_SIZE) -> Llama:
    """The weights and the configuration of a ``LlamaForCausalLM`` of transformers.

    Copies nothing. The weights must not change while a handle of `build_model` has them.

    Args:
        model: the model, in bf16, fp16 or fp32 on one device, of that class or of one that inherits
            its forward; its modules are of the classes that it makes. One that was patched by
            `astrai_core.integrations.transformers` will do.
        page_size: tokens of a page of the cache that it is to decode with.

    Raises:
        ValueError: what decode cannot compute, named with its module: another architecture, a bias,
            another activation or rotary embedding, a quantized, hooked or replaced module; a
            page_size below 1.
        TypeError: weights of several dtypes; a page_size that is no int.
    """
    if not _is_llama(model):
        raise ValueError(
            f"model: expected transformers' LlamaForCausalLM, got {type(model).__qualname__}"
        )
    for name, module in model.named_modules():
        reason = _obstacle(module, known=module is model or _kind(module) in _KNOWN)
        if reason is not None:
            raise ValueError(f"model: {name or 'itself'}: {reason}")
    config: Any = model.config
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"model: expected hidden_act silu, got {config.hidden_act}")
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"model: expected pretraining_tp 1, got {config.pretraining_tp}")
    embed, head = (
        model.get_parameter(f"{name}.weight") for name in ("model.embed_tokens", "lm_head")
    )
    tied = head is embed
    layers: Any = model.get_submodule("model.layers")
    weights: dict[str, Any] = {
        "embed": embed.detach(),
        "final_norm": model.get_parameter("model.norm.weight").detach(),
        "layers": [
            {
                key: layer.get_parameter(f"{path}.weight").detach()
                for key, path in (_PROJECTIONS | _NORMS).items()
            }
            for layer in layers
        ],
    }
    if not tied:
        weights["lm_head"] = head.detach()
    cfg = {
        "layers": len(layers),
        "d": config.hidden_size,
        "ffn": config.intermediate_size,
        "n_q": config.num_attention_heads,
        "n_kv": config.num_key_value_heads,
        "hd": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "vocab": embed.shape[0],
        "eps": config.rms_norm_eps,
        "wdtype": str(embed.dtype).removeprefix("torch."),
        "page_size": positive("page_size", page_size),
        "tied": tied,
        **_rotary(config),
    }
    # A module whose sizes are not those of the configuration is found here, not while decoding.
    Weights.parse(weights, Config.parse(cfg))
    return Llama(weights, cfg)


def kv_cache_of(cache: PagedKVCache, seqs: Sequence[int]) -> dict[str, Any]:
    """The `kv_cache` of `build_model` for sequences of a cache, over the pages that they have now.

    Reserve all pages first: the table is fixed for a handle. The cache does not learn of the tokens
    that `decode_step` appends: its lengths stay those of before, until `begin_step` adds as many.

    Args:
        cache: the cache.
        seqs: its sequences, each once, in the order of the batch. All may reach as many tokens as
            the pages of the one with the fewest hold.

    Raises:
        ValueError: a sequence is unknown, named twice or without pages; or a page that its next
            tokens go to belongs to another sequence too, as after a `fork`. `PagedKVCache.reserve`
            gives it a copy of that page. A later `fork` is not seen: the handle then writes to a
            page that both have.
    """
    if len(set(seqs)) != len(seqs):
        raise ValueError(f"seqs: expected different sequences, got {[*seqs]}")
    rows = [cache.pages(seq) for seq in seqs]
    owners = Counter(page for seq in cache.sequences for page in cache.pages(seq))
    for seq, row in zip(seqs, rows, strict=True):
        if any(owners[page] > 1 for page in row[cache.length(seq) // cache.page_size :]):
            raise ValueError(
                f"seqs: expected no page to be written to that another sequence has too, got one of"
                f" sequence {seq}"
            )
    count = min((len(row) for row in rows), default=0)
    if not count:
        raise ValueError(f"seqs: expected sequences with pages, got {[*seqs]}")
    pools = [cache.pools(layer) for layer in range(cache.num_layers)]
    table = torch.tensor([row[:count] for row in rows], dtype=torch.int32, device=cache.device)
    keys, values = ([pair[side].transpose(1, 2) for pair in pools] for side in (0, 1))
    return {"k": keys, "v": values, "page_table": table, "page_size": cache.page_size}


def _kind(module: nn.Module) -> tuple[str, str]:
    """Where a module's class comes from; of a patched one, its own class."""
    kind = getattr(type(module), "_astrai_base", type(module))
    return kind.__module__, kind.__qualname__


def _is_llama(model: nn.Module) -> bool:
    """Whether a model's class is LlamaForCausalLM, or inherits from it all that a call runs."""
    kind: type[nn.Module] = getattr(type(model), "_astrai_base", type(model))
    return any(
        (base.__module__, base.__qualname__) == (_SOURCE, "LlamaForCausalLM")
        and kind.forward is base.forward
        and kind.__call__ is base.__call__
        for base in kind.__mro__
        if issubclass(base, nn.Module)
    )


_KNOWN = {
    (_SOURCE, name)
    for name in (
        "LlamaForCausalLM",
        "LlamaModel",
        "LlamaDecoderLayer",
        "LlamaAttention",
        "LlamaMLP",
        "LlamaRMSNorm",
        "LlamaRotaryEmbedding",
    )
} | {
    ("torch.nn.modules.linear", "Linear"),
    ("torch.nn.modules.sparse", "Embedding"),
    ("torch.nn.modules.container", "ModuleList"),
    ("torch.nn.modules.activation", "SiLU"),
    ("transformers.activations", "SiLUActivation"),
}


def _obstacle(module: nn.Module, *, known: bool) -> str | None:
    """What a module does that decode does not, or None; `known` is whether its class may."""
    if not known:
        return f"{type(module).__qualname__} is not part of a plain Llama"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 - no public name
    if any(hooks):
        return "it has a hook"
    if getattr(module, "bias", None) is not None:
        return "it has a bias"
    for name, weight in module.named_parameters(recurse=False):
        if weight.dtype not in DTYPES.values():
            return f"its {name} is {weight.dtype}: decode takes bfloat16, float16 and float32"
        if type(weight) not in (nn.Parameter, Tensor):
            return f"its {name} is a {type(weight).__name__}"
    return None


def _rotary(config: Any) -> dict[str, Any]:
    """``theta`` and ``rope_scaling`` of a configuration, as any release of transformers has it."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {
        "rope_theta": config.rope_theta,
        **(config.rope_scaling or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"model: expected rotary embedding default or llama3, got {dict(rope)}")
    keys = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    )
    scaling = {key: rope[key] for key in keys} if kind == "llama3" else None
    return {"theta": float(rope["rope_theta"]), "rope_scaling": scaling}
