"""The part of an EAGLE head that its target runs: which hidden states it reads, and what fuses them into one vector.

The draft service has the whole head (`draft_service.eagle`). The two services share no code that needs PyTorch and
checkpoints, so the target reads the few weights that it needs from the same folder, by the names in published heads.
`tests/target/test_head_projection.py` holds this to the draft's own reading of every layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import NotSupported
from outrider.heads import head_source, shipped_heads, weight_fingerprint
from outrider.hub import check_fetchable
from outrider.model_store import model_source

_INDEX = "model.safetensors.index.json"
# Beside `fc`, what may stand before it: norms of each state (EAGLE-3.1), or one of all joined.
_NEEDED = ("fc.", "fc_norm.", "input_norm.")
_MEDUSA_FILE = "medusa_lm_head.safetensors"
# Joins embedding and state in an MTP module of DeepSeek-V3, which reads the target's state after its last norm.
_MTP_NORMED = re.compile(r"model\.layers\.\d+\.eh_proj\.weight")
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
            is no such name.
        UnknownModel: it is a hub id at a revision that was not fetched.
        OSError: there is no such model on the hub.
    """
    # A target's own module has the target's name, which may be at a revision.
    folder = _folder(model_source(source) if "@" in source else head_source(source))
    config = _json(folder / "config.json")
    names, weights = _weights(folder)
    if not any(name.endswith(".hidden_norm.weight") for name in names):
        # EAGLE-1, EAGLE-2 and Medusa heads and DeepSeek's MTP modules read what the target's lm_head reads.
        unnormed = _has(names, _MTP_UNNORMED) and not _has(names, _MTP_NORMED)
        return DraftHead((target_layers - unnormed,), None)
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
    if layers is None:
        return (1, target_layers // 2 - 1, target_layers - 4)
    return tuple(int(layer) - speculators for layer in layers)


def _has(names: Iterable[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names)


def _folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    check_fetchable(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))


def _json(path: Path) -> dict[str, Any]:
    """Raises `NotSupported`, with the file's name, unless the file is a JSON object."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotSupported(f"{path}: {error}") from None
    if not isinstance(entries, dict):
        raise NotSupported(f"{path}: no JSON object")
    return entries


def _safetensors(folder: Path) -> list[Path]:
    """The files that hold the weights."""
    index = folder / _INDEX
    files = sorted(folder.glob("*.safetensors"))
    if not index.is_file():
        return files
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise NotSupported(f"{index}: no weight_map of names to files")
    # Medusa heads may lie beside their target's checkpoint, whose index does not list them.
    return [file for file in files if file.name == _MEDUSA_FILE] + [
        folder / name for name in sorted({*places.values()})
    ]


def _weights(folder: Path) -> tuple[set[str], dict[str, Tensor]]:
    """Names of all weights, and those of the projection by their names without prefix."""
    from safetensors import SafetensorError, safe_open

    files = _safetensors(folder)
    if not files:
        raise NotSupported(f"{folder}: no weights in safetensors; pickled ones could run code and are never loaded")
    names: set[str] = set()
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for published in file.keys():  # noqa: SIM118
                    names.add(published)
                    name = published.removeprefix("model.")
                    if name.startswith(_NEEDED):
                        weights[name] = file.get_tensor(published)
        except (OSError, SafetensorError) as error:
            raise NotSupported(f"{path}: {error}") from None
    is_head = any(_has(names, pattern) for pattern in (_MEDUSA, _MTP_NORMED, _MTP_UNNORMED))
    if not is_head and not any(name.endswith("fc.weight") for name in names):
        raise NotSupported(f"{folder}: no EAGLE head, for it has no fc, no Medusa heads and no MTP module")
    return names, weights
