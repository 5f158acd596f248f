"""Several processes behind one port: a parent that accepts connections, and workers that answer on them."""
