"""A neural drafter's passes as CUDA graphs: whole trees in one launch."""
