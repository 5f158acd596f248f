"""What a request is while it runs: its sequence, its pages, who runs next, and when its output ends."""
