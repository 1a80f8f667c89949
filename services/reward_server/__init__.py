"""The reward-server: scores answers against ground truths.

``app`` has the routes, and ``scoring`` combines the parts of a reward. ``answers`` finds the answer in a response and
compares plain numbers exactly. Other answers go through ``pool`` to ``worker`` processes, where
``verifier`` calls math-verify, and ``code`` runs programs in boxes.
"""
