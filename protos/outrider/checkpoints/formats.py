"""Quantised formats, recognised by config.json, by files beside it, and by names and types of tensors.

Served are matrices of 16 or 32 bits. What else a folder holds is named, since it would otherwise be read as plain
numbers, or left out and replaced by random ones. The marks are what each format's own writer puts there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.checkpoints.headers import TensorEntry
from outrider.checkpoints.regular_files import read_json_object

# By config.json's names, those that a target reads as plain numbers: `tree_models.weights.mxfp4`.
DEQUANTISED_FORMATS = ("mxfp4",)
# Files that only a quantised folder has, with the format that writes them where their content does not name one.
_SIDE_FILES = {
    "hf_quant_config.json": "ModelOpt",
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "quantization_config.json": "",
    "mlc-chat-config.json": "MLC",
    "smash_config.json": "Pruna",
    "qmodel.pt": "HQQ",
    "quanto_qmap.json": "quanto",
    "quantization_map.json": "quanto",
}
# Endings of tensors' names, in this order: the first that any name has.
_SUFFIXES = (
    (r"\.absmax|\.quant_map|\.quant_state\.\S+|\.nested_absmax|\.SCB|\.weight_format", "bitsandbytes"),
    (r"\.weight_scale_2", "NVFP4"),
    (r"\.weight_packed|\.weight_zero_point|\.weight_shape|\.bitmask|\.compressed", "compressed-tensors"),
    (r"\.centroids\.weight|\.res_centroids\.weight|\.centroids", "VPTQ"),
    (r"\.dense_weights|\.col_vals", "SpQR"),
    (r"\.tables2?", "HIGGS"),
    (r"\.forward_hadamard_matrix|\.dqweight", "FP-Quant"),
    (r"\.wscales|\.smooth_factor(_orig)?", "SVDQuant"),
    (r"\.trellis|\.suh|\.svh", "EXL3"),
    (r"\.q_weight|\.q_scale_max|\.q_groups", "EXL2"),
    (r"\.Qidxs(_\d+)?|\.SV|\.SU", "QuIP#"),
    (r"\.codebooks|\.codes", "AQLM"),
    (r"\.g_idx", "GPTQ"),
    (r"\.qweight|\.qzeros", "GPTQ or AWQ"),
    (r"\.W_q|\.W_q\.\S+", "HQQ"),
    (r"_blocks", "MXFP4"),
    (r"\.weight_scales", "EETQ"),
    (r"\.\w*weight_qdata", "torchao"),
    (
        r"\.weight_scale_inv|\.weight_scale|\.input_scale|\.input_scale_ub|\.activation_scale|\.k_scale|\.v_scale",
        "FP8",
    ),
    (r"\.weight:_?\S+|\.weight\._data", "torchao or quanto"),
    (r"\.scales|\.zeros", "scaled"),
)
# What scaled matrices are, by their type.
_WHOLE = {"I8": "INT8", "U8": "packed in bytes, as BitNet's", "I32": "packed in 32 bits"}


def quantised_format(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> str:
    """The name of the quantised format that a model is in; empty for plain weights. Raises `CheckpointRefused` where a
    file that would tell cannot be read."""
    return _by_config(config) or _by_side_files(folder) or _by_tensors(tensors)


def is_plain_float(entry: TensorEntry) -> bool:
    """Whether the tensor's values are floating point numbers of 16 bits or more."""
    return entry.dtype in ("F64", "F32", "F16", "BF16")


def _by_config(config: Mapping[str, Any]) -> str:
    for holder in (config, config.get("text_config")):
        if not isinstance(holder, Mapping):
            continue
        # MLX writes its settings under two keys, and no method.
        for key, unnamed in (("quantization", "MLX"), ("quantization_config", ""), ("compression_config", "")):
            if stated := holder.get(key):
                return (_method(stated) if isinstance(stated, Mapping) else "") or unnamed or "of some kind"
    return ""


def _method(stated: Mapping[str, Any]) -> str:
    """What a quantiser's settings call its method; empty where they do not."""
    found = (str(stated[key])[:40] for key in ("quant_method", "quant_algo") if stated.get(key))
    # Part of a line that is cut at its first end.
    named = [one if one.isprintable() else repr(one) for one in found]
    if not named and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        return "bitsandbytes"
    return ", ".join(dict.fromkeys(named))


def _by_side_files(folder: Path) -> str:
    for name, method in _SIDE_FILES.items():
        path = folder / name
        if not path.exists():
            continue
        if path.suffix != ".json":
            return f"{method}, as {name} tells"
        stated: Mapping[str, Any] = read_json_object(path)
        inner = stated.get("quantization")
        if name == "hf_quant_config.json" and isinstance(inner, Mapping):
            # ModelOpt also writes it where only the cache of keys and values is quantised.
            if not inner.get("quant_algo"):
                continue
            stated = inner
        named = _method(stated)
        method = method if method.casefold() == named.casefold() else ", ".join(filter(None, (method, named)))
        return f"{method or 'of some kind'}, as {name} tells"
    return ""


def _by_tensors(tensors: Mapping[str, TensorEntry]) -> str:
    # Thousands of layers and experts end alike.
    endings = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", ".".join(["", *name.split(".")[-3:]])): name for name in tensors}
    if scaled := next((name for name in endings.values() if name.endswith(".scales")), None):
        packed = tensors.get(scaled.removesuffix("scales") + "weight")
        if scaled.removesuffix("scales") + "biases" in tensors or (packed is not None and packed.dtype == "U32"):
            return f"MLX, as {scaled} tells"
    for pattern, method in _SUFFIXES:
        ending = re.compile(rf".*({pattern})")
        if found := next((name for end, name in endings.items() if ending.fullmatch(end)), None):
            if method == "FP8" and (weight := tensors.get(f"{found.rpartition('.')[0]}.weight")) is not None:
                # Scales have these names beside whole numbers too.
                method = _WHOLE.get(weight.dtype, method)
            return f"{method}, as {found} tells"
    for entry in tensors.values():
        if entry.dtype.startswith(("F8_", "F6_", "F4")):
            return f"FP{entry.dtype[1]}, as {entry.name} is {entry.dtype}"
    return ""
