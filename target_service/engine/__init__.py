"""The engine loop: its thread, its steps, and what they report."""
