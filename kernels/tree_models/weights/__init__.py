"""Reading checkpoints: one tensor at a time, every one of them known by name, and none missing."""
