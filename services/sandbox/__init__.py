"""Runs untrusted code where it can harm nothing: boxes, what isolates them, and a pool of warm boxes.

``box`` is the interface. ``backends`` isolates a box by bubblewrap or Landlock, and ``probe`` attacks each before it is
used. ``zygote`` is the program inside a box, which forks a process for every piece of code and has ``watch`` look after
it; ``kernel`` takes that process's rights away, and ``harness`` is what it does. These four use the standard library
only.
"""
