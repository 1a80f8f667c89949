"""The replay buffer: groups of experiences kept for replay, and a queue that hands out fresh groups once.

Everything is rows of one SQLite file (``database``). ``store`` adds groups, samples them through an index in memory,
and saves and restores the contents; ``fresh_queue`` leases fresh groups to consumers and admits collectors' prompts;
``app`` has the routes.
"""
