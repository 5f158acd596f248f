"""The verifier's side of a `Propose` stream: link, ids and credit, growing trees, latency of answers."""
