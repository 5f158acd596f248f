"""Decoders of our own: described by data, one short file a family, every layer in a plain PyTorch form."""
