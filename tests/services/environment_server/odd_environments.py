"""Environments that misbehave: ``ENVIRONMENT=tests.services.environment_server.odd_environments:Odd/Sleepy-v0``."""

import asyncio
import contextlib
import os
import sys
import threading
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from services.environment_server.environments import ActionRefusedError, Conversation, Transition
from tests.waiting import IDLE_SECONDS

RELEASE = threading.Event()
"""Set by a test to end hanging steps."""
HANGING = threading.Event()
"""Set when a step hangs."""


class Plain(gymnasium.Env):
    """An environment that observes the number of steps taken and never ends by itself."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, float(self.steps)), 1.0, False, False, {}


class Broken(Plain):
    """An environment in which action 1 raises, 2 gives a NaN state, 3 a NaN reward, and 0 succeeds."""

    def step(self, action):
        state, reward, *rest = super().step(action)
        if action == 1:
            raise RuntimeError("a gear fell off")
        return (state * np.nan if action == 2 else state), (np.nan if action == 3 else reward), *rest


class Sleepy(Plain):
    """An environment in which action 1 hangs."""

    def step(self, action):
        if action == 1:
            HANGING.set()
            RELEASE.wait(IDLE_SECONDS)
        return super().step(action)


class Unborn(Plain):
    """An environment that cannot be reset."""

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no world today")


class Unshaped(Plain):
    """An environment whose observations have no fixed size."""

    observation_space = spaces.Sequence(spaces.Discrete(3))


class Composed(Plain):
    """An environment that observes a dictionary: a number and two others."""

    observation_space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0, 1, (2,), np.float32)})
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return {"a": 2, "b": np.array([0.25, 0.5], np.float32)}, {}

    def step(self, action):
        return {"a": int(action), "b": np.zeros(2, np.float32)}, float(action), True, False, {}


class Misshapen(Plain):
    """An environment of two fractions that begins and goes on with what the test puts into ``given``."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    given: ClassVar = None

    def reset(self, *, seed=None, options=None):
        return Misshapen.given

    def step(self, action):
        return Misshapen.given, 1.0, False, False, {}


class WholeNumbers(Misshapen):
    """The same of two whole numbers."""

    observation_space = spaces.Box(0, 9, (2,), np.uint8)


class Wordless(Misshapen):
    """The same of texts."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(5)


class Several(Plain):
    """An environment that takes several indices at once."""

    action_space = spaces.MultiDiscrete([2, 3])


class Echo(Conversation):
    """A conversation that repeats the action and ends."""

    async def reset(self, seed):
        return [{"role": "user", "content": f"seed {seed}"}]

    async def step(self, action):
        return Transition([{"role": "user", "content": action}], 1.0, terminated=True)


class HalfAGame(Conversation):
    """A game of two seats that gives one reward."""

    seats = 2

    async def reset(self, seed):
        return [{"role": "user", "content": "go"}]

    async def step(self, action):
        return Transition([], 1.0, rewards=(1.0,))


class Holding(Conversation):
    """A conversation that holds something until it is closed.

    Seed 1 breaks it, and seed 3 gives no state; "wait" hangs, and "nan" is a figure.
    """

    held = 0

    def __init__(self):
        Holding.held += 1

    async def reset(self, seed):
        if seed == 1:
            raise RuntimeError("no world today")
        return None if seed == 3 else [{"role": "user", "content": "go"}]

    async def step(self, action):
        if action == "wait":
            await asyncio.Event().wait()
        return Transition([{"role": "user", "content": action}], 1.0, figures={"odd": float(action)})

    def close(self):
        Holding.held -= 1


def harm(what):
    """Do what only hostile or careless code does."""
    if what == "exit":
        sys.exit("enough")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "cancel":
        raise asyncio.CancelledError
    if what == "block":
        HANGING.set()
        RELEASE.wait(IDLE_SECONDS)


class Hostile(Conversation):
    """A conversation that does harm where it is told to: in a step as the action says, in a reset by seeds 1 to 3."""

    async def reset(self, seed):
        harm({1: "exit", 2: "interrupt", 3: "cancel"}.get(seed))
        self.messages = [{"role": "user", "content": "go"}]
        return list(self.messages)

    async def step(self, action):
        where, _, what = action.partition(" ")
        if where == "task":
            await asyncio.gather(asyncio.create_task(self.harm(what)), asyncio.sleep(0))
        if where == "wait":
            await asyncio.sleep(float(what))
        if where == "deaf":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(float(what))
            while not RELEASE.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
        if where == "error":
            raise ValueError("caf\udce9")
        if where == "refuse":
            raise ActionRefusedError("caf\udce9")
        harm(what if where == "step" else None)
        content = {"surrogate": "caf\udce9", "object": object()}.get(action, action)
        self.messages.append({"role": "user", "content": content})
        return Transition(list(self.messages), 1.0)

    async def harm(self, what):
        harm(what)


class HostileFunctions(Plain):
    """The same with plain functions: actions 1 to 3 do harm in a step, seeds 1 to 3 in a reset."""

    def reset(self, *, seed=None, options=None):
        harm({1: "exit", 2: "interrupt", 3: "cancel"}.get(seed))
        return super().reset(seed=seed)

    def step(self, action):
        harm({1: "exit", 2: "interrupt", 3: "cancel"}.get(action))
        return super().step(action)


class Loops(Conversation):
    """A conversation whose step says whether it runs on the event loop of the reset; it closes as a coroutine."""

    closed_on: ClassVar = []

    async def reset(self, seed):
        self.loop = asyncio.get_running_loop()
        return [{"role": "user", "content": "go"}]

    async def step(self, action):
        same = asyncio.get_running_loop() is self.loop
        return Transition([{"role": "user", "content": str(same)}], 1.0, terminated=action == "end")

    async def close(self):
        Loops.closed_on.append(asyncio.get_running_loop() is getattr(self, "loop", None))
        sys.exit("closed")


class Parrot(Plain):
    """An environment of texts that repeats the action and ends at "bye"."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(5, charset="abcdefghijklmnopqrstuvwxyz")
    deterministic = True

    def reset(self, *, seed=None, options=None):
        return f"Seed {seed}. Say something.", {}

    def step(self, action):
        return f"{action}!", float(action == "bye"), action == "bye", False, {}


