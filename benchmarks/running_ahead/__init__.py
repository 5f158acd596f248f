"""A draft that runs ahead of its target, simulated on recorded answers."""
