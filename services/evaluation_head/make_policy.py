"""The kinds of policies, by the targets that name them."""

from __future__ import annotations

import re
from pathlib import Path

from services.evaluation_head.function_policy import FunctionPolicy
from services.evaluation_head.language_policy import LanguagePolicy
from services.evaluation_head.policy import Policy
from services.evaluation_head.remote_policy import PREFIX, RemotePolicy
from services.evaluation_head.settings import HeadSettings

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def make_policy(name: str, target: str, settings: HeadSettings) -> Policy:
    """Return the policy that ``target`` stands for; see HEAD_POLICIES."""
    if target.startswith(PREFIX):
        return RemotePolicy(name, target, settings)
    if "://" in target:
        return LanguagePolicy(name, target, settings)
    if _FUNCTION.fullmatch(target):
        return FunctionPolicy(name, target)
    # Torch takes seconds to load, and a head of language models alone needs none.
    from services.evaluation_head.torch_policy import TorchPolicy

    return TorchPolicy(name, Path(target), settings)
