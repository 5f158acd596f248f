"""Services on this machine: their models, processes, GPUs and supervision."""
