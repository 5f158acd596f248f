"""A runner's network made ready for captured steps."""

from __future__ import annotations

from target_service.model.network import TargetNetwork
from target_service.model.transformers_network import TransformersNetwork
from tree_kernels.ahead import AheadCompiler
from tree_models.fused.preparing import LayerOptions, prepare_decoder
from tree_models.layers.decoder import Decoder


def prepare_network(network: TargetNetwork, options: LayerOptions, ahead: AheadCompiler | None = None) -> int:
    """Prepare the layers of a network, in place and for good. Returns how many are computed in fused form.

    Raises `ValueError` where a layer cannot be made `invariant`.
    """
    if isinstance(network, Decoder):
        return prepare_decoder(network, options, ahead)
    assert isinstance(network, TransformersNetwork), "there is no other network"
    if options.invariant:
        kind = network.model.config.model_type
        raise ValueError(f"{kind}: its layers cannot be made independent of the batch")
    if options.compiled:
        network.compile_layers()
    return 0
