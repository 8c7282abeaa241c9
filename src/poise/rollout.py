"""Episodes: an environment and a policy talk until one of them, or a limit, ends it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from poise.config import RolloutConfig
from poise.envs.env import Env, Outcome
from poise.harmony import ParseError, Renderer, parse
from poise.seeding import derive_seed
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
    env: Env,
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
    policy is raised. The reward is the environment's, also after a limit; 0 for ENV_ERROR.
    """
    streams = [_Stream()]
    num_actions = 0
    try:
        stop = None
        try:
            streams[-1].observe(renderer.prompt(await env.reset()))
        except Exception as error:
            stop = _env_error(episode_id, error)
        while stop is None:
            stream = streams[-1]
            max_tokens = min(limits.max_action_tokens, limits.max_context_tokens - len(stream.token_ids))
            if num_actions == limits.max_turns:
                stop = Stop.MAX_TURNS
            elif max_tokens < 1:
                stop = Stop.MAX_TOKENS
            else:
                action = await policy(
                    stream.token_ids,
                    episode_id=episode_id,
                    seed=derive_seed(seed, num_actions),
                    max_tokens=max_tokens,
                )
                num_actions += 1
                stop = await _answer(env, renderer, streams, action, episode_id)
        outcome = Outcome(reward=0.0)
        if stop is not Stop.ENV_ERROR:
            try:
                outcome = await env.outcome()
            except Exception as error:
                stop = _env_error(episode_id, error)
    finally:
        await env.close()
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
) -> list[list[Trajectory]]:
    """``group_size`` episodes of the same problem, concurrently: one list of Trajectories per episode."""
    episodes = [
        run_episode(
            make_env(),
            policy,
            renderer,
            group_id=group_id,
            episode_id=f"{group_id}/{member}",
            seed=derive_seed(seed, member),
            limits=limits,
        )
        for member in range(group_size)
    ]
    return list(await asyncio.gather(*episodes))


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
    the share of episodes with a tool call among the solved ones, ``share_with_tool`` among all.
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
    uses_tool = np.array([episode[0].metrics.get("tool_calls", 0.0) > 0 for episode in episodes])
    is_solved = rewards >= 1
    metrics["share_with_tool"] = float(uses_tool.mean())
    metrics["solved_with_tool"] = float(uses_tool[is_solved].mean()) if is_solved.any() else 0.0
    for stop in Stop:
        metrics[f"stop_{stop.value}"] = float(np.mean([episode[0].stop is stop for episode in episodes]))
    return metrics
