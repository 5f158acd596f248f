"""The gRPC service: requests checked and translated, events streamed. No algorithm lives here."""
