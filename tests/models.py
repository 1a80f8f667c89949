"""Models that tests make for themselves, once for all of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[1]


def made_once(name: str, sources: Sequence[Path], module: str) -> Path:
    """A directory that ``python -m module DIR`` fills, below .cache/tests; made anew only when ``sources`` change.

    Of several processes that want it at once, one makes it.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    directory = ROOT / ".cache" / "tests" / f"{name}-{digest}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_suffix(".lock"), timeout=LIMIT_SECONDS):
        if not directory.exists():
            made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory.parent))
            subprocess.run([sys.executable, "-m", module, str(made)], check=True, cwd=ROOT)
            made.rename(directory)
    return directory


def save_byte_tokenizer(
    directory: Path, specials: Sequence[str], chat_template: str | None = None, **names: str
) -> int:
    """Save a tokenizer of one token a byte and return the size of its vocabulary, which begins with ``specials``.

    ``names`` are keyword arguments of transformers, such as ``eos_token="</s>"``. A ``bos_token`` begins each text.
    """
    # Not at the top: transformers takes seconds to import.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if (begin := names.get("bos_token")) is not None:
        special = [(begin, vocabulary[begin])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(specials), **names)
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return len(vocabulary)
