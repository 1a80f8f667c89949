"""The reward-server: scores answers against ground truths.

``app`` has the routes and ``scoring`` puts the parts of a reward together. ``answers`` and ``numbers`` decide what
exact arithmetic can; the rest goes through ``pool`` to ``worker`` processes, where ``verifier`` calls math-verify.
"""
