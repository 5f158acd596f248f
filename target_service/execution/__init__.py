"""A scheduled step as work of a device: its batch, the executors that run it, and the rows that the device chooses."""
