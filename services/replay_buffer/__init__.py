"""The replay-buffer: groups of experiences kept for replay, and a queue that hands out fresh ones once.

``app`` has the routes. Behind them ``store`` adds and draws, ``fresh`` leases, ``archive`` saves and restores, each by
changes to one ``state``. In memory that is a ``shelf`` (with its ``sumtree``) and a ``queue``; on disk it is
``storage``, where ``packing`` makes groups small. ``snapshots`` says what a saved state consists of.
"""
