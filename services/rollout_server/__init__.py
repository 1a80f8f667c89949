"""The rollout-server: one engine per node, and on node 0 the router in front of all of them."""
