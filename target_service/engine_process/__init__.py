"""The engine in a separate process: the client in the serving process, the messages, and the engine's side."""
