"""A neural drafter's passes as captured CUDA graphs: whole trees in one launch."""