class Mute(Parrot):
    """An environment whose actions are texts, and its observations are not."""

    action_space = spaces.Text(5)
    observation_space = spaces.Box(0, 1, (1,))


class Unmakeable(Conversation):
    """A conversation that ends the process where it is made."""

    def __init__(self):
        sys.exit("not this way")

    async def reset(self, seed):
        """Never called."""

    async def step(self, action):
        """Never called."""


class Unwritable(Hostile):
    """A conversation whose first state is no UTF-8."""

    async def reset(self, seed):
        return [{"role": "user", "content": "caf\udce9"}]


class Exiting(Plain):
    """An environment that ends the process where it is closed."""

    closed = threading.Event()

    def close(self):
        Exiting.closed.set()
        sys.exit("closed")


PLAIN = (Plain, Broken, Sleepy, Unborn, Unshaped, Composed, Several, HostileFunctions, Exiting, Parrot, Mute)
for kind in (*PLAIN, Misshapen, WholeNumbers, Wordless):
    gymnasium.register(f"Odd/{kind.__name__}-v0", entry_point=kind)


class Choosy(Conversation):
    """A question that takes yes or no; yes is right."""

    async def reset(self, seed):
        self._messages = [{"role": "user", "content": "Yes or no?"}]
        return self._messages

    async def step(self, action):
        if action not in ("yes", "no"):
            raise ActionRefusedError("answer yes or no")
        self._messages = [*self._messages, {"role": "assistant", "content": action}]
        return Transition(self._messages, float(action == "yes"), terminated=True)


class Fragile(Choosy):
    """A question that breaks at the answer "break" and takes any other."""

    async def step(self, action):
        if action == "break":
            raise RuntimeError("it broke")
        return await super().step("yes")


class Unstable(Choosy):
    """A deterministic question that breaks at every answer."""

    deterministic = True

    async def step(self, action):
        return 1 / 0


class Dice(Choosy):
    """A question that declares that it is deterministic, although its first state is another one in each process."""

    deterministic = True
    version = "2"

    async def reset(self, seed):
        self._messages = [{"role": "user", "content": f"Process {os.getpid()}. Yes or no?"}]
        return self._messages


class Leaving(Choosy):
    """A deterministic question that ends its process at the answer of one seed in nine."""

    deterministic = True

    async def reset(self, seed):
        self.seed = seed
        return await super().reset(seed)

    async def step(self, action):
        if self.seed % 9 == 0:
            sys.exit(1)
        return await super().step(action)
