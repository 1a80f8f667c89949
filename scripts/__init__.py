"""Commands that a person runs: a job group on this machine, its runs, evaluations, and makers of small models."""

# Installed, this package has another name too, by which grpo.py is found before the project's packages can be.
if __name__ == "scripts":
    import services  # noqa: F401  # first, because it explains missing packages
