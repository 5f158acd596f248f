"""Data-parallel training on several devices of one machine, with a process for each device."""
