"""Communication of one service's processes: length-prefixed frames on a socket pair, and an outbox for it."""
