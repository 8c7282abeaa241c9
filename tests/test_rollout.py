"""Episodes with a scripted policy: what ends them, what is recorded, and that a stream only ever grows."""

import asyncio

import numpy as np
import pytest

from poise.envs.env import Observation, Outcome, final_text
from poise.harmony import Conversation, Message, Renderer, Role, byte_tokenizer, tool_result, user
from poise.rollout import Limits, Lockstep, episode_metrics, run_episode, run_group
from poise.types import Action, Stop

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
LIMITS = Limits(max_turns=5, max_action_tokens=100, max_context_tokens=1000)


def call(code: str) -> tuple[int, ...]:
    t = TOKENIZER
    header = [t.channel, *t.encode("analysis to=python code"), t.message]
    return (*header, *t.encode(code), t.call)


def answer(text: str) -> tuple[int, ...]:
    t = TOKENIZER
    return (t.channel, *t.encode("final"), t.message, *t.encode(text), t.return_)


class Script:
    """A policy that says what it is told, and remembers what it was shown."""

    def __init__(self, *actions: tuple[int, ...]) -> None:
        self.actions = list(actions)
        self.shown: list[list[int]] = []
        self.seeds: list[int] = []

    async def __call__(self, token_ids, *, episode_id, seed, max_tokens):
        self.shown.append(list(token_ids))
        self.seeds.append(seed)
        said = self.actions[len(self.shown) - 1]
        is_stopped = len(said) <= max_tokens
        said = said[:max_tokens]
        # Routes whose every row holds its own position, so that a misplaced row is seen.
        rows = np.arange(len(token_ids) + len(said) - 1, dtype=np.int16)
        return Action(
            token_ids=said,
            log_probs=tuple(-0.1 * (i + 1) for i in range(len(said))),
            is_stopped=is_stopped,
            policy_version=7,
            routes=np.broadcast_to(rows[:, None, None], (len(rows), 2, 1)),
        )


