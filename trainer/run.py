"""The life of one rank: join the others, load or resume the policy, connect to the services, train, report the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from types import FrameType
from typing import Any

import torch
import transformers

from services.core import logs, machine, models
from services.core.endpoints import Task
from services.core.errors import ConfigurationError, exit_code_of, own_error
from services.core.logs import get_logger
from services.core.run_ids import job_id
from services.core.tasks import InterruptedCallError, ServiceThread
from services.protocol.base import ComponentRecord
from services.protocol.prompts import DataStats
from services.reward_columns import check_columns
from services.run_page.progress import first_and_last
from services.weights.broadcast_group import match_engines_nccl
from trainer.capacity.check import preflight
from trainer.capacity.work import VolumeRoom
from trainer.checkpoints.checkpoint import CheckpointStore
from trainer.checkpoints.run_checkpoints import resume
from trainer.checkpoints.state import RunState, has_succeeded
from trainer.collector import collect_sources
from trainer.config import Mode, TrainerSettings, Transport
from trainer.loop import TrainingLoop
from trainer.model.critic import CriticLearner
from trainer.model.learner import Learner
from trainer.model.loading import count_parameters
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks, join_ranks
from trainer.model.saving import keep_untrained, writing
from trainer.model.teachers import check_endpoints, naming_the_teacher
from trainer.publishing.writer import VersionWriter
from trainer.rank_calls import ENDINGS, KeptKernels, RankCalls
from trainer.reporting.group_facts import GroupFacts
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus, listen_for_status, log_activity, serve_status
from trainer.reporting.trackers import tracker_of
from trainer.rollouts.service_calls import ServiceCalls

log = get_logger(__name__)

ACCURACY = ("", "_low", "_high", "_prompts")
"""The parts of an accuracy in the run's state and summary: the point estimate, its interval, its prompts."""


