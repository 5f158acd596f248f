"""A scheduled step as work of a device: its batch, the executors that run it, and what the device chooses by itself."""
