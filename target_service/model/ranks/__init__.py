"""A model over several processes: the leading rank runs the engine, the others follow its passes."""
