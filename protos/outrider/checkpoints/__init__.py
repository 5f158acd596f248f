"""A model's folder read whole or refused in one line: its files, headers, format and config.json. Imports nothing else
of ours, and PyTorch only where tensors are read."""
