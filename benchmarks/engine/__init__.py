"""The engine and its steps, without gRPC."""
