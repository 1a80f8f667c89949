"""DATASET=harbor:DIR: tasks in Harbor's format, played in one box and graded in another.

The agent's box has the task's files and neither its tests nor its solution. When it has ended, with all processes in
it, a second box gets the regular files that it left, and the tests. What would be loaded before the tests run does not
travel (``trials.is_hook``): so these see what the answer made, and run nothing of it unless they ask for it. The
reward files are named pipes that the second box can neither remove nor replace. What is written there is read once that
box has ended, and two different rewards are none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.data_server.harbor import FIRST_NUMBER, Task, read_tasks
from services.data_server.settings import HARBOR, DataSettings
from services.environment_server.environments import Conversation, Transition
from services.environment_server.programs import ProgramEpisode
from services.environment_server.sandbox_environment import BOX, SESSION_SECONDS, BoxEpisode, Boxes, Sandboxed
from services.environment_server.settings import EnvironmentSettings
from services.environment_server.trials import Trial
from services.http.problems import ProblemError
from services.protocol.evaluation import PROGRAM, State
from services.reward_server.settings import RewardSettings
from services.sandbox.backends import BackendName, Interpreter, Layout
from services.sandbox.box import Result
from services.sandbox.probe import choose

SPLIT = "tasks"
log = get_logger(__name__)


class HarborTasks(Boxes):
    """The tasks of all datasets ``harbor:DIR``. An episode's seed is the number of its task, or draws one."""

    def __init__(
        self, tasks: Mapping[int, Task], settings: EnvironmentSettings, rewards: RewardSettings, backend: BackendName
    ) -> None:
        super().__init__(settings, rewards, backend)
        self.tasks = dict(sorted(tasks.items()))
        self.splits = dict.fromkeys((SPLIT, "train", "test", PROGRAM), len(tasks)) | {BOX: 1}
        digest = hashlib.blake2b(repr([*self.tasks]).encode(), digest_size=8).hexdigest()
        self.version = f"1, {settings.text_turns} turns of {self.limits}, {SESSION_SECONDS:g} s, tasks {digest}"

    def maker(self, split: str | None = None, index: int | None = None) -> Callable[[int], Conversation]:
        """See Tasks. The number of a task is a seed of every split."""
        draw = super().maker(split, index)

        def make(seed: int) -> Conversation:
            if seed in self.tasks:
                return self._episode(split, self.tasks[seed])
            if seed >= FIRST_NUMBER:
                raise ProblemError(400, f"task {seed} is not here; give data-server and environment-server one DATASET")
            return draw(seed)

        return draw if split == BOX else make

    def make(self, split: str, index: int) -> Conversation:
        """See Tasks."""
        return Sandboxed(self, None) if split == BOX else self._episode(split, list(self.tasks.values())[index])

    def _episode(self, split: str | None, task: Task) -> Conversation:
        return (ProgramEpisode if split == PROGRAM else HarborEpisode)(self, task)


class HarborEpisode(BoxEpisode):
    """An episode of a task, whose later steps are further turns of the user."""

    def __init__(self, tasks: HarborTasks, task: Task) -> None:
        super().__init__(tasks)
        self._trial = Trial(tasks, task)

    async def reset(self, seed: int) -> State:
        """Show the task."""
        return self._ask(self._begun())

    def _begun(self) -> str:
        """Begin the time of the trial's step, and return its instruction."""
        self._seconds = min(self._trial.step.agent_seconds or SESSION_SECONDS, SESSION_SECONDS)
        return self._trial.step.instruction

    async def _close(self) -> None:
        await self._trial.close()

    async def _execute(self, tool: str, program: str) -> Result:
        return await self._trial.run(tool, program, self._seconds)

    async def _step(self, text: str) -> Transition:
        self._left -= 1
        self._messages.append({"role": "assistant", "content": text})
        output = await self._output_of(text)
        is_over = self._left == 0 or self._seconds <= 0
        is_step_over, goes_on = output is None or is_over, False
        if is_step_over:
            async with self._tasks.places:
                await self._trial.grade()
                goes_on = not is_over and await self._trial.go_on()
        if goes_on:
            output = self._begun()
        if output is not None:
            self._messages.append({"role": "user", "content": output})
        if goes_on or not is_step_over:
            return Transition(list(self._messages), 0.0)
        return self._trial.transition(self._messages, is_over=is_over)


def datasets_of(data: DataSettings) -> list[str]:
    """Return the datasets ``harbor:DIR`` of a run: of DATASET, of its sources, and held-out ones.

    With one of them, the rows of DATASET are not played.
    """
    named: dict[str, None] = {}
    for own in (data, *data.by_source().values()):
        if own.dataset.startswith(HARBOR):
            named |= {own.dataset: None} | ({f"{HARBOR}{own.dataset_test}": None} if own.dataset_test else {})
    return list(named)


async def load(datasets: Sequence[str], settings: EnvironmentSettings, rewards: RewardSettings) -> HarborTasks:
    """Read the tasks of datasets, and choose the sandbox.

    Raises:
        ConfigurationError: there is no task that can be done, no sandbox gives a task the paths that it needs, or a
            tree has no Python.
    """
    tasks: dict[int, Task] = {}
    for dataset in datasets:
        found_tasks, refused = await in_background(lambda dataset=dataset: read_tasks(dataset))  # type: ignore[misc]
        tasks |= found_tasks
        if not found_tasks:
            name, error = next(iter(refused.items()))
            raise ConfigurationError(f"DATASET {dataset!r} has no task that can be done; {name}: {error}")
    no_processes = ""
    layout = Layout(("/app", "/tmp"), has_processes=True)
    try:
        backend = await choose(rewards.sandbox, rewards.interpreter, writes=True, layout=layout)
    except ConfigurationError as error:
        layout, no_processes = replace(layout, has_processes=False), str(error)
        backend = await choose(rewards.sandbox, rewards.interpreter, writes=True, layout=layout)
        log.warning("programs as agents have no /proc in their boxes, which most presets need", error=no_processes)
    made = HarborTasks(tasks, settings, rewards, backend)
    made.no_processes = no_processes
    made.trees = {image: Interpreter.find_in(tree.absolute()) for image, tree in settings.sandbox_trees.items()}
    return made
