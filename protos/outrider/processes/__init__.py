"""How the processes of one service speak: length-prefixed frames on a socket that they share, and an outbox for it."""
