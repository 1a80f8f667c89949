"""Rollout engines as the rest of the system sees them, and the router in front of them."""
