"""docs/results.md, the evidence of what training learns, and the data behind it: ``python -m benchmarks.results``.

A part of the page is a ``Part`` (``runs.py``) that ``PARTS`` in ``__main__.py`` names. It has a title, its runs in the
order in which they are made, the text of its section, and its sentences of the summary. Order runs seed by seed, so
that an interruption leaves all variants with the same seeds.

A ``Run`` has a task, a variant, a seed and settings, and a function ``train`` that makes its ``Result``:

- ``in_process.train`` runs the trainer's update, the buffer's draw and the embedded engine in this process, on one of
  the tasks of ``tasks.py``, in 10 to 20 processor seconds for the tiny model.
- ``job_runs.train``, by ``functools.partial`` with the file of a job group and its numbers of nodes, runs the whole job
  group under the local runner, in 20 to 40 processor seconds for the tiny model.
- A module may give another function from ``Run`` to ``Result``.

``runs.py`` makes the runs that docs/results/PART.jsonl lacks and adds each as a line when it ends. A line whose
settings are no longer those of the part is ignored and made again. ``comparisons.py`` tests whether two variants are
equal and makes tables; ``plots.py`` draws.
"""
