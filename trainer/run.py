"""One rank's life: joins the others, loads or resumes the policy, connects the services, trains, and says how it
ended."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import transformers

from services import logs, memory
from services.endpoints import Task
from services.errors import EXIT_FAILED, EXIT_PEER_LOST, ConfigurationError
from services.logs import get_logger
from services.policy_store import PolicyStore
from services.protocol import Cursor, DataStats
from services.scaffold import exit_code_of
from trainer.checkpoint import CheckpointStore, RunState
from trainer.conductor import Conductor
from trainer.config import Mode, TrainerSettings
from trainer.distributed import PeerLostError, Ranks, join_ranks
from trainer.learner import Learner
from trainer.loop import EXPECTED_ERRORS, GRACE_SECONDS, Main, TrainingDivergedError, TrainingLoop
from trainer.policy import Policy, load_policy, save_pretrained
from trainer.publishing import make_publisher
from trainer.publishing.disk import published_dtype
from trainer.run_files import RunFiles, mean_of_first, mean_of_last
from trainer.service_thread import InterruptedCallError, ServiceThread
from trainer.status import RunStatus, serve_status

log = get_logger(__name__)


class StopSignal:
    """Remembers SIGTERM and SIGINT, so that the loop can end at a point where nothing is half done."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self) -> bool:
        """True once a signal has come."""
        return self.number is not None

    @contextmanager
    def handled(self) -> Iterator[StopSignal]:
        """Within it the signals are remembered instead of ending the process."""
        before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.number = number


def run_rank() -> int:
    """Runs this process as the rank that torchrun's variables name; returns the exit code."""
    stop = StopSignal()
    interrupted = False

    def body() -> None:
        nonlocal interrupted
        settings = TrainerSettings.load()
        logs.configure(Task.TRAINER.value, settings.log_level)
        transformers.utils.logging.disable_progress_bar()
        memory.keep()
        try:
            with stop.handled(), join_ranks(settings.collective_deadline_seconds) as ranks:
                train(settings, ranks, stop)
        except InterruptedCallError:
            interrupted = True

    try:
        code = exit_code_of(body)
    except TrainingDivergedError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except PeerLostError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_PEER_LOST
    return 128 + (stop.number or signal.SIGTERM) if interrupted else code


def train(settings: TrainerSettings, ranks: Ranks, stop: StopSignal) -> None:
    """A whole run on this rank.

    Raises:
        ConfigurationError: a setting, model or dataset that cannot be had.
        DependencyLostError: a service was lost.
        NeverReadyError: a service did not come up at the start.
        InterruptedCallError: a signal came; the last completed step is in a checkpoint.
        TrainingDivergedError: updates were not finite.
    """
    torch.manual_seed(settings.seed)
    with ExitStack() as stack:
        thread = stack.enter_context(ServiceThread(stop)) if ranks.is_main else None
        status = RunStatus()
        if thread is not None:
            thread.start(serve_status(settings, status))
        policy = load_policy(settings, ranks)
        log.info(
            "policy loaded", model=settings.model_name, parameters=count_parameters(policy), ranks=ranks.world_size
        )
        conductor = _connect(settings, ranks, policy, thread, stack)

        def describe_data() -> dict[str, Any]:
            assert thread is not None
            assert conductor is not None
            described = thread.call(conductor.describe_data(), settings.service_deadline_seconds + GRACE_SECONDS)
            return described.model_dump()

        data = DataStats.model_validate(ranks.on_main(describe_data, *EXPECTED_ERRORS))
        total_steps = _total_steps(settings, data.train_prompts)
        status.total_steps = total_steps
        needs_reference = settings.kl_coef > 0 and not policy.has_adapters
        reference = load_policy(settings, ranks, trainable=False) if needs_reference else None
        learner = Learner(settings, policy, ranks, reference, total_steps)
        checkpoints = CheckpointStore(settings.checkpoint_dir, settings.checkpoints_kept, ranks)
        state = _resume(settings, ranks, policy, learner, checkpoints)
        status.step = state.step
        main = None
        if thread is not None and conductor is not None:
            _start_source(settings, thread, conductor, state)
            files = RunFiles(settings, state.step)
            stack.callback(files.close)
            main = Main(thread, conductor, files, status)
        publisher = make_publisher(settings, policy, ranks, thread)
        stack.callback(publisher.close)
        loop = TrainingLoop(
            settings,
            ranks,
            policy,
            learner,
            publisher,
            checkpoints,
            state,
            main,
            stop,
        )
        try:
            final = loop.run()
        except Exception as error:
            if main is not None:
                main.files.write_summary(_summary(settings, policy, ranks, state, data.source, _status_of(error)))
            raise
        save_pretrained(policy, ranks, settings.run_dir / "model", published_dtype(settings))
        if main is not None:
            main.files.write_summary(_summary(settings, policy, ranks, final, data.source, "succeeded"))
            status.phase = "finished"
            log.info("finished", steps=final.step, model=str(settings.run_dir / "model"))


