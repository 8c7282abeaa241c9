"""Plays a whole conversation through an environment, as the policy that wrote it."""

from poise.harmony.messages import Role


async def play(task, row, messages):
    """The outcome, after checking that the environment answers exactly with the conversation's own tool results."""
    env = task.make_env(row)
    prompt = await env.reset()
    assert tuple(messages[: len(prompt.messages)]) == prompt.messages
    rest = list(messages[len(prompt.messages) :])
    try:
        while True:
            action = []
            while rest and rest[0].role is Role.ASSISTANT:
                action.append(rest.pop(0))
                if action[-1].is_tool_call:
                    break
            observation = await env.step(action)
            if observation.is_done:
                assert not rest
                return await env.outcome()
            expected, rest = rest[: len(observation.messages)], rest[len(observation.messages) :]
            assert list(observation.messages) == expected
    finally:
        await env.close()
