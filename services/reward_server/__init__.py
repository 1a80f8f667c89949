"""The reward-server: scores answers against ground truths.

``app`` has the routes, and ``scoring`` combines the parts of a reward. ``answers`` finds the answer in a response and
compares plain numbers exactly. Other answers go through ``pool`` to ``worker`` processes, where
``verifier`` calls math-verify. ``code`` runs programs in boxes, and ``reward_model`` a neural reward model.
"""
