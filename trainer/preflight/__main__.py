"""Print the memory and disk that a run needs on this machine, as JSON: ``python -m trainer.preflight``."""

from __future__ import annotations

import json
import sys

import torch

from services.core import logs, machine
from services.core.endpoints import num_nodes
from services.core.errors import ConfigurationError, exit_code_of
from trainer.config import TrainerSettings
from trainer.model.saving import DiskFullError
from trainer.preflight.check import Machine, check, chosen_work, shape_of
from trainer.preflight.sizes import find_limits, needed


def main() -> None:
    """Print what a rank and a node need, what there is, the steps to record, and the preflight's refusal or null.

    Raises:
        ConfigurationError: the model cannot be loaded.
    """
    logs.configure("ppo-trainer", "error")
    settings = TrainerSettings.load()
    machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
    device = torch.device("cuda" if machine.promised_gpus() else "cpu")
    has_bfloat16 = machine.multiplies_bfloat16(torch.cpu.get_capabilities())
    kind = machine.decide_compute(
        "COMPUTE_TYPE", settings.compute_type, device=device.type, multiplies_bfloat16=has_bfloat16, threads=1
    ).compute_type
    limits = find_limits(device, settings.run_dir, is_shared=settings.engine_sleeps)
    nodes = Machine(num_nodes(), machine.promised_gpus() or 1, getattr(torch, kind).itemsize, limits)
    shape = shape_of(settings)
    work = chosen_work(settings, shape, nodes)
    refusal = None
    try:
        check(settings, shape, nodes)
    except (ConfigurationError, DiskFullError) as error:
        refusal = str(error)
    need = vars(needed(shape, work))
    print(json.dumps({"need": need, "has": vars(limits), "refusal": refusal, "record_groups": work.record_groups}))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
