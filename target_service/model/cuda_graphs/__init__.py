"""Passes captured as CUDA graphs: their sizes, how a step fills one, and which are captured at start."""
