"""Episodes: an environment and a policy talk until one of them, or a limit, ends it."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from poise.config import RolloutConfig
from poise.envs.env import Env, Outcome
from poise.harmony import ParseError, Renderer, parse
from poise.seeding import EPISODE_SEED, derive_seed
from poise.types import Action, Policy, Stop, Trajectory, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``max_turns``: actions per episode; ``max_action_tokens``: per action; ``max_context_tokens``: per stream."""

    max_turns: int
    max_action_tokens: int
    max_context_tokens: int

    @classmethod
    def from_config(cls, config: RolloutConfig) -> "Limits":
        return cls(
            max_turns=config.max_turns,
            max_action_tokens=config.max_action_tokens,
            max_context_tokens=config.max_context_tokens,
        )


async def run_episode(
    make_env: Callable[[], Env],
    policy: Policy,
    renderer: Renderer,
    *,
    group_id: int,
    episode_id: str,
    seed: int,
    limits: Limits,
) -> list[Trajectory]:
    """One episode as one Trajectory, or several where the environment restarts the stream.

    Every limit, every malformed action and every failure of the environment becomes a ``Stop``; only a failure of the
    policy is raised. The reward is the environment's, also after a limit; 0 for ENV_ERROR. ``seed``: of what the policy
    samples, and as ``EPISODE_SEED`` of what the environment draws.
    """
    token = EPISODE_SEED.set(seed)
    try:
        return await _episode(make_env, policy, renderer, group_id, episode_id, seed, limits)
    finally:
        EPISODE_SEED.reset(token)


async def _episode(
    make_env: Callable[[], Env],
    policy: Policy,
    renderer: Renderer,
    group_id: int,
    episode_id: str,
    seed: int,
    limits: Limits,
) -> list[Trajectory]:
    streams = [_Stream()]
    outcome = Outcome(reward=0.0)
    try:
        env = make_env()
    except Exception as error:
        stop = _env_error(episode_id, error)
    else:
        try:
            stop = await _talk(env, policy, renderer, streams, episode_id, seed, limits)
            if stop is not Stop.ENV_ERROR:
                try:
                    outcome = await _grade(env)
                except Exception as error:
                    stop = _env_error(episode_id, error)
        finally:
            try:
                await env.close()
            except Exception as error:  # the episode is over and graded: worth a warning, not its loss
                log.warning(
                    "episode %s: closing its environment failed: %s: %s", episode_id, type(error).__name__, error
                )
    return [
        Trajectory(
            group_id=group_id,
            episode_id=episode_id,
            turns=tuple(stream.turns),
            reward=outcome.reward,
            stop=stop,
            metrics=outcome.metrics,
        )
        for stream in streams
    ]


async def run_group(
    make_env: Callable[[], Env],
    policy: Policy,
    renderer: Renderer,
    *,
    group_id: int,
    group_size: int,
    seed: int,
    limits: Limits,
    on_episode: Callable[[], None] = lambda: None,
) -> list[list[Trajectory]]:
    """``group_size`` episodes of the same problem, concurrently: one list of Trajectories per episode.

    ``on_episode`` is called as each ends.
    """

    async def member(index: int) -> list[Trajectory]:
        try:
            return await run_episode(
                make_env,
                policy,
                renderer,
                group_id=group_id,
                episode_id=f"{group_id}/{index}",
                seed=derive_seed(seed, index),
                limits=limits,
            )
        finally:
            on_episode()

    return list(await asyncio.gather(*(member(index) for index in range(group_size))))


class Lockstep:
    """A policy that samples only while no tool runs: its calls wait until every running episode has made one.

    How many requests share a forward then depends on the tokens alone and not on how long tools take. That matters for
    bit-equality: a matrix product's last digits depend on its number of rows.
    """

    def __init__(self, policy: Policy, *, num_episodes: int) -> None:
        self._policy = policy
        self._num_running = num_episodes
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def __call__(self, token_ids: Sequence[int], *, episode_id: str, seed: int, max_tokens: int) -> Action:
        self._waiting[episode_id] = turn = asyncio.get_running_loop().create_future()
        self._release()
        await turn
        return await self._policy(token_ids, episode_id=episode_id, seed=seed, max_tokens=max_tokens)

    def leave(self) -> None:
        """An episode has ended."""
        self._num_running -= 1
        self._release()

    def _release(self) -> None:
        if len(self._waiting) == self._num_running:
            # In the order of their names, since the order of arrival is the tools'. Soon rather than now, since whoever
            # came last does not await its turn yet and would overtake the others.
            for _, turn in sorted(self._waiting.items()):
                turn.get_loop().call_soon(_take, turn)
            self._waiting.clear()


def _take(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)


