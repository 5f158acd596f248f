"""The contract between draft, target and clients: nouns, errors, noise, names of telemetry. No torch, no servers."""

__version__ = "0.1.0"
