"""Read DepthBench's OLMo-core checkpoints with Hyper-Connections or Attention Residuals (arXiv 2609.32534).

The names come from DepthBench's fork of OLMo-core, github.com/keyu-wang-2002/DepthBench: ``nn/hyper_connections.py``
(commit 8cc2fd74), and ``nn/transformer/block.py`` and ``model.py`` (commit 5152cab0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.placements import Plan
from lamina.placements.plan import Sublayer

_QUERIES = {"attn_res": "attention", "mlp_res": "feed_forward"}
FUSED_EPS = 1e-5  # of the norms in the kernel, on the states and on their sums
_OWN_EPS = 1e-8  # of the RMS that the connections compute themselves
_LAYERS = "model.backbone.layers"


class Connections:
    """The residual connections of a block: the norm placement with options, and the names of the connections' weights.

    Raises UserError for an unsupported setting.
    """

    def __init__(self, block: Json, norm_eps: float):
        name = str(block.get("name", "default"))
        self.hyper: Json | None = block.get("hyper_connections")
        if self.hyper is None and name in ("hc", "mhc"):
            self.hyper = {"kind": name}
        self.attends = name == "attnres" or block.get("attnres_block_size") is not None
        self.norm_eps, self.eps, self.magnitude, self.spec = norm_eps, 0.0, 2.0, ""
        if "moda" in name:
            raise UserError(
                f"config.json: model.block.name is {name!r}. Choose a checkpoint without attention over depth."
            )
        if self.hyper is not None:
            self.spec = self._hyper_spec(self.hyper)
        elif self.attends:
            size = int(block.get("attnres_block_size") or 1)
            if size > 1 and size % 2:
                raise UserError(
                    f"config.json: model.block.attnres_block_size is {size}. Choose a checkpoint in "
                    "which this value is 1 or even."
                )
            self.spec = f"pre_ln(wiring=attn_res,size={size // 2})"

    def _hyper_spec(self, hyper: Json) -> str:
        kind = str(hyper.get("kind", "hc"))
        is_liger = kind == "liger_mhc"
        for name, default in (("sinkhorn_iters", 20), ("sinkhorn_tau", 1.0), ("liger_pre_eps", 0.0)):
            self._only(name, hyper.get(name, default), default)
        if (tanh := hyper.get("tanh")) is not None and not is_liger:
            self._only("tanh", tanh, kind == "hc")
        self.eps = float(hyper.get("liger_rms_eps", 1e-6)) if is_liger else _OWN_EPS
        if is_liger:
            self._only("liger_sinkhorn_eps", hyper.get("liger_sinkhorn_eps", 1e-6), self.eps)
            self.magnitude = float(hyper.get("liger_post_mult", 2.0))
        collapse = str(hyper.get("collapse", "auto"))
        collapse = {"auto": "mean" if is_liger else "sum"}.get(collapse, collapse)
        wirings = {"hc": "dynamic_hc", "mhc": "mhc", "liger_mhc": "mhc,start=liger"}
        if kind not in wirings:
            self._only("kind", kind, " or ".join(wirings))
        collapse = "sum_of_norms" if collapse == "sum" else collapse  # the model normalizes each stream before the sum
        return f"pre_ln(wiring={wirings[kind]},size={hyper.get('num_residual_streams', 4)},collapse={collapse})"

    def _only(self, name: str, value: object, allowed: object) -> None:
        if value != allowed:
            raise UserError(
                f"config.json: model.block.hyper_connections.{name} is {value!r}, but Lamina reads only "
                f"{allowed!r}. Choose another checkpoint."
            )

    def settled(self, plan: Plan) -> Plan:
        """Return the plan with the epsilons of the connections' norms."""
        if self.hyper is not None and plan.streams > 1:

            def of_half(half: Sublayer) -> Sublayer:
                streams = half.streams and replace(half.streams, eps=self.eps, magnitude=self.magnitude)
                return replace(half, streams=streams)

            return replace(plan, layers=tuple(layer.map(of_half) for layer in plan.layers))
        first = plan.layers[0].attention
        if self.attends and first.pre_norm is not None:  # the kernel has no norm before the first block
            alone = replace(first, pre_norm=replace(first.pre_norm, eps=self.norm_eps))
            return replace(plan, layers=(replace(plan.layers[0], attention=alone), *plan.layers[1:]))
        return plan

    def split(self, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Split the weights into the model's other weights, and the connections' weights under Lamina's names."""
        rest, own = dict[str, torch.Tensor](), dict[str, dict[str, torch.Tensor]]()
        for name, tensor in weights.items():
            plain = re.sub(r"\b(\w+)_hyper_connection\.branch\.norm\.", r"\1_norm.", name)  # a second name
            plain = re.sub(r"\b\w+_hyper_connection\.branch\.", "", plain)
            if match := re.fullmatch(r"blocks\.(\d+)\.(\w+)_hyper_connection\.(\w+)", plain):
                own.setdefault(f"{_LAYERS}.{match[1]}.{match[2]}.mixer", {})[match[3]] = tensor
            elif match := re.fullmatch(r"(?:blocks\.(\d+)\.)?(?:(attn_res|mlp_res)|res)_(proj|norm)\.weight", plain):
                place = f"{_LAYERS}.{match[1]}.{_QUERIES[match[2]]}.depth" if match[2] else "model.backbone.norm.reader"
                own.setdefault(place, {})[match[3]] = tensor
            elif plain in rest and not torch.equal(rest[plain], tensor):
                raise UserError(
                    f"tensor {name!r}: its values differ from {plain!r}, but the two tensors are the same parameter. "
                    "Give a checkpoint with equal tensors."
                )
            else:
                rest[plain] = tensor
        ours = {}
        for place, parts in own.items():
            try:
                made = _parameters(parts)
            except KeyError as error:
                raise UserError(
                    f"source: the checkpoint has no tensor {error.args[0]!r} for {place!r}. Give a complete checkpoint."
                ) from None
            ours |= {f"{place}.{name}": tensor.contiguous() for name, tensor in made.items()}
        if self.attends:  # a softmax over only the embedding needs no query, so the checkpoint has none
            ours[f"{_LAYERS}.0.attention.depth.query"] = torch.zeros_like(rest["blocks.0.attention_norm.weight"])
        return rest, ours


def _parameters(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of a DepthAttention or a StreamMixer from DepthBench's tensors."""
    if parts.keys() & {"proj", "norm"}:  # the query, times the gain of the norm on the states
        return {"query": parts["proj"].flatten() * parts["norm"]}
    if "phi" in parts:  # Liger's
        bias = parts["b"]
        n = int((len(bias) + 1) ** 0.5) - 1  # of n^2 + 2 n
        read, write, mix = bias.split([n, n, n * n])
        mix, projection = mix.view(n, n), parts["phi"].T
        scale = torch.stack([parts[f"alpha_{name}"] for name in ("pre", "post", "res")])
    elif "pre_bias" in parts:  # mHC
        names = ("pre", "post", "residual")
        read, write, mix = (parts[f"{name}_bias"] for name in names)
        projection = torch.cat([parts[f"{name}_dynamic_proj"].T for name in names])
        scale = torch.stack([parts[f"{name}_gate"] for name in names])
    else:  # Hyper-Connections, whose read and mixing weights are columns of one matrix
        static, moved, write = parts["static_alpha"], parts["dynamic_alpha_proj"].T, parts["static_beta"]
        read, mix = static[:, 0], static[:, 1:]
        projection = torch.cat([moved[:1], parts["dynamic_beta_proj"][None], moved[1:]])
        alpha, beta = parts["dynamic_alpha_scale"], parts["dynamic_beta_scale"]
        scale = torch.stack([alpha, beta, alpha])
    return {"read": read, "write": write, "mix": mix, "projection": projection, "scale": scale}