async def _talk(
    env: Env,
    policy: Policy,
    renderer: Renderer,
    streams: list["_Stream"],
    episode_id: str,
    seed: int,
    limits: Limits,
) -> Stop:
    """Turn after turn until something ends the episode."""
    try:
        streams[-1].observe(renderer.prompt(await env.reset()))
    except Exception as error:
        return _env_error(episode_id, error)
    for num_actions in range(limits.max_turns):
        stream = streams[-1]
        max_tokens = min(limits.max_action_tokens, limits.max_context_tokens - len(stream.token_ids))
        if max_tokens < 1:
            return Stop.MAX_TOKENS
        action = await policy(
            stream.token_ids, episode_id=episode_id, seed=derive_seed(seed, num_actions), max_tokens=max_tokens
        )
        stop = await _answer(env, renderer, streams, action, episode_id)
        if stop is not None:
            return stop
    return Stop.MAX_TURNS


async def _grade(env: Env) -> Outcome:
    outcome = await env.outcome()
    if not math.isfinite(outcome.reward):
        raise ValueError(f"the environment's reward must be finite, got {outcome.reward}")
    return outcome


async def _answer(
    env: Env, renderer: Renderer, streams: list["_Stream"], action: Action, episode_id: str
) -> Stop | None:
    """Records the action and lets the environment answer it; None: the episode goes on."""
    if not action.is_stopped:
        streams[-1].act(action)
        return Stop.MAX_TOKENS
    parsed = parse(action.token_ids, renderer.tokenizer)
    if isinstance(parsed, ParseError):
        streams[-1].act(action)
        return Stop.PARSE_ERROR
    try:
        observation = await env.step(parsed.messages)
        streams[-1].act(action, reward=observation.reward)
        if observation.is_done:
            return Stop.DONE
        if observation.restart is not None:
            streams.append(_Stream())
            streams[-1].observe(renderer.prompt(observation.restart))
        else:
            streams[-1].observe(renderer.observation(observation.messages))
    except Exception as error:
        return _env_error(episode_id, error)
    return None


def _env_error(episode_id: str, error: Exception) -> Stop:
    log.warning("episode %s ends as env_error: %s: %s", episode_id, type(error).__name__, error)
    return Stop.ENV_ERROR


@dataclass
class _Stream:
    """The append-only tokens of one Trajectory while it grows."""

    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # observation of the turn that has no action yet

    def observe(self, token_ids: Sequence[int]) -> None:
        self.pending.extend(token_ids)
        self.token_ids.extend(token_ids)

    def act(self, action: Action, *, reward: float = 0.0) -> None:
        self.token_ids.extend(action.token_ids)
        turn = Turn(
            observation_ids=tuple(self.pending),
            action_ids=action.token_ids,
            rollout_log_probs=action.log_probs,
            policy_version=action.policy_version,
            policy_versions=action.policy_versions,
            reward=reward,
            routes=self._turn_routes(action),
        )
        self.turns.append(turn)
        self.pending = []

    def _turn_routes(self, action: Action) -> NDArray[np.int16] | None:
        if action.routes is None:
            return None
        num_tokens = len(self.pending) + len(action.token_ids)
        routes = action.routes[-num_tokens:]
        if len(routes) == num_tokens - 1 and not self.turns:  # nothing predicts the first token of a stream
            routes = np.concatenate([np.full_like(routes[:1], -1), routes])
        return routes


def episode_metrics(episodes: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Means over episodes (each a list of its Trajectories): reward, turns, tokens, tool use, shares of stop reasons.

    ``solved``: share with reward 1 or more. ``tool_calls`` and ``tool_errors`` are per episode; ``solved_with_tool`` is
    the share of episodes with a tool call among the solved ones, ``share_with_tool`` among all. A pair NAME/part and
    NAME/whole becomes one NAME, the sum of the parts over the sum of the wholes.
    """
    rewards = np.array([episode[0].reward for episode in episodes])
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "solved": float((rewards >= 1).mean()),
        "episode_turns": float(np.mean([sum(len(t.turns) for t in episode) for episode in episodes])),
        "episode_tokens": float(np.mean([sum(len(t.token_ids) for t in episode) for episode in episodes])),
        "response_tokens_per_episode": float(
            np.mean([sum(len(turn.action_ids) for t in e for turn in t.turns) for e in episodes])
        ),
    }
    names = sorted({name for episode in episodes for name in episode[0].metrics})
    for name in names:
        metrics[name] = float(np.mean([episode[0].metrics.get(name, 0.0) for episode in episodes]))
    for name in [name.removesuffix("/whole") for name in names if name.endswith("/whole")]:
        part, whole = metrics.pop(f"{name}/part"), metrics.pop(f"{name}/whole")
        metrics[name] = part / whole if whole else 0.0
    uses_tool = np.array([episode[0].metrics.get("tool_calls", 0.0) > 0 for episode in episodes])
    is_solved = rewards >= 1
    metrics["share_with_tool"] = float(uses_tool.mean())
    metrics["solved_with_tool"] = float(uses_tool[is_solved].mean()) if is_solved.any() else 0.0
    for stop in Stop:
        metrics[f"stop_{stop.value}"] = float(np.mean([episode[0].stop is stop for episode in episodes]))
    return metrics
