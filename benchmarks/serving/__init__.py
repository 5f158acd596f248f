"""Services under load, and vLLM under the same load."""