class Adder:
    """Answers each call with its length; reward 1 for the final answer "ok"; can be told to fail."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in, self.said, self.is_closed = fails_in, "", False

    def _fail(self, where: str) -> None:
        if self.fails_in == where:
            raise OSError("the tool server is gone")

    async def reset(self):
        self._fail("reset")
        return Conversation(messages=(user("Add."),))

    async def step(self, messages):
        self._fail("step")
        if messages[-1].is_tool_call:
            return Observation(messages=(tool_result("python", str(len(messages[-1].content))),), reward=0.25)
        self.said = final_text(messages)
        return Observation(is_done=True)

    async def outcome(self):
        self._fail("outcome")
        reward = float("nan") if self.fails_in == "reward is no number" else float(self.said == "ok")
        return Outcome(reward=reward, metrics={"tool_calls": 2.0})

    async def close(self):
        self.is_closed = True
        self._fail("close")


def play(env, policy, limits=LIMITS):
    episode = run_episode(lambda: env, policy, RENDERER, group_id=3, episode_id="3/0", seed=11, limits=limits)
    return asyncio.run(episode)


def test_an_episode_is_one_append_only_stream():
    policy = Script(call("1+1"), call("12345"), answer("ok"))
    env = Adder()
    (trajectory,) = play(env, policy)
    assert trajectory.stop is Stop.DONE
    assert trajectory.reward == 1.0
    assert env.is_closed
    assert [turn.action_ids for turn in trajectory.turns] == policy.actions
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.25, 0.0]
    # Each prompt is the beginning of the next, and of the whole.
    whole = trajectory.token_ids
    for shown in policy.shown:
        assert whole[: len(shown)] == shown
    assert len(set(policy.seeds)) == 3
    text = TOKENIZER.decode(whole)
    assert text == (
        "<|start|>user<|message|>Add.<|end|><|start|>assistant"
        "<|channel|>analysis to=python code<|message|>1+1<|call|>"
        "<|start|>python to=assistant<|channel|>commentary<|message|>3<|end|><|start|>assistant"
        "<|channel|>analysis to=python code<|message|>12345<|call|>"
        "<|start|>python to=assistant<|channel|>commentary<|message|>5<|end|><|start|>assistant"
        "<|channel|>final<|message|>ok<|return|>"
    )
    sampled = "".join(TOKENIZER.decode([t]) for t, m in zip(whole, trajectory.response_mask, strict=True) if m)
    assert sampled == TOKENIZER.decode([i for action in policy.actions for i in action])
    # Row i of the routes belongs to the forward that predicted token i: input i - 1; the first token has none.
    assert trajectory.routes[:, 0, 0].tolist() == [-1, *range(len(whole) - 1)]


def test_limits_become_stops():
    calls = [call("1+1")] * 9
    few_turns = Limits(max_turns=2, max_action_tokens=100, max_context_tokens=1000)
    (trajectory,) = play(Adder(), Script(*calls), few_turns)
    assert trajectory.stop is Stop.MAX_TURNS
    assert len(trajectory.turns) == 2

    short_actions = Limits(max_turns=5, max_action_tokens=10, max_context_tokens=1000)
    (trajectory,) = play(Adder(), Script(*calls), short_actions)
    assert trajectory.stop is Stop.MAX_TOKENS
    assert len(trajectory.turns[0].action_ids) == 10

    prompt = len(RENDERER.prompt(Conversation(messages=(user("Add."),))))
    narrow = Limits(max_turns=5, max_action_tokens=100, max_context_tokens=prompt + 5)
    (trajectory,) = play(Adder(), Script(*calls), narrow)
    assert trajectory.stop is Stop.MAX_TOKENS
    assert len(trajectory.token_ids) == prompt + 5

    no_room = Limits(max_turns=5, max_action_tokens=100, max_context_tokens=prompt)
    (trajectory,) = play(Adder(), Script(*calls), no_room)
    assert trajectory.stop is Stop.MAX_TOKENS
    assert not trajectory.is_trainable


def test_malformed_actions_end_the_episode():
    t = TOKENIZER
    (trajectory,) = play(Adder(), Script((t.start, t.start, t.message, t.return_)))
    assert trajectory.stop is Stop.PARSE_ERROR
    assert trajectory.reward == 0.0
    assert trajectory.is_trainable


@pytest.mark.parametrize("where", ["reset", "step", "outcome", "reward is no number"])
def test_a_failing_environment_is_never_trained_on(where):
    env = Adder(fails_in=where)
    (trajectory,) = play(env, Script(answer("ok")))
    assert trajectory.stop is Stop.ENV_ERROR
    assert trajectory.reward == 0.0
    assert not trajectory.is_trainable
    assert env.is_closed


def test_an_environment_that_cannot_be_made_or_closed_ends_no_run():
    def make_env():
        raise OSError("the tool server is gone")

    episode = run_episode(make_env, Script(), RENDERER, group_id=3, episode_id="3/0", seed=11, limits=LIMITS)
    (trajectory,) = asyncio.run(episode)
    assert trajectory.stop is Stop.ENV_ERROR
    # One that fails when it is closed has been graded already.
    (trajectory,) = play(Adder(fails_in="close"), Script(answer("ok")))
    assert trajectory.stop is Stop.DONE
    assert trajectory.reward == 1.0


def test_lockstep_batches_do_not_depend_on_the_tools():
    # Two episodes of two turns and one that fails at once; tools take random times. In lockstep the policy is asked by
    # everybody who still runs before anybody is answered, and in the order of the episodes' names.
    def calls_with(delays) -> list[str]:
        asked: list[str] = []
        lockstep = None

        class Slow(Adder):
            def __init__(self, delay, fails_in=""):
                super().__init__(fails_in)
                self.delay = delay

            async def step(self, messages):
                await asyncio.sleep(self.delay)
                return await super().step(messages)

        async def policy(token_ids, *, episode_id, seed, max_tokens):
            asked.append(episode_id)
            said = call("1+1") if len(token_ids) < 60 else answer("ok")
            return Action(token_ids=said, log_probs=(0.0,) * len(said), is_stopped=True)

        async def play_all():
            nonlocal lockstep
            lockstep = Lockstep(policy, num_episodes=3)
            environments = [lambda: Slow(delays[0]), lambda: Slow(delays[1]), lambda: Slow(0, fails_in="reset")]
            groups = [
                run_group(
                    make_env,
                    lockstep,
                    RENDERER,
                    group_id=i,
                    group_size=1,
                    seed=0,
                    limits=LIMITS,
                    on_episode=lambda: lockstep.leave(),
                )
                for i, make_env in enumerate(environments)
            ]
            return await asyncio.gather(*groups)

        groups = asyncio.run(play_all())
        assert [group[0][0].stop for group in groups] == [Stop.DONE, Stop.DONE, Stop.ENV_ERROR]
        return asked

    assert calls_with((0.0, 0.05)) == calls_with((0.05, 0.0)) == ["0/0", "1/0", "0/0", "1/0"]


def test_a_failing_policy_is_raised():
    with pytest.raises(IndexError):
        play(Adder(), Script())


def test_a_restart_opens_a_second_trajectory():
    class Restarting(Adder):
        async def step(self, messages):
            self.said = final_text(messages)
            if self.said == "next":
                history = (user("Add."), Message(role=Role.ASSISTANT, channel="final", content="next"), user("More."))
                return Observation(restart=Conversation(messages=history), reward=0.5)
            return Observation(is_done=True)

    first, second = play(Restarting(), Script(answer("next"), answer("ok")))
    assert first.episode_id == second.episode_id
    assert first.reward == second.reward == 1.0
    assert TOKENIZER.decode(second.turns[0].observation_ids) == (
        "<|start|>user<|message|>Add.<|end|><|start|>assistant<|channel|>final<|message|>next<|end|>"
        "<|start|>user<|message|>More.<|end|><|start|>assistant"
    )
    assert first.turns[0].reward == 0.5


def test_a_group_has_distinct_seeds_and_runs_at_once():
    waiting = []

    async def policy(token_ids, *, episode_id, seed, max_tokens):
        # Answers only when all four episodes have asked: a group that ran one by one would hang.
        waiting.append(seed)
        while len(waiting) < 4:
            await asyncio.sleep(0)
        return Action(token_ids=answer("ok"), log_probs=(0.0,) * len(answer("ok")), is_stopped=True)

    group = asyncio.run(run_group(Adder, policy, RENDERER, group_id=5, group_size=4, seed=1, limits=LIMITS))
    assert len(set(waiting)) == 4
    assert {episode[0].episode_id for episode in group} == {"5/0", "5/1", "5/2", "5/3"}


def test_metrics_by_hand():
    solved = play(Adder(), Script(call("1+1"), answer("ok")))
    failed = play(Adder(), Script(answer("no")))
    metrics = episode_metrics([solved, failed])
    assert metrics["reward_mean"] == 0.5
    assert metrics["reward_std"] == 0.5
    assert metrics["solved"] == 0.5
    assert metrics["episode_turns"] == 1.5
    assert metrics["tool_calls"] == 2.0
    assert metrics["stop_done"] == 1.0
    assert metrics["stop_max_turns"] == 0.0
    assert metrics["response_tokens_per_episode"] == (len(call("1+1")) + len(answer("ok")) + len(answer("no"))) / 2
