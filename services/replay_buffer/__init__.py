"""The replay-buffer: groups of experiences kept for replay, and a queue that hands out fresh ones once."""
