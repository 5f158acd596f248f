"""Tree attention over a paged KV cache, lossless verification, and the move of accepted keys and values."""

import os

# A product and its sum are rounded once, as the kernels were timed and compared with their definitions. Triton 3.9
# warns where nothing is set, since 3.10 will round twice there. The user's setting wins.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
