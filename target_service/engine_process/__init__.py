"""The engine in a process of its own: the link to it, what travels, and the host at its other end."""
