"""Measures throughput, latency and acceptance, by task and concurrency, with and without speculation."""
