"""Print the memory and disk that a run needs on this machine, as JSON: ``python -m trainer.capacity``."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator

import torch

from services.clients.teacher import TeacherClient
from services.core import logs, machine
from services.core.endpoints import num_nodes
from services.core.errors import ConfigurationError, DependencyLostError, exit_code_of
from trainer.capacity.check import check, chosen_work, engine_beside, shape_of
from trainer.capacity.need import needed
from trainer.capacity.work import Machine, describe_layout, find_limits
from trainer.config import TrainerSettings
from trainer.model.saving import DiskFullError
from trainer.reporting.trackers import tracker_of

PROBE_SECONDS = 5.0
"""Longest wait for the answers of a teacher behind an endpoint."""


def main() -> None:
    """Print what a rank and a node need and have, steps to record, the layout, the refusal or null, and notes.

    Raises:
        ConfigurationError: the model cannot be loaded, a teacher's endpoint cannot teach it, or TRACKER cannot be used.
    """
    logs.configure("ppo-trainer", "error")
    settings = TrainerSettings.load()
    tracker_of(settings)
    machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
    device = torch.device("cuda" if machine.promised_gpus() else "cpu")
    has_bfloat16 = machine.multiplies_bfloat16(torch.cpu.get_capabilities())
    kind = machine.decide_compute(
        "COMPUTE_TYPE", settings.wanted_compute, device=device.type, multiplies_bfloat16=has_bfloat16, threads=1
    ).compute_type
    limits = find_limits(device, settings.run_dir, is_shared=settings.engine_sleeps)
    shape, gpus = shape_of(settings), machine.promised_gpus() or 1
    engine = engine_beside(settings, shape, gpus, limits.device)
    nodes = Machine(num_nodes(), gpus, getattr(torch, kind).itemsize, limits, engine)
    work, refusal = chosen_work(settings, shape, nodes), None
    try:
        check(settings, shape, nodes)
    except (ConfigurationError, DiskFullError) as error:
        refusal = str(error)
    facts = {"need": vars(needed(shape, work)), "has": vars(limits), "record_groups": work.record_groups}
    said = {"layout": describe_layout(settings, shape), "refusal": refusal, "notes": [*unreachable_teachers(settings)]}
    print(json.dumps(facts | said))


def unreachable_teachers(settings: TrainerSettings) -> Iterator[str]:
    """Probe the teachers behind endpoints, and yield a sentence for each that is out of reach from here.

    Raises:
        ConfigurationError: an endpoint does not score token ids, or its context is too short.
    """
    answers = {own.teacher_url: own.answer_tokens for own in settings.by_source().values() if own.teacher_url}
    for url, longest in answers.items():

        async def probe(client: TeacherClient) -> None:
            async with client:
                await client.wait_ready(PROBE_SECONDS)

        try:
            asyncio.run(probe(TeacherClient(url, longest, deadline=PROBE_SECONDS)))
        except DependencyLostError as error:
            yield f"TEACHER_URL={url} was not checked, because it does not answer: {error}"


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
