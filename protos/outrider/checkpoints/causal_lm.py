"""Loads a causal language model by transformers, from a checkpoint that is read whole.

transformers fills what is missing with random numbers, leaves out what it does not know, and says so in a log. Here
that report is a refusal.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from outrider.checkpoints.causal_lm_names import causal_lm_names
from outrider.checkpoints.folder import Checkpoint
from outrider.checkpoints.formats import is_plain_float
from outrider.checkpoints.headers import TensorEntry
from outrider.checkpoints.refusal import CheckpointRefused, first_line, some
from outrider.checkpoints.regular_files import read_json_object
from outrider.checkpoints.tensors import TensorOnDisk, read_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
# A KeyError that is shorter has a name alone.
_NAME = 60
# Buffers that are computed; older writers stored them.
_COMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|position_ids|masked_bias)")


# Entries that are not read: types that PyTorch may not know, a padding token that the vocabulary may not have.
_MEANINGLESS = {
    "model_type", "auto_map", "dtype", "torch_dtype", "pad_token_id", "transformers_version", "return_dict",
    "use_cache", "output_attentions", "output_hidden_states", "attn_implementation", "_attn_implementation",
}  # fmt: skip


def read_configuration(folder: Path) -> PretrainedConfig:
    """A folder's config.json by transformers' class for it. Raises `CheckpointRefused` in one line."""
    config = configuration_of(read_json_object(folder / "config.json"))
    _check_architecture(config)
    return config


def configuration_of(entries: Mapping[str, Any]) -> PretrainedConfig:
    """The entries of a config.json by transformers' class for them. Raises `CheckpointRefused` in one line."""
    try:
        config = _configuration(entries)
        text = config.get_text_config()
    except CheckpointRefused:
        raise
    # A foreign configuration may make transformers raise anything.
    except Exception as error:
        raise CheckpointRefused(f"config.json cannot be used: {said(error)}") from None
    if not isinstance(text, PretrainedConfig):
        raise CheckpointRefused(f"config.json has a text_config, which a {config.model_type} has not")
    return config


def _configuration(named: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration of the entries of a config.json. The model's own code is not run."""
    family = str(named.get("model_type"))
    # Configurations that are another family's by a name that transformers does not know.
    family = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}.get(family, family)
    if named.get("auto_map") and family not in CONFIG_MAPPING_NAMES:
        raise CheckpointRefused("its config.json asks for custom code, which is never run")
    if family == "mistral" and "layer_types" in named:
        # As transformers has it.
        family = "ministral"
    entries = _meant(named)
    if isinstance(text := named.get("text_config"), Mapping):
        # Every vocabulary has the padding token, which nobody uses.
        entries["text_config"] = _meant(text) | {"model_type": text.get("model_type"), "pad_token_id": 0}
        if text.get("model_type") is None:
            del entries["text_config"]["model_type"]
    if family == "dbrx" and "rope_parameters" not in entries and "rope_theta" in (named.get("attn_config") or ()):
        # Published there, where transformers' rotary embedding does not look for it.
        entries.setdefault("rope_theta", named["attn_config"]["rope_theta"])
    config: PretrainedConfig = AutoConfig.for_model(family, **entries)
    # A family's own may be outside of the vocabulary too.
    try:
        config.pad_token_id = None
    except StrictDataclassError:
        # It always is a number there.
        config.pad_token_id = 0
    return config


