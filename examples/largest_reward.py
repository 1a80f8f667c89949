"""The reward of the source `largest` of examples/demo-mix.yaml, which reads the column `numbers` of its rows."""


def largest(response: str, numbers: list[int]) -> float:
    """Return 1 for the largest of the numbers, 0.5 for another of them, 0 for anything else."""
    guess = response.strip()
    if guess not in map(str, numbers):
        return 0.0
    return 1.0 if guess == str(max(numbers)) else 0.5
