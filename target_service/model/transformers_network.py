"""A transformers model as a runner's network, for families that have no entry in `tree_models.families`.

Its own code runs, with our attention over the paged cache in place of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from outrider.errors import NotSupported
from target_service.model.support import ModelRefused, kv_shape, longest_context
from tree_kernels.compiled_layers import compile_layer, uncompiled
from tree_models.foreign_attention import SeenShapes, attend_foreign
from tree_models.layers.decoder import Tap
from tree_models.layers.linear import PackedWeight
from tree_models.layers.paged import CacheShape, PagedPass, UncachedPass
from tree_models.slots import Copy, TensorSpec, WeightSlot, in_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "outrider_tree"
# The `step` that a thread computes, for models whose layers do not hand keyword arguments on to their attention.
_computing = threading.local()


# Not compiled: layers differ in it, and not in the parts around it.
@uncompiled
def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    outrider_step: PagedPass | UncachedPass | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; see `attend_foreign`."""
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise ModelRefused("a mask of its own, capped scores or attention sinks are not served")
    outrider_step = outrider_step or getattr(_computing, "step", None)
    assert outrider_step is not None, "attention runs in a pass"
    return attend_foreign(module, query, key, value, scaling, outrider_step), None


class TransformersNetwork:
    """See `target_service.model.network.TargetNetwork`. The model is changed for good: it attends over pages."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        _hold_frequencies(model)
        # Its import takes seconds, which models with layers of ours do not need.
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, attend)
        model.set_attn_implementation(ATTENTION)
        self._cache_shape = self._seen_shape()

    @torch.inference_mode()
    def _seen_shape(self) -> CacheShape:
        """What one layer caches of a token; of the configuration, where the model does not hand keys to our attention.
        Raises `ModelRefused` where layers differ."""
        seen, token = SeenShapes(), torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            self(token, token, seen)
        except torch.OutOfMemoryError:
            raise
        # The check at load reports what else is wrong with it.
        except Exception:
            seen.by_layer.clear()
        shapes = set(seen.by_layer.values())
        if len(shapes) > 1:
            kind = self.model.config.model_type
            raise ModelRefused(f"{kind}: layers with keys and values of several widths are not served")
        return shapes.pop() if shapes else kv_shape(self.model.config)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def layer_count(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def recurrent_layers(self) -> None:
        """Families without an entry that have some are refused."""
        return None

    @property
    def windows(self) -> Sequence[int | None]:
        """By layer, how many tokens a row sees: all."""
        return [None] * self.layer_count

    @property
    def longest_context(self) -> int:
        return longest_context(self.model.config)

    @property
    def latent(self) -> bool:
        return False

    @property
    def cache_shapes(self) -> Sequence[CacheShape]:
        return [self._cache_shape] * self.layer_count

    def __call__(
        self, token_ids: Tensor, positions: Tensor, step: PagedPass | UncachedPass, rows: Tensor | int = 0
    ) -> Tensor:
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None]}
        _computing.step = step
        try:
            output = self.model(**inputs, use_cache=False, logits_to_keep=rows, outrider_step=step)
        finally:
            _computing.step = None
        return cast(Tensor, output.logits[0])

    def tap(self, layer: int, keep: Tap) -> Callable[[], None]:
        inner = getattr(self.model, "model", None)
        layers, norm = getattr(inner, "layers", None), getattr(inner, "norm", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
            raise NotSupported(f"the layers of a {self.model.config.model_type} cannot be found, and so not be read")

        # The compiler would make a version of a layer for each hooked layer.
        @uncompiled
        def keep_rows(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # [1, R, W]
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            keep(hidden[0])

        module = norm if layer == len(layers) else layers[layer]
        return module.register_forward_hook(keep_rows).remove

    def slots(self, copy: Copy) -> list[WeightSlot]:
        ties: Mapping[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        return list(_slots(self.model, "", ties, copy))

    def compile_layers(self) -> None:
        """Compile each layer and the last norm, where they have the names of nearly every family."""
        inner: Any = self.model.base_model
        if hasattr(inner, "layers") and hasattr(inner, "norm"):
            for layer in (*inner.layers, inner.norm):
                compile_layer(layer)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference in bf16 on a CPU; see `PackedWeight`. Input [..., in], output [..., out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in] and `bias` [out] as in `nn.Linear`."""
        super().__init__()
        self.packed = PackedWeight(*weight.shape, bias=bias is not None)
        self.packed.pack([weight.detach()], [] if bias is None else [bias.detach()])

    def forward(self, rows: Tensor) -> Tensor:
        return self.packed.product(rows)


def pack_linears(model: PreTrainedModel) -> None:
    """Replace every `nn.Linear` of `model`, in place and for good. For inference only."""
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                # Subclasses compute something else.
                if type(child) is nn.Linear:
                    setattr(parent, name, PackedLinear(child.weight, child.bias))


def _slots(module: nn.Module, path: str, ties: Mapping[str, str], copy: Copy) -> Iterator[WeightSlot]:
    if isinstance(module, PackedLinear):
        rows = (module.packed.out_features,)
        for slot in module.packed.slots([path.removesuffix(".")], rows, copy, None):
            yield WeightSlot({name: _tied(spec, name, ties) for name, spec in slot.specs.items()}, slot.write)
        return
    memories = dict(module.named_parameters(recurse=False))
    kept = module._non_persistent_buffers_set
    buffers = ((name, one) for name, one in module.named_buffers(recurse=False) if name not in kept)
    memories |= {name: buffer for name, buffer in buffers if buffer.is_floating_point()}  # type: ignore[misc]
    for name, memory in memories.items():
        slot = in_place(f"{path}{name}", memory.detach(), copy)
        yield WeightSlot({own: _tied(spec, own, ties) for own, spec in slot.specs.items()}, slot.write)
    for name, child in module.named_children():
        yield from _slots(child, f"{path}{name}.", ties, copy)


def _tied(spec: TensorSpec, name: str, ties: Mapping[str, str]) -> TensorSpec:
    return TensorSpec(spec.shape, spec.dtype, ties.get(name, ""))


def _hold_frequencies(model: PreTrainedModel) -> None:
    """Keep every rotary module's frequencies as they are now, before any long text was run. transformers looks at the
    greatest position of every pass to choose some of them, which a captured pass cannot wait for. Within the length for
    which a model is served (`support.longest_context`) they are always the same."""

    def held(kind: str) -> str:
        # As transformers names frequencies that a length changes, and those that none does.
        return "default" if kind in ("dynamic", "longrope") else kind

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = held(kind)
        elif isinstance(kind, dict):
            module.rope_type = {layer: held(one) for layer, one in kind.items()}
