"""The verifier's side of a `Propose` stream: link, ids and credit, growing trees, and how long answers take."""
