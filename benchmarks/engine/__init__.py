"""The engine and its steps."""
