"""What several benchmarks use: the machine's description, prompts, random models, plots."""
