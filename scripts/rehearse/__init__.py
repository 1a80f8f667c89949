"""``grpo rehearse``: a launch tried on this machine, with a stand-in for its model."""
