"""Several devices of one machine that train the same weights, a process each: their group, and the processes."""
