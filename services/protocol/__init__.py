"""Every type that crosses the wire between the components of the job group.

The unit is the *group*: one prompt with its G completions. It travels, is stored, is sampled and is dropped as one
record. Token ids are the truth; text is for people. A reward of None means "could not be scored" and is never 0.

Models refuse unknown fields only where a misspelling would change a result; records which come from older or other
clients may carry more than we read.
"""