class StopSignal:
    """A memory of SIGTERM and SIGINT, so that the loop can end at a point where nothing is half done."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self) -> bool:
        """Return whether a signal has come."""
        return self.number is not None

    @contextmanager
    def handled(self) -> Iterator[StopSignal]:
        """Remember the signals within the block instead of ending the process."""
        before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.number = number


def run_rank() -> int:
    """Run this process as the rank that torchrun's variables name; return the exit code."""
    stop = StopSignal()
    interrupted = False

    def body() -> None:
        nonlocal interrupted
        settings = TrainerSettings.load()
        logs.configure(Task.TRAINER.value, settings.log_level)
        transformers.utils.logging.disable_progress_bar()
        machine.keep_freed_memory()
        torch.set_num_threads(machine.threads(processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        if settings.publish_transport is Transport.BROADCAST:
            match_engines_nccl()
        tracker_of(settings)  # refuses one that cannot be used
        # Before the ranks join, because they wait for each other with a shorter deadline.
        models.download_model(settings.model_name)
        for name in settings.teacher_models:
            with naming_the_teacher():
                models.download_model(name)
        try:
            with stop.handled(), join_ranks() as ranks:
                train(settings, ranks, stop)
        except InterruptedCallError:
            interrupted = True

    code = exit_code_of(body)
    return 128 + (stop.number or signal.SIGTERM) if interrupted else code


def train(settings: TrainerSettings, ranks: Ranks, stop: StopSignal) -> None:
    """Train a whole run on this rank: rank 0 drives, the others follow.

    Raises:
        ConfigurationError: a setting, model or dataset cannot be used.
        DependencyLostError: a service was lost.
        NeverReadyError: a service did not come up at the start.
        InterruptedCallError: a signal came; the last completed step is in a checkpoint.
        TrainingDivergedError: updates were not finite.
    """
    if ranks.on_main(lambda: has_succeeded(settings), ConfigurationError):
        return
    for caution in settings.cautions if ranks.is_main else ():
        log.warning(caution)
    settings, ranks, room = preflight(settings, ranks)
    torch.manual_seed(settings.seed)
    with ExitStack() as stack:
        status = RunStatus()
        thread = stack.enter_context(ServiceThread(stop)) if ranks.is_main else None
        _open_page(settings, ranks, thread, status)
        status.begin("starting", f"loading {settings.model_name}")
        if (kernels := KeptKernels.of(settings, ranks.device)) is not None:
            kernels.load()
        policy = _load(settings, ranks)
        services, data = _connect(settings, ranks, thread, policy.config.vocab_size, stack, status)
        status.begin("starting", "preparing the first step")
        learner = _learner(settings, policy, ranks, data, stop)
        every = settings.keep_checkpoints_every
        checkpoints = CheckpointStore(settings.checkpoint_dir, settings.checkpoints_kept, ranks, every)
        critic = CriticLearner(learner) if settings.has_critic else None
        writer = VersionWriter(settings, policy, ranks)
        stack.callback(writer.close)
        probes = {url: teacher.probe for url, teacher in services.teachers.items()} if services else {}
        state = resume(learner, checkpoints, data, critic, probes)
        # A resumed run may have another BATCH_SIZE now.
        learner.total_steps = settings.total_steps(data.train_prompts, state.step, state.prompts_used)
        rank_calls = RankCalls(settings, ranks, learner, writer, checkpoints, critic, kernels)
        if services is None:
            rank_calls.follow()
            return
        status.step, status.state, status.total_steps = state.step, state, learner.total_steps
        with rank_calls.leading():
            assert policy.description is not None, "rank 0 has it"
            check_endpoints(
                services.teachers.values(), policy.description.tokenizer, rank_calls.on_all_ranks(learner.logprobs)
            )
            _drive(settings, services, rank_calls, status, data, room)


def _open_page(settings: TrainerSettings, ranks: Ranks, thread: ServiceThread | None, status: RunStatus) -> None:
    """Serve the run page; on rank 0, which alone has a thread."""

    def serve() -> None:
        assert thread is not None, "only rank 0 has a page"
        thread.start(serve_status(settings, status, listen_for_status()))
        thread.start(log_activity(status))

    ranks.on_main(serve, ConfigurationError)


def _connect(
    settings: TrainerSettings,
    ranks: Ranks,
    thread: ServiceThread | None,
    vocab_size: int,
    stack: ExitStack,
    status: RunStatus,
) -> tuple[ServiceCalls | None, DataStats]:
    """Connect rank 0 to the services until ``stack`` ends; return the connections, None elsewhere, and the data."""
    services: ServiceCalls | None = None

    def connect() -> dict[str, Any]:
        nonlocal services
        assert thread is not None, "only rank 0 connects"
        services = stack.enter_context(ServiceCalls.connected(settings, thread, vocab_size, status.activity))
        return services.describe_data().model_dump()

    data = DataStats.model_validate(ranks.on_main(connect, *ENDINGS))
    return services, data


def _load(settings: TrainerSettings, ranks: Ranks) -> Policy:
    policy = load_policy(settings, ranks)
    ranks.on_main(lambda: keep_untrained(policy, settings), *ENDINGS)
    log.info("policy loaded", model=settings.model_name, parameters=count_parameters(policy), ranks=ranks.world_size)
    return policy


def _learner(settings: TrainerSettings, policy: Policy, ranks: Ranks, data: DataStats, stop: StopSignal) -> Learner:
    """Return the policy's learner, with reference and teachers loaded; warn if the data end before MAX_STEPS."""
    total_steps = settings.total_steps(data.train_prompts)
    if total_steps < settings.max_steps:
        log.warning("the data end before MAX_STEPS", steps=total_steps, training_prompts=data.train_prompts)
    learner = Learner(settings, policy, ranks, total_steps)
    learner.training.should_stop = stop
    return learner


def _drive(
    settings: TrainerSettings,
    services: ServiceCalls,
    rank_calls: RankCalls,
    status: RunStatus,
    data: DataStats,
    room: VolumeRoom,
) -> None:
    """Drive the run from its state to its end, and write the summary; on rank 0."""
    policy, state = rank_calls.learner.policy, status.state
    assert state is not None
    assert policy.description is not None, "rank 0 has it"
    if settings.mode is Mode.SYNC:
        services.cursors = dict(state.cursors)
        services.restore_replay(state.replay_snapshot)
    with writing(settings.run_dir):
        decode = policy.description.decode
        components = {c.task: services.thread.call(c.settings()) for c in services.clients.services}
        _check_columns(settings, data, components)
        facts = GroupFacts(settings, *policy.description.special_tokens)
        files = RunFiles(settings, state.step, decode, components, room.holds, facts)
    # Its first failure is among the files, which forget that of an earlier attempt.
    if settings.mode is Mode.ASYNC and settings.collector_in_process:
        collecting = collect_sources(settings, services.clients, services.makers)
        services.fresh_queue.collector = services.thread.start(collecting)
    with closing(files):
        try:
            prompts = settings.epochs * data.train_prompts
            TrainingLoop(
                settings, services, rank_calls, files, status, state, rank_calls.learner.total_steps, prompts
            ).run()
            status.begin("save", "saving the model")
            rank_calls.on_all_ranks(rank_calls.save_model)()
        except Exception as error:
            _write_summary(files, _summary(settings, rank_calls, status, data, error))
            raise
        _write_summary(files, _summary(settings, rank_calls, status, data, None))
    status.begin("finished", "finished")
    log.info("finished", steps=state.step, model=str(settings.run_dir / "model"))


def _check_columns(settings: TrainerSettings, data: DataStats, components: Mapping[Task, ComponentRecord]) -> None:
    """Check that the rows have the columns that rewards need, also if the data-server does not know REWARD_FN.

    Raises:
        ConfigurationError: they lack one.
    """
    rewards = components.get(Task.REWARD_SERVER)
    if rewards is not None and settings.sources is None:
        reward_fn = str(rewards.settings.get("reward_fn", ""))
        check_columns(reward_fn, data.columns, f"the dataset of a data-server without REWARD_FN={reward_fn}")


def _write_summary(files: RunFiles, summary: dict[str, Any]) -> None:
    """Write the summary; on a full disk the log says so, because the error would hide how the run ended."""
    try:
        files.write_summary(summary)
    except OSError as error:
        log.error("no summary", status=summary["status"], reason=str(error))


def outcome_of(error: Exception | None) -> dict[str, str | None]:
    """Return a summary's ``status`` and, of a run that failed, its ``error``; ``error`` is that which ended the run."""
    if error is None or isinstance(error, InterruptedCallError):
        return {"status": "succeeded" if error is None else "interrupted", "error": None}
    return {"status": "failed", "error": str(error) if isinstance(error, ENDINGS) else own_error(error)}


def _by_source(state: RunState) -> dict[str, Any]:
    """Return the part of summary.json about sources, nothing without SOURCES: rewards, accuracies before and after."""
    sources: dict[str, Any] = {
        source: {
            **first_and_last(state.rewards_by_source.get(source, [])),
            "accuracies": state.accuracies_by_source.get(source),
        }
        for source in sorted({**state.rewards_by_source, **state.accuracies_by_source})
    }
    return {"sources": sources} if sources else {}


def _summary(
    settings: TrainerSettings, rank_calls: RankCalls, status: RunStatus, data: DataStats, error: Exception | None
) -> dict[str, Any]:
    """Return the content of summary.json; ``error`` ended the run."""
    compute, state = rank_calls.learner.policy.compute, status.state
    assert compute is not None
    assert state is not None
    return {
        **outcome_of(error),
        "steps": state.step,
        "seconds": state.seconds,
        **first_and_last(state.rewards),
        **{f"accuracy_before{part}": getattr(state, f"accuracy_before{part}") for part in ACCURACY},
        **{
            f"accuracy_after{part}": getattr(state, f"last_accuracy{part}") if state.evaluated_step else None
            for part in ACCURACY
        },
        **_by_source(state),
        "eval_reward_before": state.eval_reward_before,
        "accuracy_after_step": state.evaluated_step or None,
        "evaluation_error": state.evaluation_error,
        "workers_refused": status.refusals or None,
        "model": settings.model_name,
        "dataset": data.source,
        "rows": data.rows,
        "rows_left_out": {reason: count for reason, count in data.refused.items() if count} or None,
        "device": rank_calls.ranks.device.type,
        "compute_type": compute.compute_type,
        "ranks": rank_calls.ranks.world_size,
        "job": job_id(),
        "ended": time.time(),
    }
