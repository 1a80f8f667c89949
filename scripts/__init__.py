"""Commands that a person runs: ``grpo`` and the programs behind it, and makers of small models and documents."""

# Installed, this package has another name too, by which grpo.py is found before the project's packages can be.
if __name__ == "scripts":
    import services  # noqa: F401  # first, because it explains missing packages
