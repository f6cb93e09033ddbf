# SPDX-License-Identifier: Apache-2.0
"""Runs linears, gated MLPs and attention of a model through astrai_core, in place.

`patch` changes no weight and adds none: a module that is understood gets another class, a subclass
of its own whose `forward` calls `astrai_core.linear`, `astrai_core.swiglu` or
`astrai_core.apply_rotary_emb`; hooks, state dict, tied weights, `isinstance` and autograd stay as
they were, and `restore()` gives the old classes back. Attention itself is asked for as transformers
has it, by the implementation that the configuration names. An attribute `forward` on the instance
would do too, but it refers back to its module: a deleted model would then keep its memory until the
garbage collector comes by.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

import astrai_core

from ._register import NAME, register_attention
from ._rotary import rotary_obstacle, with_rotary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

__all__ = ["Patch", "patch"]

_torch_module: Any = nn.modules.module
_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


@dataclass(frozen=True)
class Patch:
    """What `patch` did to a model, and the way back.

    Also a context manager: leaving it restores the model.

    Attributes:
        linears: names of the linears that call `astrai_core.linear`, `gate_proj` and `up_proj` of
            the MLPs below included, whose product is computed by one `astrai_core.swiglu`.
        mlps: names of the gated MLPs that call `astrai_core.swiglu`.
        attentions: names of the attentions that call `astrai_core.apply_rotary_emb` and
            `astrai_core.attention`.
        skipped: for each module that looks like one of these and was left alone, the reason.
    """

    linears: tuple[str, ...]
    mlps: tuple[str, ...]
    attentions: tuple[str, ...]
    skipped: Mapping[str, str]
    _modules: dict[str, nn.Module] = field(repr=False)
    _configs: list[tuple[Any, str]] = field(repr=False)

    def restore(self) -> None:
        """Undoes the patch; does nothing the second time.

        Every module gets its own class back, and every configuration its implementation of
        attention, unless another one was set since.

        Raises:
            RuntimeError: another library has since replaced the `forward` or the class of some
                modules (named in the message), so that undoing ours would break theirs; all
                others are restored. Undo the other change, then call this again.
        """
        while self._configs:
            config, before = self._configs.pop()
            if config._attn_implementation == NAME:  # noqa: SLF001 - it has no public name
                _set_implementation(config, before)
        for name, module in list(self._modules.items()):
            base = _base_of(module)
            if base is not None:
                if "forward" in module.__dict__ or "_astrai_base" not in type(module).__dict__:
                    continue
                module.__class__ = base
            del self._modules[name]
        if self._modules:
            names = ", ".join(self._modules)
            raise RuntimeError(f"cannot restore modules that were changed after patch(): {names}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def patch(model: nn.Module) -> Patch:
    """Routes a model's linears, gated MLPs and attention through astrai_core, in place.

    - Every `nn.Linear`, with or without bias, calls `astrai_core.linear`.
    - Every MLP whose forward is Llama's, `down_proj(silu(gate_proj(x)) * up_proj(x))`, without
      bias on `gate_proj` and `up_proj`, calls `astrai_core.swiglu` and then its `down_proj`.
    - Every attention of transformers with Llama's rotary embedding, if its configuration says
      ``sdpa``, which is the default, calls `astrai_core.apply_rotary_emb` and
      `astrai_core.attention`: ``attn_implementation`` is then ``astrai`` (`register_attention`).
    - Anything else is left alone; what looks like one of them is listed in `skipped`.

    Whether a kernel or torch computes a call is decided call by call, as everywhere in
    astrai_core. Where torch does, linears and MLPs are bitwise those of the unpatched model, and
    rotary embedding in bf16 differs by its roundings: one, of what is computed in fp32. A module
    that gains a hook or an adapter later keeps working: its MLP then computes the product from
    its modules, one by one.

    Args:
        model: a model of transformers, or any other module.

    Returns:
        The names of what was changed and of what was not, with `restore()`.

    Raises:
        RuntimeError: some module of the model is patched already; nothing was changed.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if _base_of(module) is not None:
            raise RuntimeError(f"the model is already patched (at {name!r}): restore() it first")

    linears: list[str] = []
    mlps: list[str] = []
    attentions: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in modules.items():
        if hasattr(module, "in_features") and hasattr(module, "out_features"):
            _file(name, _linear_obstacle(module), linears, skipped)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            _file(name, _mlp_obstacle(module), mlps, skipped)
        elif all(hasattr(module, part) for part in ("q_proj", "k_proj", "v_proj", "config")):
            _file(name, _attention_obstacle(module), attentions, skipped)

    routes = dict.fromkeys(linears, "linear") | dict.fromkeys(mlps, "mlp")
    routes |= dict.fromkeys(attentions, "attention")
    for name, route in routes.items():
        modules[name].__class__ = _routed(type(modules[name]), route)
    configs: list[tuple[Any, str]] = []
    for name in attentions:
        config: Any = modules[name].config
        if config._attn_implementation != NAME:  # noqa: SLF001 - it has no public name
            configs.append((config, config._attn_implementation))  # noqa: SLF001
            _set_implementation(config, NAME)
    return Patch(
        linears=tuple(linears),
        mlps=tuple(mlps),
        attentions=tuple(attentions),
        skipped=MappingProxyType(skipped),
        _modules={name: modules[name] for name in routes},
        _configs=configs,
    )


def _set_implementation(config: Any, name: str) -> None:
    # Its setter would change the configurations inside this one too.
    config._attn_implementation_internal = name  # noqa: SLF001


