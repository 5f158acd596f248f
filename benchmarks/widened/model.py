"""Writes a small model and its EAGLE-3 head in a larger shape: the small model's function at the large one's cost.

    python -m benchmarks.widened.model MODEL_FOLDER HEAD_FOLDER OUT_FOLDER OUT_HEAD [--shape 8b] [--device cuda]

MODEL_FOLDER and HEAD_FOLDER may be names that `outrider model list` and `outrider head list` print. The large model is
served like any other, and computes the small one's function: real text and real acceptance, with the bytes and the
arithmetic of the large shape in every pass. Only rounding differs: in fp32 logits stay within 1e-4 (as the tests
check); in bf16 outputs are close to the small model's, and not always equal.

How: hidden dimensions beyond the small width w stay zero in a width of H, and
- an RMSNorm over H sees a mean square that is w / H of the small one, so its weight and its epsilon shrink likewise;
- dimension i of a rotary head of width d turns with the frequency that dimension i * D / d has in a width of D;
- queries grow by sqrt(D / d), as the softmax divides by sqrt(D);
- heads keep their groups: query head h becomes h // g * G + h % g, with g and G query heads to a key head;
- layers that are added write nothing to the residual stream.

A weight that reads a live dimension and writes to a dead one is zero. Weights that read only zeros are random, and so
are gates and queries whose output is not used: a matrix of zeros would take less power than a real one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.shared.model_folder import TOKENIZER_FILES, copy_files, write_weights
from benchmarks.shared.report import show
from draft_service.checkpoints.files import fill
from draft_service.checkpoints.target import TargetCheckpoint
from draft_service.eagle.checkpoint import EagleCheckpoint, save_head
from draft_service.eagle.head import IN_FP32, EagleHead
from draft_service.eagle.head_config import HeadConfig, LayeredShape
from outrider.heads import head_source
from target_service.model.loading.store import resolve

# Of random weights: what Llama models are initialised with.
_STANDARD_DEVIATION = 0.02
_COPIED = (*TOKENIZER_FILES, "generation_config.json")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
# A weight of one layer by its short name, such as "q_proj".
Get = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder, or of the layer of a head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int = 1

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.heads // self.kv_heads

    @classmethod
    def of_model(cls, config: Mapping[str, Any]) -> DecoderShape:
        """From the entries of a config.json."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["intermediate_size"],
            config["num_hidden_layers"],
        )

    @classmethod
    def of_head(cls, config: HeadConfig) -> DecoderShape:
        return cls(config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size)


SHAPES = {
    "8b": DecoderShape(hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=14336, layers=32),
    # For rehearsals on a CPU: little more than SmolLM2-135M has.
    "test": DecoderShape(hidden=1024, heads=16, kv_heads=4, head_dim=128, inner=2048, layers=31),
}


class CannotWiden(ValueError):
    """The small model or head does not fit into the shape, or is of another kind."""


