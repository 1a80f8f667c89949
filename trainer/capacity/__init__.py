"""The capacity of a run: the bytes and seconds that it takes, and the bytes that its machines have."""
