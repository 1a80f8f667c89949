"""Start vLLM's server as a rollout node: ``python -m evaluation.vllm``, at this node's address of the job group.

MODEL_NAME is the model; VLLM_FLAGS are further flags of ``vllm serve``.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping

from evaluation.allocation import Allocation
from services.core.endpoints import ENGINE_PORT, Task, bind_address
from services.core.errors import ConfigurationError

MODULE = "evaluation.vllm"


def require() -> None:
    """Check that vLLM is installed.

    Raises:
        ConfigurationError: it is not.
    """
    if shutil.which("vllm") is None:
        raise ConfigurationError("--backend vllm: there is no vllm in PATH; install it with pip install vllm")


def variables(allocation: Allocation, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this module for engines of this size; ``given`` are the user's."""
    sizes = f"--tensor-parallel-size {allocation.tensor} --pipeline-parallel-size {allocation.pipeline}"
    token = os.environ.get("JOBGROUP_TOKEN")
    return {"VLLM_FLAGS": f"{sizes} {given.get('VLLM_FLAGS', '')}", **({"VLLM_API_KEY": token} if token else {})}


def main() -> None:
    """Become ``vllm serve``."""
    own = bind_address(Task.ROLLOUT_SERVER, ENGINE_PORT)
    model, flags = os.environ["MODEL_NAME"], shlex.split(os.environ.get("VLLM_FLAGS", ""))
    command = ["vllm", "serve", model, "--served-model-name", model, "--host", own.host, "--port", str(own.port)]
    os.execvp(command[0], [*command, *flags])


if __name__ == "__main__":
    main()
