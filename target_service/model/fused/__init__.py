"""Decoder layers made of few launches, in place of the modules of a transformers model."""
