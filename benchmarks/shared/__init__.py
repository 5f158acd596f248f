"""What several benchmarks share: options and reports, prompts, processes, random models, plots."""
