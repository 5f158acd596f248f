"""Tree attention over a paged KV cache, lossless verification, and the move of accepted keys and values."""
