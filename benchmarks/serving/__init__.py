"""Services under load, beside vLLM."""
