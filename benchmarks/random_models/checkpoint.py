"""A checkpoint without weights on a disk: they are drawn where they are read, for shapes of real size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.random_models.weights import fill
from outrider.checkpoints.causal_lm import read_configuration
from outrider.checkpoints.folder import read_config
from target_service.model.loading import loader
from target_service.model.support import description_of, has_latents, text_part
from tree_models.layers.decoder import Decoder
from tree_models.layers.placing import Placement
from tree_models.slots import specs_of
from tree_models.weights.checkpoint import StoredTensor


@dataclass(frozen=True)
class RandomCheckpoint:
    """A folder with config.json and a tokenizer, and every tensor that its model has. Stands in for `Checkpoint`."""

    folder: Path
    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]
    layers: int
    embedding: str
    for_gpu: bool = False
    gpu: int = 0  # its number, since threads that read weights have none of their own

    @classmethod
    def of_folder(cls, folder: str | Path, formats: Collection[str] = ()) -> RandomCheckpoint:
        """See `Checkpoint.of_folder`."""
        config, settings = read_config(Path(folder), formats), text_part(read_configuration(Path(folder)))
        description = description_of(settings)
        assert description is not None, "random weights are for families with an entry"
        place = Placement(torch.device("meta"), torch.bfloat16, latent=has_latents(settings))
        specs = specs_of(Decoder(description.spec, description.names, place).slots())
        stored = {name: StoredTensor(spec.shape, "BF16") for name, spec in specs.items()}
        embedding = f"{description.names.embedding}.weight"
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return cls(Path(folder), config, stored, settings.num_hidden_layers, embedding, gpu=gpu)

    def read(self, name: str) -> Tensor:
        """See `TensorSource.read`: where a model on a GPU needs it, on that."""
        device = torch.device("cuda", self.gpu) if self.for_gpu else torch.device("cpu")
        weight = torch.empty(self.stored[name].shape, dtype=torch.bfloat16, device=device)
        of_output = name.endswith("lm_head.weight") and self.embedding in self.stored
        fill(name, weight, self.layers, self.read(self.embedding) if of_output else None)
        return weight


@contextmanager
def random_weights() -> Iterator[None]:
    """Models that are loaded meanwhile get random weights; their folders need none."""
    with patch.object(loader, "Checkpoint", RandomCheckpoint):
        yield
