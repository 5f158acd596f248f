"""Log-probabilities of the tokens that a pass generated, and the most probable ones beside them."""

from tree_kernels.logprobs.dispatch import DeviceLogprobs
from tree_kernels.logprobs.layout import read_logprobs

__all__ = ["DeviceLogprobs", "read_logprobs"]
