"""The target's side of a `Propose` stream: transport, ids and credit, and how long answers take."""
