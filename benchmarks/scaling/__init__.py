"""How long a step takes, where its seconds go, and how many nodes a model wants."""
