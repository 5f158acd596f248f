"""The part of an EAGLE head that its target runs: which hidden states it reads, and what fuses them into one vector.

The draft service has the whole head (`draft_service.eagle`). The target reads the few weights that it needs from the
same folder, by the names in published heads.
`tests/target/test_head_projection.py` holds this to the draft's own reading of every layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import NotSupported
from outrider.heads import MEDUSA_FILES, head_source, shipped_heads, weight_fingerprint
from outrider.model_store import model_source
from outrider.weights import Weights

# Joins embedding and state in MTP modules of DeepSeek-V3, Qwen3-Next and ERNIE, which read the target's state after its
# last norm.
_MTP_NORMED = re.compile(r"(model\.layers\.\d+\.eh_proj|mtp\.fc|model\.mtp_linear_proj\.\d+)\.weight")
# Joins them in MTP modules of MiMo and MiMo-V2, which read the state before it: vLLM's mimo.py, SGLang's mimo_v2.py.
_MTP_UNNORMED = re.compile(r"model\.(mtp_layers\.\d+\.input_proj|mtp\.layers\.\d+\.eh_proj)\.weight")
# A residual block of a Medusa head, as FasterDecoding or vLLM names it.
_MEDUSA = re.compile(r"((medusa_heads?|heads)\.)?\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight")


class HeadProjection(nn.Module):
    """Fuses a token's captured states into one feature: [.., F * W] to [.., width], norms first, then `fc`."""

    def __init__(self, weights: Mapping[str, Tensor], features: int, eps: float) -> None:
        """`weights` are fc.weight [width, F * W] and, where the head has them, fc.bias [width], fc_norm.{i}.weight [W]
        and input_norm.weight [F * W]. Kept in fp32 until moved with `to`."""
        super().__init__()
        self._features, self._eps = features, eps
        for name in ("fc.weight", "fc.bias", "input_norm.weight"):
            weight = weights.get(name)
            self.register_buffer(name.replace(".", "_"), None if weight is None else weight.float(), persistent=False)
        norms = [weights[f"fc_norm.{i}.weight"].float() for i in range(features) if f"fc_norm.{i}.weight" in weights]
        self.register_buffer("fc_norm_weight", torch.cat(norms) if norms else None, persistent=False)
        self.fc_weight: Tensor
        self.fc_bias: Tensor | None
        self.input_norm_weight: Tensor | None
        self.fc_norm_weight: Tensor | None

    @property
    def width(self) -> int:
        return self.fc_weight.shape[0]

    def forward(self, states: Tensor) -> Tensor:
        """[.., F * W] in any floating type to [.., width] in that of the weights. Norms are taken in fp32."""
        states = states.float()
        if self.input_norm_weight is not None:
            states = functional.rms_norm(states, states.shape[-1:], None, self._eps) * self.input_norm_weight
        if self.fc_norm_weight is not None:
            parts = states.reshape(*states.shape[:-1], self._features, -1)
            states = functional.rms_norm(parts, parts.shape[-1:], None, self._eps).flatten(-2) * self.fc_norm_weight
        return functional.linear(states.to(self.fc_weight.dtype), self.fc_weight, self.fc_bias)


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The target's part of the head that its draft runs. Without a `projection` the head reads states unchanged."""

    layers: tuple[int, ...]
    projection: HeadProjection | None
    fingerprint: str = ""  # as `FeatureRequest.projection_fingerprint`; empty without a projection


def read_draft_head(source: str, target_layers: int, target_hidden: int) -> DraftHead:
    """Read a head's layers and projection, for a target of so many decoder layers and such a width of hidden states.

    `source` is the name of a head that comes with Outrider, a folder with config.json and safetensors in any published
    layout, or a hub id, which is fetched; the target's own for its MTP module.

    Raises:
        NotSupported: it is no head in safetensors, a file of it cannot be read, or it does not fit the target; or there
            is no such name, or no such head on the hub.
        UnknownModel: it is a hub id at a revision that was not fetched.
    """
    # A target's own module has the target's name, which may be at a revision.
    published = Weights(model_source(source) if "@" in source else head_source(source), MEDUSA_FILES)
    published.check_files()
    names, config = published.names, published.config
    # An EAGLE-3 head without fc has an entry for it.
    whole = (config.get("eagle_config") or {}).get("use_aux_hidden_state", True) is False
    has_fc = any(name.endswith("fc.weight") for name in names)
    is_head = any(_has(names, pattern) for pattern in (_MEDUSA, _MTP_NORMED, _MTP_UNNORMED))
    if not (is_head or has_fc or whole):
        raise NotSupported(f"{source}: no EAGLE head, for it has no fc, no Medusa heads and no MTP module")
    if not has_fc or not any(name.endswith(".hidden_norm.weight") for name in names):
        # EAGLE-1, EAGLE-2 and Medusa heads, EAGLE-3 heads without fc and DeepSeek's MTP modules read what the target's
        # lm_head reads.
        unnormed = _has(names, _MTP_UNNORMED) and not _has(names, _MTP_NORMED)
        return DraftHead((target_layers - unnormed,), None)
    plain = {name.removeprefix("model."): name for name in names}
    # Beside `fc`, what may stand before it: norms of each state (EAGLE-3.1), or one of all joined.
    weights = published.tensors(
        {name: own for name, own in plain.items() if name.startswith(("fc.", "fc_norm.", "input_norm."))}
    )
    features, left = divmod(weights["fc.weight"].shape[1], target_hidden)
    if left or not features:
        raise NotSupported(
            f"{source}: its fc reads {weights['fc.weight'].shape[1]} numbers of states {target_hidden} wide"
        )
    layers = _layers(config, target_layers)
    if len(layers) != features or any(not 0 <= layer <= target_layers for layer in layers):
        raise NotSupported(f"{source}: it reads layers {layers}, fuses {features}, and the target has {target_layers}")
    layer = config.get("transformer_layer_config") or config
    projection = HeadProjection(weights, features, float(layer.get("rms_norm_eps", 1e-6)))
    return DraftHead(layers, projection, weight_fingerprint(weights["fc.weight"]))


def shipped_draft_head(fingerprint: str, target_layers: int, target_hidden: int) -> DraftHead | None:
    """The head that comes with Outrider whose projection has this fingerprint; None where there is none, as for an
    empty fingerprint. Sizes as in `read_draft_head`."""
    for shipped in shipped_heads() if fingerprint else ():
        try:
            head = read_draft_head(str(shipped.folder), target_layers, target_hidden)
        except NotSupported:
            # Made for another target.
            continue
        if head.fingerprint == fingerprint:
            return head
    return None


def _layers(config: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    """Layers by their outputs. speculators count inputs, which is one more."""
    speculators = "speculators_model_type" in config
    holder = config if speculators else config.get("eagle_config") or {}
    layers = holder.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        return (1, target_layers // 2 - 1, target_layers - 4)
    return tuple(int(layer) - speculators for layer in layers)


def _has(names: Iterable[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names)
