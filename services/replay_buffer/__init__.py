"""The replay buffer: groups of experiences kept for replay, and a queue that hands out fresh groups once.

Everything is rows of one SQLite file (``database``). ``store`` adds groups and samples them through ``priorities``, an
index in memory; ``fresh_queue`` leases fresh groups to consumers; ``snapshots`` saves and restores the contents;
``packing`` makes groups small; ``app`` has the routes.
"""
