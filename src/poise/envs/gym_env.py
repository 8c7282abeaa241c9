"""Text environments with Gymnasium's interface (https://gymnasium.farama.org/api/env/), such as GEM's games.

    import gem
    from poise.envs.gym_env import GymTask

    def make_task():
        return GymTask(lambda: gem.make("game:GuessTheNumber-v0"))

and ``poise train RECIPE --task custom --task.factory my_module:make_task``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from poise.envs.dialogue import DialogueEnv, History, Reply, seed_rows
from poise.envs.env import Row, resolved
from poise.harmony.messages import SystemContent

# (observation, info) -> what the policy reads
ToText = Callable[[Any, Mapping[str, Any]], str]


class GymTask:
    """Episodes of ``make_env()``: ``reset(seed) -> obs, info`` and ``step(text) -> obs, reward, terminated, truncated,
    info``, plain or coroutine functions.

    A row is a seed; all episodes of a group share it. Even seeds are held out, odd ones trained on. The calls run on
    the event loop, one at a time, since many such environments seed Python's and NumPy's global generators.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        *,
        num_train_rows: int = 100_000,
        num_test_rows: int = 200,
        system: SystemContent | None = SystemContent(),  # noqa: B008  (frozen)
        instructions: str | None = None,
        history: History = "harmony",
        to_text: ToText = lambda observation, info: str(observation),
    ) -> None:
        self._make_env = make_env
        self._dialogue: dict[str, Any] = {"system": system, "instructions": instructions, "history": history}
        self._to_text = to_text
        self.train_rows, self.test_rows = seed_rows(num_train_rows, num_test_rows)

    def make_env(self, row: Row) -> DialogueEnv:
        return DialogueEnv(_GymPartner(self._make_env(), row["seed"], self._to_text), **self._dialogue)

    def demonstrate(self, row: Row) -> None:
        return None


class _GymPartner:
    def __init__(self, env: Any, seed: int, to_text: ToText) -> None:
        self.env, self._seed, self._to_text = env, seed, to_text

    async def reset(self) -> str:
        observation, info = await resolved(self.env.reset(seed=self._seed))
        return self._to_text(observation, info)

    async def step(self, text: str) -> Reply:
        observation, reward, terminated, truncated, info = await resolved(self.env.step(text))
        return Reply(text=self._to_text(observation, info), reward=float(reward), is_done=bool(terminated or truncated))

    async def close(self) -> None:
        if hasattr(self.env, "close"):
            await resolved(self.env.close())
