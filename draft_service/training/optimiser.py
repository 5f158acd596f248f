"""AdamW over fp32 master weights, and the schedule of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def rate_at(fraction: float, highest: float, warmup: float) -> float:
    """Learning rate when `fraction` of the training is done: a linear warm-up, then half a cosine."""
    if fraction < warmup:
        return highest * max(fraction / warmup, 1e-3)
    done = min(1.0, (fraction - warmup) / max(1e-9, 1.0 - warmup))
    # The last learning rate as a share of the highest. Chosen, not measured: between 0, where the last steps have no
    # effect, and the 0.1 that is usual in pre-training on much more text.
    return highest * (0.02 + (1 - 0.02) * 0.5 * (1 + math.cos(math.pi * done)))


class MasterAdamW:
    """Optimises fp32 masters of a module's trainable weights, and copies them to the module in its own type."""

    def __init__(
        self,
        module: nn.Module,
        *,
        weight_decay: float,
        clip: float,
        masters: nn.Module,
        average: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`masters` is the same module in fp32, whose values are copied. `average` replaces a vector of all gradients,
        [weights] fp32, by the mean over several devices."""
        self._names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        own, wide = dict(module.named_parameters()), dict(masters.named_parameters())
        self._weights: list[Tensor] = [own[name] for name in self._names]
        device = self._weights[0].device
        self._masters = [wide[name].detach().float().to(device, copy=True) for name in self._names]
        groups = [
            {"params": [one for one in self._masters if one.ndim > 1], "weight_decay": weight_decay},
            {"params": [one for one in self._masters if one.ndim <= 1], "weight_decay": 0.0},
        ]
        # EAGLE-3's.
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
        self._clip = clip
        self._average = average
        self._publish()

    def step(self, rate: float) -> Tensor:
        """Apply the module's gradients and clear them. Returns their norm, on the device."""
        for master, gradient in zip(self._masters, self._gradients(), strict=True):
            master.grad = gradient
        for weight in self._weights:
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._clip, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for master in self._masters:
            master.grad = None
        self._publish()
        return norm

    def _gradients(self) -> list[Tensor]:
        """The gradients in fp32, averaged over the devices."""
        own = [weight.grad for weight in self._weights if weight.grad is not None]
        assert len(own) == len(self._weights), "a trained weight has no gradient"
        if self._average is None:
            return [gradient.float() for gradient in own]
        # One vector: an exchange for each weight would wait once for each.
        flat = torch.empty(sum(one.numel() for one in own), device=own[0].device)
        pieces = [
            piece.view_as(one) for piece, one in zip(torch.split(flat, [g.numel() for g in own]), own, strict=True)
        ]
        torch._foreach_copy_(pieces, own)
        self._average(flat)
        return pieces

    def share(self, share: Callable[[Tensor], None]) -> None:
        """Take over the masters of another process: `share` replaces a tensor by that process's."""
        for master in self._masters:
            share(master)
        self._publish()

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, on the CPU, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self._names, self._masters, strict=True):
            tensors[f"master.{name}"] = master
            for key, value in self._adam.state[master].items():
                tensors[f"{key}.{name}"] = value
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
            moments = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
            self._adam.state[master] = {
                key: value.clone() if key == "step" and not master.is_cuda else value.to(master.device, copy=True)
                for key, value in moments.items()
            }
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        torch._foreach_copy_(self._weights, self._masters)
