def middle(numbers):
    """Return the median of ``numbers``."""
    numbers.sort()
    return numbers[len(numbers) // 2]
