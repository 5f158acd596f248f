"""The time that the engine's host takes, without a device."""