class Widening:
    """Puts weights of a small shape into those of a large one. All tensors are on `device`, of `dtype`.

    Symbols: w, d, f are the small width, head width and inner width, H, D, F the large ones; Q and K the large numbers
    of query and key heads, k the small number of key heads.
    """

    def __init__(self, small: DecoderShape, wide: DecoderShape, device: str, dtype: torch.dtype) -> None:
        """Raises `CannotWiden`."""
        for name, value in asdict(small).items():
            if value > getattr(wide, name):
                raise CannotWiden(f"{name}: {value} does not fit into {getattr(wide, name)}")
        if small.group > wide.group or wide.head_dim % small.head_dim:
            raise CannotWiden("a key head serves more queries, or a head's width is no multiple of the small one's")
        self._small, self._wide = small, wide
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self.live = torch.arange(small.hidden, device=device)
        self._inner = torch.arange(small.inner, device=device)
        # Of the small query heads, and of the small key heads, their places in the large shape.
        self._query_heads = [h // small.group * wide.group + h % small.group for h in range(small.heads)]
        self._key_heads = list(range(small.kv_heads))

    def noise(self, *shape: int) -> Tensor:
        """Random weights of a shape, for those that never affect an output."""
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.normal_(std=_STANDARD_DEVIATION, generator=self._generator)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def norm(self, weight: Tensor) -> Tensor:
        """[w] -> [H]."""
        wide = self.zeros(self._wide.hidden)
        wide[: len(weight)] = self._cast(weight.float() * math.sqrt(self._small.hidden / self._wide.hidden))
        return wide

    def embedding(self, weight: Tensor) -> Tensor:
        """[V, w] -> [V, H]: zeros beyond w."""
        wide = self.zeros(len(weight), self._wide.hidden)
        wide[:, : weight.shape[1]] = self._cast(weight)
        return wide

    def lm_head(self, weight: Tensor) -> Tensor:
        """[V, w] -> [V, H]."""
        wide = self.noise(len(weight), self._wide.hidden)
        wide[:, : weight.shape[1]] = self._cast(weight)
        return wide

    def matrix(self, weight: Tensor, shape: tuple[int, int], rows: Tensor, columns: Tensor, live: Tensor) -> Tensor:
        """`weight` at `rows` and `columns` of a matrix of `shape`. `live` are all columns whose inputs are not zero."""
        wide = self.noise(*shape)
        wide[:, live] = 0
        wide[rows[:, None], columns[None, :]] = self._cast(weight)
        return wide

    def attention(self, get: Get, parts: int = 1) -> dict[str, Tensor]:
        """The four projections. Queries, keys and values read `parts` concatenated hidden vectors."""
        small, wide = self._small, self._wide
        reads = self.side_by_side(parts)
        q_size, kv_size = wide.heads * wide.head_dim, wide.kv_heads * wide.head_dim
        width = parts * wide.hidden
        turned, plain = self._rotary_places(), torch.arange(small.head_dim, device=self._device)
        queries, keys = self._places(self._query_heads, turned), self._places(self._key_heads, turned)
        values, outputs = self._places(self._key_heads, plain), self._places(self._query_heads, plain)
        # Added query heads of a small key head output its values, which must not be read.
        of_small_keys = torch.arange(small.kv_heads * wide.group * wide.head_dim, device=self._device)
        scaled = get("q_proj").float() * math.sqrt(wide.head_dim / small.head_dim)
        return {
            "q_proj": self.matrix(scaled, (q_size, width), queries, reads, reads),
            "k_proj": self.matrix(get("k_proj"), (kv_size, width), keys, reads, reads),
            "v_proj": self.matrix(get("v_proj"), (kv_size, width), values, reads, reads),
            "o_proj": self.matrix(get("o_proj"), (wide.hidden, q_size), self.live, outputs, of_small_keys),
        }

    def mlp(self, get: Get) -> dict[str, Tensor]:
        """The three matrices of a gated MLP. Added units output nothing: their up projection is zero."""
        inner, hidden = self._wide.inner, self._wide.hidden
        gate = self.matrix(get("gate_proj"), (inner, hidden), self._inner, self.live, self.live)
        added = inner - self._small.inner
        gate[self._small.inner :, : self._small.hidden] = self.noise(added, self._small.hidden)
        return {
            "gate_proj": gate,
            "up_proj": self.matrix(get("up_proj"), (inner, hidden), self._inner, self.live, self.live),
            "down_proj": self.matrix(get("down_proj"), (hidden, inner), self.live, self._inner, self._inner),
        }

    def idle_layer(self) -> dict[str, Tensor]:
        """A layer that adds nothing to the residual stream."""
        wide = self._wide
        hidden, inner = wide.hidden, wide.inner
        q_size, kv_size = wide.heads * wide.head_dim, wide.kv_heads * wide.head_dim
        noisy = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "gate_proj": inner, "up_proj": inner}
        layer = {name: self.noise(rows, hidden) for name, rows in noisy.items()}
        layer |= {name: self.zeros(hidden) + 1 for name in _NORMS}
        return layer | {"o_proj": self.zeros(hidden, q_size), "down_proj": self.zeros(hidden, inner)}

    def side_by_side(self, parts: int) -> Tensor:
        """[parts * w] the live dimensions of `parts` concatenated large vectors."""
        return torch.cat([self.live + part * self._wide.hidden for part in range(parts)])

    def _rotary_places(self) -> Tensor:
        """[d] places of a head's dimensions with which each pair keeps its frequency."""
        half, stretch = self._small.head_dim // 2, self._wide.head_dim // self._small.head_dim
        first = torch.arange(half, device=self._device) * stretch
        return torch.cat([first, first + self._wide.head_dim // 2])

    def _places(self, heads: list[int], within: Tensor) -> Tensor:
        return torch.cat([head * self._wide.head_dim + within for head in heads])

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.to(device=self._device, dtype=self._dtype)


def wide_tensors(
    config: Mapping[str, Any], source: Mapping[str, Tensor], shape: DecoderShape, device: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of every weight of the large model."""
    small = DecoderShape.of_model(config)
    widening = Widening(small, shape, device, dtype)
    yield "model.embed_tokens.weight", widening.embedding(source["model.embed_tokens.weight"])
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."

        def get(name: str, prefix: str = prefix) -> Tensor:
            return source[f"{prefix}{_module(name)}.weight"]

        if layer < small.layers:
            norms = {name: widening.norm(get(name)) for name in _NORMS}
            weights = norms | widening.attention(get) | widening.mlp(get)
        else:
            weights = widening.idle_layer()
        for name, weight in weights.items():
            yield f"{prefix}{_module(name)}.weight", weight
    yield "model.norm.weight", widening.norm(source["model.norm.weight"])
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", widening.lm_head(source["lm_head.weight"])


def _module(name: str) -> str:
    """The module of a layer that has this weight."""
    if name in _ATTENTION:
        return f"self_attn.{name}"
    return f"mlp.{name}" if name in _MLP else name


def wide_config(config: Mapping[str, Any], shape: DecoderShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the large model."""
    narrower = config["hidden_size"] / shape.hidden
    return {
        **{name: value for name, value in config.items() if name != "torch_dtype"},
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "rms_norm_eps": config["rms_norm_eps"] * narrower,
        "dtype": str(dtype).removeprefix("torch."),
    }


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every weight of a folder of safetensors."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def widen_model(source: Path, folder: Path, shape: DecoderShape, device: str, dtype: torch.dtype) -> int:
    """Write the large model with the small one's tokenizer. Returns bytes of weights. Raises `CannotWiden`."""
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise CannotWiden(f"{source}: only Llama models without biases can be widened")
    total = write_weights(folder, wide_tensors(config, read_tensors(source), shape, device, dtype))
    (folder / "config.json").write_text(json.dumps(wide_config(config, shape, dtype), indent=1) + "\n")
    copy_files(source, folder, _COPIED)
    return total


def widen_head(
    source: str, model: Path, folder: Path, wide_model: Path, shape: DecoderShape, device: str, dtype: torch.dtype
) -> EagleHead:
    """Write the head of the small `model` for the large one, and return it. Raises `CannotWiden`."""
    small = EagleCheckpoint(source).load(target=TargetCheckpoint(model))
    narrow = _checked(small.config)
    config = wide_head_config(narrow, shape, DecoderShape.of_model(json.loads((model / "config.json").read_text())))
    config = replace(config, target=str(wide_model.resolve()))
    wide = EagleHead(config, small.token_ids, replace(IN_FP32, dtype=dtype))
    fill(wide.slots(), wide_head_tensors(small, shape, device, dtype))
    save_head(wide, folder)
    return wide.eval()


def _checked(config: LayeredShape) -> HeadConfig:
    """The configuration of a head that can be widened. Raises `CannotWiden` for another."""
    if not isinstance(config, HeadConfig):
        raise CannotWiden("an MTP module is part of its target")
    biased = config.fc_bias or config.qkv_bias or config.o_bias or config.mlp_bias
    if config.kind != "eagle3" or config.num_layers != 1 or biased or config.qk_norm or config.norm_before_fc:
        raise CannotWiden("only EAGLE-3 heads of one plain layer can be widened")
    if config.hidden_size != config.target_hidden_size:
        raise CannotWiden("the head is not as wide as its target")
    return config


def wide_head_config(config: HeadConfig, shape: DecoderShape, small_model: DecoderShape) -> HeadConfig:
    """The head's configuration in the large shape. If it reads the state after the last norm, it still does."""
    layers = config.layers_of(small_model.layers)
    return replace(
        config,
        hidden_size=shape.hidden,
        target_hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / shape.hidden,
        feature_layers=tuple(shape.layers if layer == small_model.layers else layer for layer in layers),
    )


def wide_head_tensors(small: EagleHead, shape: DecoderShape, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of the large head on the CPU, its embedding included."""
    state = small.weights()
    features = small.config.num_features
    widening = Widening(DecoderShape.of_head(_checked(small.config)), replace(shape, layers=1), device, dtype)
    layer = "layers.0."

    def get(name: str) -> Tensor:
        return state[f"{layer}{_module(name)}.weight"]

    reads = widening.side_by_side(features)
    fused = widening.matrix(state["fc.weight"], (shape.hidden, features * shape.hidden), widening.live, reads, reads)
    tensors = {f"{layer}{_module(name)}.weight": one for name, one in widening.attention(get, parts=2).items()}
    tensors |= {f"{layer}{_module(name)}.weight": one for name, one in widening.mlp(get).items()}
    tensors |= {name: widening.norm(one) for name, one in state.items() if one.ndim == 1}
    tensors["fc.weight"] = fused
    tensors["embed_tokens.weight"] = widening.embedding(state["embed_tokens.weight"])
    tensors["lm_head.weight"] = widening.lm_head(state["lm_head.weight"])
    return {name: one.cpu() for name, one in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the small model, or its name")
    parser.add_argument("head", help="folder of its EAGLE-3 head, or its name")
    parser.add_argument("out", type=Path, help="folder of the large model")
    parser.add_argument("out_head", type=Path, help="folder of its head")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    begin, shape, dtype = time.perf_counter(), SHAPES[options.shape], getattr(torch, options.dtype)
    model = Path(resolve(options.model))
    written = widen_model(model, options.out, shape, options.device, dtype)
    widen_head(head_source(options.head), model, options.out_head, options.out, shape, options.device, dtype)
    show(f"{written / 1e9:.2f} GB of weights and a head in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