def count_parameters(policy: Policy) -> int:
    """Parameters of the whole model, adapters included."""
    return sum(p.numel() for p in policy.parameters())


def _connect(
    settings: TrainerSettings, ranks: Ranks, policy: Policy, thread: ServiceThread | None, stack: ExitStack
) -> Conductor | None:
    """On rank 0 the conductor, connected; every rank waits for it."""
    conductor = None if thread is None else Conductor(settings, policy.config.vocab_size)

    def work() -> None:
        assert thread is not None
        assert conductor is not None
        deadline = settings.start_deadline_seconds + GRACE_SECONDS
        thread.call(conductor.__aenter__(), deadline, interruptible=True)
        stack.callback(lambda: thread.call(conductor.__aexit__(), GRACE_SECONDS))

    ranks.on_main(work, *EXPECTED_ERRORS)
    return conductor


def _total_steps(settings: TrainerSettings, train_prompts: int) -> int:
    steps = settings.num_epochs * train_prompts // settings.batch_size
    if steps == 0:
        raise ConfigurationError(
            f"BATCH_SIZE is {settings.batch_size}; allowed is at most the {settings.num_epochs * train_prompts} "
            "training prompts of all epochs"
        )
    return min(steps, settings.max_steps) if settings.max_steps else steps


def _resume(
    settings: TrainerSettings, ranks: Ranks, policy: Policy, learner: Learner, checkpoints: CheckpointStore
) -> RunState:
    """The state to go on from: the newest checkpoint's, whose weights are loaded, or a fresh one."""
    fresh = RunState(model_type=policy.config.model_type, parameters=count_parameters(policy), cursor=Cursor())
    found = checkpoints.newest(fresh.model_type, fresh.parameters)
    if found is None:
        # An earlier life may have published without having come to its first checkpoint.
        fresh.policy_version = ranks.on_main(lambda: _next_version(settings, fresh.policy_version))
        return fresh
    path, state = found
    checkpoints.load(path, policy, learner.optimizer)
    if state.random_state:
        torch.set_rng_state(torch.tensor(state.random_state, dtype=torch.uint8))
    state.policy_version = ranks.on_main(lambda: _next_version(settings, state.policy_version))
    log.info("resumed", checkpoint=str(path), step=state.step)
    return state


def _next_version(settings: TrainerSettings, version: int) -> int:
    """The version to publish a state's policy as, which was version ``version`` when it was saved; 0 of a fresh one."""
    store = PolicyStore(settings.policy_dir)
    if settings.mode is Mode.SYNC:
        # What was published after the checkpoint will be made again, the same.
        store.discard_after(version)
        return version
    # Groups of the abandoned steps may still be in the queue: no version is used twice.
    newest = store.newest()
    return version if newest is None else max(version, newest.version + 1)


def _start_source(settings: TrainerSettings, thread: ServiceThread, conductor: Conductor, state: RunState) -> None:
    """Takes the replay buffer back to the checkpoint and starts the source of groups."""
    if settings.mode is Mode.SYNC:
        _restore_replay(settings, thread, conductor, state)
    thread.call(conductor.start_source(state.cursor), GRACE_SECONDS)


def _restore_replay(settings: TrainerSettings, thread: ServiceThread, conductor: Conductor, state: RunState) -> None:
    """Gives the replay buffer the contents that the state's training has seen, and no others.

    Without a checkpoint those are the contents at the first start: what an earlier life added since, which was killed
    before its first checkpoint, would be newer than the policy.
    """
    deadline = settings.service_deadline_seconds + GRACE_SECONDS
    start = f"{settings.run_id}-start"
    if thread.call(conductor.restore_replay(state.replay_snapshot or start), deadline):
        return
    if state.replay_snapshot is None:
        thread.call(conductor.save_replay(start), deadline)
    else:
        log.warning("the replay buffer has lost the checkpoint's contents and goes on with what it holds")


def _status_of(error: Exception) -> str:
    return "interrupted" if isinstance(error, InterruptedCallError) else "failed"


def _summary(
    settings: TrainerSettings, policy: Policy, ranks: Ranks, state: RunState, dataset: str, status: str
) -> dict[str, Any]:
    assert policy.compute is not None
    return {
        "status": status,
        "steps": state.step,
        "seconds": state.seconds,
        "reward_first": mean_of_first(state.rewards),
        "reward_last": mean_of_last(state.rewards),
        "accuracy_before": state.accuracy_before,
        "accuracy_after": state.last_accuracy if state.step else None,
        "model": settings.model_name,
        "dataset": dataset,
        "device": ranks.device.type,
        "compute_type": policy.compute.compute_type,
        "ranks": ranks.world_size,
        "ended": time.time(),
    }