def _meant(named: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that mean something here: not those without a meaning for a model that is read, whose values may yet
    be refused. Weights have the type that their headers name."""
    return {
        name: entry
        for name, entry in named.items()
        if name not in _MEANINGLESS and not (name == "quantization_config" and not entry)
    }


def _check_architecture(config: PretrainedConfig) -> None:
    """Raise `CheckpointRefused` for a model of another class than transformers has for its family: what has the same
    tensors may still compute something else."""
    named, kind = config.architectures, config.model_type
    usual = causal_lm_names().get(kind)
    # Others are recognised by what they take, and of those with more than text a part may be served.
    if not named or not isinstance(usual, str) or config.get_text_config() is not config:
        return
    # Names of the same classes, in older configurations and in those of `_SAME_AS`.
    if named[0] not in (usual, "LLaMAForCausalLM", "KimiK2ForCausalLM", "MiMoForCausalLM", "MPTForCausalLM"):
        raise CheckpointRefused(f"{named[0]} is no causal language model that is served: a {kind} is a {usual}")


def load_causal_lm(checkpoint: Checkpoint, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the CPU, in `dtype`, with every tensor of the checkpoint read, or ignored by a rule.

    Ignored are MTP modules, buffers that are computed, and what the family's class in transformers names. Raises
    `CheckpointRefused`, naming the first ten, where tensors are missing, left over, of another shape or no floating
    point numbers, or where tied ones differ; and where the model cannot be built from its config.json.
    """
    skeleton = _skeleton(config)
    _check_numel(skeleton, checkpoint)
    used = _used(checkpoint.tensors, skeleton)
    _check_types(used.values(), skeleton)
    _check_names(used, skeleton)
    _check_experts(used)
    _check_ties(used, skeleton)
    slices: Any = {name: TensorOnDisk(entry) for name, entry in used.items()}
    try:
        with _quiet():
            model, report = type(skeleton).from_pretrained(
                None,
                config=config,
                state_dict=slices,
                dtype=dtype,
                generation_config=read_generation_config(checkpoint.folder),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (CheckpointRefused, torch.OutOfMemoryError, MemoryError):
        raise
    # Conversions of transformers raise anything where tensors do not fit each other.
    except Exception as error:
        raise CheckpointRefused(f"its weights do not fit its config.json: {said(error)}") from error
    _check_report(report, model)
    loaded: PreTrainedModel = model
    return loaded


def _skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model without memory for its tensors."""
    # Its import takes seconds, which models with layers of ours do not need.
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    # A foreign configuration may make transformers raise anything.
    except Exception as error:
        raise CheckpointRefused(f"no model can be built from its config.json: {said(error)}") from None
    return model


def _check_numel(skeleton: PreTrainedModel, checkpoint: Checkpoint) -> None:
    described = sum(tensor.numel() for tensor in skeleton.parameters())
    # A model that is so many times as large as its files is not theirs: what is missing would be made before it is
    # named.
    if described > 2 * checkpoint.numel:
        raise CheckpointRefused(
            f"config.json describes a model of {described:,} parameters, and its files hold {checkpoint.numel:,}"
        )


def _used(tensors: Mapping[str, TensorEntry], skeleton: PreTrainedModel) -> dict[str, TensorEntry]:
    """The tensors that no rule leaves out; see `load_causal_lm`. Raises `CheckpointRefused` for layers that the model
    has not."""
    prefix, layers = f"{skeleton.base_model_prefix}.", int(skeleton.config.num_hidden_layers)
    own = {each for name in skeleton.state_dict() for each in (name, name.removeprefix(prefix))}
    # Its patterns for layers of one published size are left to the rule for MTP modules.
    patterns = [one for one in skeleton._keys_to_ignore_on_load_unexpected or () if "layers" not in one]
    used, more = {}, set()
    for name, entry in tensors.items():
        # MTP modules, which draft (`draft_service.mtp`) and are no part of the model.
        if name not in own and (_COMPUTED.fullmatch(name) or re.match(r"(model\.)?mtp(_layers)?\.", name)):
            continue
        if name not in own and any(re.search(pattern, name) for pattern in patterns):
            continue
        layer = re.fullmatch(r"((?:model\.)?layers\.(\d+)\.).+", name)
        if layer is not None and int(layer[2]) >= layers:
            # What joins embedding and state in an MTP module that stands behind a model's layers, as in DeepSeek-V3 and
            # GLM-4.5.
            if f"{layer[1]}eh_proj.weight" not in tensors:
                more.add(name)
            continue
        used[name] = entry
    if more:
        raise CheckpointRefused(f"config.json has {layers} layers, and left over are {some(more)}")
    return used


def _check_types(entries: Iterable[TensorEntry], skeleton: PreTrainedModel) -> None:
    own = skeleton.state_dict()
    wrong = {
        f"{entry.name} ({entry.dtype})"
        for entry in entries
        if not is_plain_float(entry) and not (entry.name in own and not own[entry.name].is_floating_point())
    }
    if wrong:
        raise CheckpointRefused(f"tensors are no floating point numbers of 16 or 32 bits: {some(wrong)}")


def _check_names(used: Iterable[str], skeleton: PreTrainedModel) -> None:
    """Raise `CheckpointRefused` for a tensor under two names: transformers takes names with and without the body's."""
    prefix = f"{skeleton.base_model_prefix}."
    names = set(used)
    if twice := {name for name in names if f"{prefix}{name}" in names}:
        raise CheckpointRefused(
            f"tensors are there twice, with and without {prefix!r} before their names: {some(twice)}"
        )


def _check_experts(used: Mapping[str, TensorEntry]) -> None:
    """Raise `CheckpointRefused` for an expert that others of its layer have and one has not, and for one of another
    shape: transformers stacks those that it finds."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    shapes: dict[tuple[str, str], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for name, entry in used.items():
        if found := _EXPERT.fullmatch(name):
            layer, number, rest = found[1], int(found[2]), found[3]
            numbers[layer, rest].add(number)
            counts[layer] = max(counts[layer], number + 1)
            shapes[layer, rest][entry.shape] += 1
    # Numbers that are looked for, where a name may have any.
    missing = {
        f"{layer}.{number}.{rest}"
        for (layer, rest), there in numbers.items()
        if len(there) < counts[layer]
        for number in range(min(counts[layer], 1 << 12))
        if number not in there
    }
    if missing:
        raise CheckpointRefused(f"experts are missing: {some(missing)}")
    usual = {part: counter.most_common(1)[0][0] for part, counter in shapes.items()}
    odd = {
        f"{name} is {list(entry.shape)}, others {list(usual[found[1], found[3]])}"
        for name, entry in used.items()
        if (found := _EXPERT.fullmatch(name)) and entry.shape != usual[found[1], found[3]]
    }
    if odd:
        raise CheckpointRefused(f"experts of one layer differ in shape: {some(odd)}")


def _check_ties(used: dict[str, TensorEntry], skeleton: PreTrainedModel) -> None:
    """Raise `CheckpointRefused` where tensors that the model keeps once are there twice and differ."""
    ties: dict[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}
    prefix = f"{skeleton.base_model_prefix}."
    for name, source in ties.items():
        one, other = (used.get(each) or used.get(each.removeprefix(prefix)) for each in (name, source))
        if one is None or other is None:
            continue
        if one.shape != other.shape or not torch.equal(read_tensor(one), read_tensor(other)):
            raise CheckpointRefused(
                f"{one.name} differs from {other.name}, and config.json ties them: set tie_word_embeddings to false, "
                "or remove one of them"
            )


def _check_report(report: Any, model: PreTrainedModel) -> None:
    wrong = []
    if missing := report["missing_keys"]:
        wrong.append(f"missing are {some(missing)}")
    if unexpected := report["unexpected_keys"]:
        wrong.append(f"left over are {some(unexpected)}")
    if mismatched := report["mismatched_keys"]:
        shapes = {f"{name} is {list(found)}, expected {list(own)}" for name, found, own in mismatched}
        wrong.append(f"of another shape are {some(shapes)}")
    wrong += [first_line(ValueError(message)) for message in report["error_msgs"]]
    # Tensors that nothing was written to and nobody reported.
    if empty := {name for name, tensor in model.state_dict().items() if tensor.is_meta} - set(missing):
        wrong.append(f"never filled are {some(empty)}")
    if wrong:
        raise CheckpointRefused(f"its tensors are not those of its config.json: {'; '.join(wrong)}")


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """A folder's generation_config.json; None where there is none. Raises `CheckpointRefused` in one line."""
    if not (folder / "generation_config.json").exists():
        return None
    ends = read_json_object(folder / "generation_config.json").get("eos_token_id")
    if not all(type(one) is int for one in (ends if isinstance(ends, list) else [ends])) and ends is not None:
        raise CheckpointRefused(f"generation_config.json has eos_token_id {str(ends)[:40]}, expected ids of tokens")
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    # A broken file makes transformers raise anything.
    except Exception as error:
        raise CheckpointRefused(f"generation_config.json cannot be used: {said(error)}") from None


def said(error: Exception) -> str:
    """The first sentence of an error of transformers or PyTorch, whose first line may only announce others."""
    if isinstance(error, KeyError) and len(str(error)) < _NAME:
        # Of a table by names.
        return f"{error} is not known"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = [f"{lines[0]} {lines[1]}"]
    return (lines[0] if lines else type(error).__name__).partition(". ")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' tables about tensors are left out: their content is the refusal."""
    logger = logging.getLogger("transformers.modeling_utils")
    # Not by its level, by which transformers chooses what it checks.
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