def _file(name: str, obstacle: str | None, accepted: list[str], skipped: dict[str, str]) -> None:
    if obstacle is None:
        accepted.append(name)
    else:
        skipped[name] = obstacle


# --- what is understood ---------------------------------------------------------------------------


def _linear_obstacle(module: nn.Module) -> str | None:
    """Why a module with `in_features` cannot call `astrai_core.linear`; None if it can."""
    kind = type(module)
    if not isinstance(module, nn.Linear):
        return f"{kind.__name__} is not an nn.Linear"
    if kind.forward is not nn.Linear.forward:
        return f"{kind.__name__} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    # A subclass of Tensor or Parameter computes in its own way (quantized, sharded, not yet there).
    if type(module.weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(module.weight).__name__}"
    return None


def _mlp_obstacle(module: nn.Module) -> str | None:
    """Why a module with `gate_proj` cannot call `astrai_core.swiglu`; None if it can."""
    kind = type(module)
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if not _computes_llama_mlp(kind.forward):
        return f"the forward of {kind.__name__} is not that of a Llama MLP"
    if not _is_silu(module.act_fn):
        return f"its activation is {_name_of(module.act_fn)}, not SiLU"
    for part in ("gate_proj", "up_proj"):
        linear = cast("nn.Module", getattr(module, part))
        obstacle = _linear_obstacle(linear) if hasattr(linear, "in_features") else "not a linear"
        if obstacle is not None:
            return f"{part}: {obstacle}"
        if linear.bias is not None:
            return f"{part} has a bias"
    return None


def _attention_obstacle(module: nn.Module) -> str | None:
    """Why a module with `q_proj` cannot call our rotary embedding and attention; None if it can."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    obstacle = rotary_obstacle(type(module))
    if obstacle is not None:
        return obstacle
    implementation = getattr(module.config, "_attn_implementation", None)
    if implementation not in ("sdpa", NAME):
        return f"its attn_implementation is {implementation}, not sdpa"
    try:
        register_attention()
    except RuntimeError as error:
        return str(error)
    return None


def _name_of(activation: object) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


def _llama_mlp(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504 - the instructions are compared, this assignment among them


def _llama_mlp_returned(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _computes_llama_mlp(forward: Callable[..., Any]) -> bool:
    """Whether a forward is, instruction by instruction, that of a Llama MLP.

    Modules with the same parts differ in what they do with them (a multiplier, a clamp, dropout,
    an fp32 product), so that only the code itself tells. transformers copies this one unchanged
    into nearly every model that has it.
    """
    code = getattr(forward, "__code__", None)
    return code is not None and any(
        (code.co_code, code.co_names, code.co_argcount)
        == (known.co_code, known.co_names, known.co_argcount)
        for known in (_llama_mlp.__code__, _llama_mlp_returned.__code__)
    )


def _is_silu(activation: object) -> bool:
    if isinstance(activation, nn.SiLU) or activation is functional.silu:
        return True
    # transformers has a class of its own, which exists only where it has been imported.
    activations = sys.modules.get("transformers.activations")
    return type(activation) is getattr(activations, "SiLUActivation", None)


# --- what is called instead -----------------------------------------------------------------------


def _linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's
    return astrai_core.linear(input, self.weight, self.bias)


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up, act = self.gate_proj, self.up_proj, self.act_fn
    if _is_bare(gate) and _is_bare(up) and _is_silu(act) and not _has_hooks(act):
        return cast("torch.Tensor", self.down_proj(astrai_core.swiglu(x, up.weight, gate.weight)))
    return cast("torch.Tensor", self.down_proj(act(gate(x)) * up(x)))


def _is_bare(linear: Any) -> bool:
    """Whether calling a linear would do no more than multiply by its weight."""
    return (
        getattr(type(linear), "forward", None) is _linear_forward
        and "forward" not in linear.__dict__
        and linear.bias is None
        and not _has_hooks(linear)
    )


def _has_hooks(module: Any) -> bool:
    if not isinstance(module, nn.Module):
        return False
    return bool(
        module._forward_hooks  # noqa: SLF001 - what nn.Module.__call__ itself looks at
        or module._forward_pre_hooks  # noqa: SLF001
        or module._backward_hooks  # noqa: SLF001
        or module._backward_pre_hooks  # noqa: SLF001
        or _torch_module._has_any_global_hook()  # noqa: SLF001
    )


def _routed(base: type[nn.Module], route: str) -> type[nn.Module]:
    """The one subclass of a module's class that computes on a route: linear, mlp or attention."""
    known = _classes.get((base, route))
    if known is not None:
        return known
    forwards = {"linear": _linear_forward, "mlp": _mlp_forward}
    members = {
        "__module__": __name__,
        "__doc__": f"{base.__name__}, computed by astrai_core.",
        "__reduce_ex__": _reduce,
        "_astrai_base": base,
        "_astrai_route": route,
        "forward": forwards.get(route) or with_rotary(base.forward),
    }
    return _classes.setdefault((base, route), type(f"Astrai{base.__name__}", (base,), members))


def _base_of(module: nn.Module) -> type[nn.Module] | None:
    return getattr(type(module), "_astrai_base", None)


def _reduce(self: Any, protocol: Any) -> Any:
    # The class is made on the fly, so that pickle cannot find it by its name.
    kind = type(self)
    base, route = kind._astrai_base, kind._astrai_route  # noqa: SLF001 - our own
    return (_rebuild, (base, route), *base.__reduce_ex__(self, protocol)[2:])


def _rebuild(base: type[nn.Module], route: str) -> nn.Module:
    if route == "attention":
        # Its configuration names what another process need not know yet.
        register_attention()
    kind = _routed(base, route)
    return kind.__new__(kind)
