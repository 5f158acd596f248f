"""The time that the engine's host takes, without a device, and the time of long prompts with one."""
