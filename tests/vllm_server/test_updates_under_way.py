"""Weights that move while requests are being sampled."""

import asyncio

import torch
from conftest import CONTEXT
from test_weights_arrive import TOLERANCE, engine_at, sequences, trainer_log_probs

from poise.train.sync import weight_sync


def test_each_token_knows_its_weights_and_has_their_log_prob(server, model_a, model_b, tmp_path):
    """Requests are frozen, get B for A, and go on: earlier tokens are A's, later ones B's, to 1e-4 each."""
    prompts = sequences(seed=6, lengths=(5, 30, 60))

    async def updated_under_way(engine, sync, attempt):
        """The actions; None where a busy machine was so slow to pause the server that one had ended before."""
        await sync.sync(model_a, 1, mark="a")
        calls = [
            asyncio.create_task(engine(prompt, episode_id=f"{attempt} {i}", seed=i, max_tokens=1500))
            for i, prompt in enumerate(prompts)
        ]
        while not await under_way(engine, server.url) and not any(call.done() for call in calls):
            await asyncio.sleep(0.05)
        await sync.sync(model_b, 2, mark="b")
        actions = await asyncio.gather(*calls)
        has_ended = any(action.policy_version == 1 and not action.policy_versions for action in actions)
        return None if has_ended else actions

    async def run():
        async with engine_at(server) as engine:
            sync = await weight_sync(engine, model_a, folder=tmp_path, max_context_tokens=CONTEXT)
            engine.stop_ids = frozenset()  # all run to the end, so that all are under way when B comes
            for attempt in range(10):
                if actions := await updated_under_way(engine, sync, attempt):
                    break
            after = await engine(prompts[0], episode_id="after", seed=0, max_tokens=5)
            await sync.sync(model_a, 3, mark="a")
            await sync.route.close()
            return actions, after

    actions, after = asyncio.run(run())
    assert set(after.policy_versions or (after.policy_version,)) == {2}
    for prompt, action in zip(prompts, actions, strict=True):
        versions = action.policy_versions
        assert set(versions) == {1, 2}
        assert list(versions) == sorted(versions)
        stream, num_old = [*prompt, *action.token_ids], versions.count(1)
        theirs = torch.tensor(action.log_probs)
        old, new = (trainer_log_probs(model, stream)[len(prompt) - 1 :] for model in (model_a, model_b))
        torch.testing.assert_close(theirs[:num_old], old[:num_old], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(theirs[num_old:], new[num_old:], rtol=0, atol=TOLERANCE)
        assert float((old - new).abs().max()) > 1


async def under_way(engine, url):
    """Whether all three requests are being sampled, by the server's own count."""
    response = await engine.servers._send(url, "GET", "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    running = next(float(value) for key, value in lines.items() if key.startswith("vllm:num_requests_running"))
    return running == 3
