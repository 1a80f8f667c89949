"""Make the arithmetic model of ``toys``, small enough for tests: ``python -m scripts.tiny_model DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    directory: Annotated[Path, typer.Argument(help="Where to write the model.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and warm-up.")] = 0,
) -> None:
    """Write a warmed-up Qwen2 of about 0.4M parameters and its tokenizer, in a few seconds."""
    from toys import arithmetic  # Not at the top: torch takes seconds to import, which --help need not.

    accuracy = arithmetic.make(directory, seed=seed)
    print(f"{directory}: sampled accuracy {accuracy:.2f} on one-digit sums and differences")


if __name__ == "__main__":
    typer.run(main)
