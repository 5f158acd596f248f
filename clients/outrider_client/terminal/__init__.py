"""Shared by the commands: settings, colours, line input, and progress display."""
