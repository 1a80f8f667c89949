"""docs/results.md, the evidence of what training learns, and the data behind it: ``python -m benchmarks.results``.

An experiment is a part of the page. It takes a ``Part`` in ``PARTS`` of ``experiments.py`` (tasks, seeds, variants),
and a section of ``page.md`` whose heading has its name in braces. The section begins with its sentences of the summary,
as a list. ``{function: text | text}`` stands for the text that a function of ``FIGURES`` in ``__main__.py``, or one of
the part's own, returns for the part's results.

A ``Run`` has a task, a variant, a seed and settings, and a function ``train`` that makes its ``Result``:

- ``in_process.train`` runs the trainer's update, the buffer's draw and the embedded engine in this process, on one of
  the tasks of ``tasks.py``, in 10 to 20 processor seconds for the tiny model.
- ``job_runs.train``, by ``functools.partial`` with the file of a job group and its numbers of nodes, runs the whole job
  group under the local runner, in 20 to 40 processor seconds for the tiny model.
- An experiment may have another function from ``Run`` to ``Result``.

``runs.py`` makes the runs that docs/results/PART.jsonl lacks and adds each as a line when it ends. A line whose
settings are no longer those of the part is ignored and made again. ``comparisons.py`` tests whether two variants are
equal and makes tables; ``plots.py`` draws.
"""
