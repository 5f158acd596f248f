"""The contract between draft, target and clients: messages, errors, noise, telemetry, and what all services share."""

__version__ = "0.1.0"
