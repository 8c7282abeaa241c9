"""Episodes of verifiers' own that sample from a token endpoint: run by an interpreter that has verifiers.

Takes a JSON object as its argument, prints a JSON object per episode.
"""

import asyncio
import json
import sys

from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def main(settings):
    env = load_environment(resolve_env_config(settings["env"]))
    client = TrainClientConfig(base_url=settings["url"] + "/v1", renderer=settings["renderer"])
    task = next(iter(env.taskset))

    async def episode(seed):
        sampling = SamplingConfig(temperature=1.0, max_tokens=settings["max_tokens"], seed=seed)
        [slot] = env.slots(task)
        return await env.run_slot(slot, ModelContext(model=settings["model"], client=client, sampling=sampling))

    async with env.serving():
        episodes = await asyncio.gather(*map(episode, settings["seeds"]))
    for done in episodes:
        [trace] = done.traces
        errors = [str(error.message) for error in (*done.errors, *trace.errors)]
        branches = []
        for branch in trace.branches:
            routes = branch.routed_experts
            nodes = [
                {"token_ids": node.token_ids, "mask": node.mask, "logprobs": node.logprobs, "sampled": node.sampled}
                for node in branch.nodes
            ]
            branches.append({"nodes": nodes, "routes": None if routes is None else routes.tolist()})
        line = {"branches": branches, "reward": trace.reward, "reply": trace.last_reply, "errors": errors}
        print(json.dumps(line | {"stop": trace.stop_condition}))


asyncio.run(main(json.loads(sys.argv[1])))
