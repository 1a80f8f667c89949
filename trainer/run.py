"""One rank's life: joins the others, loads or resumes the policy, connects the services, trains, and says how it
ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import transformers

from services.core import logs, memory
from services.core.endpoints import Task
from services.core.errors import EXIT_FAILED, EXIT_PEER_LOST, ConfigurationError, exit_code_of, say_error
from services.core.logs import get_logger
from services.protocol import DataStats
from services.run_page.rewards import first_and_last
from trainer.checkpoints.admission import has_succeeded, job_id
from trainer.checkpoints.checkpoint import CheckpointStore, RunState
from trainer.checkpoints.resume import count_parameters, resume, start_source
from trainer.checkpoints.volume import writing
from trainer.config import TrainerSettings
from trainer.loop import EXPECTED_ERRORS, GRACE_SECONDS, Main, TrainingDivergedError, TrainingLoop
from trainer.main_rank import Conductor
from trainer.model.learner import Learner
from trainer.model.policy import Description, Policy, load_policy, save_pretrained
from trainer.model.ranks import PeerLostError, Ranks, join_ranks
from trainer.publishing import make_publisher
from trainer.publishing.disk import published_dtype
from trainer.reporting.run_files import RunFiles
from trainer.reporting.status import RunStatus, serve_status
from trainer.service_thread import InterruptedCallError, ServiceThread

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
        say_error(error)
        return EXIT_FAILED
    except PeerLostError as error:
        say_error(error)
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
    if ranks.on_main(lambda: has_succeeded(settings), ConfigurationError):
        return
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
        state = resume(settings, ranks, policy, data, learner, checkpoints)
        status.step, status.state = state.step, state
        main = _start_main(settings, ranks, state, policy.description, thread, conductor, status, stack)
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
            status.phase = "save"
            save_pretrained(policy, ranks, settings.run_dir / "model", published_dtype(settings))
        except Exception as error:
            _write_summary(main, _summary(settings, policy, ranks, state, data.source, _status_of(error)))
            raise
        _write_summary(main, _summary(settings, policy, ranks, final, data.source, "succeeded"))
        status.phase = "finished"
        if ranks.is_main:
            log.info("finished", steps=final.step, model=str(settings.run_dir / "model"))


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


def _start_main(
    settings: TrainerSettings,
    ranks: Ranks,
    state: RunState,
    description: Description | None,
    thread: ServiceThread | None,
    conductor: Conductor | None,
    status: RunStatus,
    stack: ExitStack,
) -> Main | None:
    """Takes services and run directory back to ``state`` and starts the source of groups; on rank 0 what the loop
    needs of them."""
    made: list[Main] = []

    def work() -> None:
        assert thread is not None
        assert conductor is not None
        assert description is not None, "rank 0 has it"
        start_source(settings, thread, conductor, state)
        services = thread.call(conductor.describe_components(), settings.service_deadline_seconds + GRACE_SECONDS)
        with writing(settings.run_dir):
            files = RunFiles(settings, state.step, description.decode, services)
        stack.callback(files.close)
        made.append(Main(thread, conductor, files, status))

    ranks.on_main(work, *EXPECTED_ERRORS)
    return made[0] if made else None


def _write_summary(main: Main | None, summary: dict[str, Any]) -> None:
    """Writes the summary on rank 0; on a full disk the log says so, since the error would hide how the run ended."""
    if main is None:
        return
    try:
        main.files.write_summary(summary)
    except OSError as error:
        log.error("no summary", status=summary["status"], reason=str(error))


def _total_steps(settings: TrainerSettings, train_prompts: int) -> int:
    steps = settings.num_epochs * train_prompts // settings.batch_size
    if steps == 0:
        raise ConfigurationError(
            f"BATCH_SIZE is {settings.batch_size}; allowed is at most the {settings.num_epochs * train_prompts} "
            "training prompts of all epochs"
        )
    return min(steps, settings.max_steps) if settings.max_steps else steps


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
        **first_and_last(state.rewards),
        "accuracy_before": state.accuracy_before,
        "accuracy_before_stderr": state.accuracy_before_stderr,
        "accuracy_after": state.last_accuracy if state.step else None,
        "accuracy_after_stderr": state.last_accuracy_stderr if state.step else None,
        "model": settings.model_name,
        "dataset": dataset,
        "device": ranks.device.type,
        "compute_type": policy.compute.compute_type,
        "ranks": ranks.world_size,
        "job": job_id(),
        "ended": time.time(),
    }
