"""Loading of a model's tokenizer without its model."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from services.core.errors import ConfigurationError, first_line
from services.core.files import check_model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def import_transformers_alone() -> None:
    """Import transformers as if torch were not installed, in a process of the caller's own.

    Otherwise transformers imports torch wherever that is installed, which takes seconds and hundreds of megabytes that
    a tokenizer does not need.
    """
    # Read at import. Without it, transformers warns that torch is missing.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # A None makes a module look absent. It is removed again because other libraries would take it for the module.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model on the hub, in its cache, or in a directory.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded.
    """
    check_model_directory(model_name)
    from transformers import AutoTokenizer

    try:
        # Explicit, because the default asks at a terminal whether to run code that comes with the model.
        return AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
    # The error's type depends on the hub client, the network and the files: OSError, ValueError, KeyError, ...
    except Exception as error:
        raise ConfigurationError(
            f"the tokenizer of MODEL_NAME {model_name!r} cannot be loaded from the Hugging Face hub, its cache or a "
            f"directory of that name: {first_line(error)}; check the name and the network, or give a directory"
        ) from error
