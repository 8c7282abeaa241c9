"""verifiers samples from ``poise serve`` itself, token ids in and out: GPT-OSS's vocabulary, its own renderer."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from poise.engine import EmbeddedEngine
from poise.envs.chat import declared_tools, to_conversation
from poise.harmony import HarmonyTokenizer, Renderer, SystemContent
from poise.model import GptOss, GptOssConfig, packed_attend, save_model
from poise.model.gpt_oss import top_k_route

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"
HERE = Path(__file__).parent
ENV = {
    "taskset": {"id": "poise-sums"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 3},
}
MAX_TOKENS, CONTEXT = 40, 700
# By the grammar below: it is cut, it answers, it calls.
SEEDS = (0, 7, 31)
pytestmark = pytest.mark.skipif(
    not PYTHON.exists() or "PYTEST_XDIST_WORKER" in os.environ,
    reason="make test-adapters builds .venv-verifiers and runs",
)


def grammar(tokenizer):
    """Probabilities of the next token: it thinks, then answers 10 or calls a function, with 10 for an argument."""
    (ten,), (assistant,), (final,) = (tokenizer.encode(text) for text in ("10", "assistant", "final"))
    address = [*tokenizer.encode("commentary"), *tokenizer.encode(" to=functions.add")]
    next_of = {
        tokenizer.message: {ten: 1.0},
        ten: {tokenizer.end: 0.4, tokenizer.return_: 0.2, tokenizer.call: 0.4},
        tokenizer.end: {tokenizer.start: 1.0},
        tokenizer.start: {assistant: 1.0},
        assistant: {tokenizer.channel: 1.0},
        tokenizer.channel: {final: 0.5, address[0]: 0.5},
        final: {tokenizer.message: 1.0},
    }
    next_of |= {now: {then: 1.0} for now, then in zip(address, [*address[1:], tokenizer.message], strict=True)}
    assert len(next_of) == 7 + len(address)  # no token has two meanings
    return next_of


def speaker(tokenizer) -> GptOss:
    """A GPT-OSS that speaks by the grammar, but for a little that its layers add: every context has its own numbers."""
    next_of = grammar(tokenizer)
    size = 32
    model = GptOss(
        GptOssConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=size, intermediate_size=16, num_layers=2, num_heads=2,
            num_kv_heads=1, head_dim=16, num_experts=8, experts_per_token=2, sliding_window=16,
            eos_token_ids=tuple(sorted(tokenizer.stop_ids)),
        )
    ).init_weights(1)  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                parameter.mul_(0.1)
            if name.endswith("router.weight"):
                parameter.mul_(50)
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        for place, (now, then) in enumerate(next_of.items()):
            model.model.embed_tokens.weight[now, place] = 1
            for token, probability in then.items():
                model.lm_head.weight[token, place] = (30 + np.log(probability)) / size**0.5
    return model


@pytest.fixture(scope="module")
def tokenizer(o200k_folder):
    return HarmonyTokenizer.load(o200k_folder)


@pytest.fixture(scope="module")
def policy(tokenizer):
    return speaker(tokenizer)


@pytest.fixture(scope="module")
def episodes(tokenizer, policy, o200k_folder, tmp_path_factory):
    """What verifiers recorded of episodes that sampled from ``poise serve``, by the seed of their requests."""
    folder = tmp_path_factory.mktemp("served") / "checkpoint"
    save_model(policy, folder, format="fp32", tokenizer=tokenizer.save)
    command = [sys.executable, "-m", "poise", "serve", str(folder), "--port", "0", "--model.device", "cpu"]
    with subprocess.Popen(
        [*command, "--max-context-tokens", str(CONTEXT)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            line = ""
            while "listening on" not in line:
                line = server.stdout.readline()
                assert line, "the server has ended"
            settings = {
                "env": ENV,
                "url": line.split("listening on ")[1].split(";")[0],
                "model": str(folder),
                "renderer": {"name": "gpt-oss", "conversation_start_date": "2026-01-01"},
                "max_tokens": MAX_TOKENS,
                "seeds": SEEDS,
            }
            paths = {"PYTHONPATH": str(HERE / "verifiers_tasks"), "TIKTOKEN_ENCODINGS_BASE": str(o200k_folder)}
            path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                [PYTHON, HERE / "verifiers_rollouts.py", json.dumps(settings)],
                env={**os.environ, **paths, "PATH": path, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=900,
            )
            assert done.returncode == 0, done.stderr[-3000:]
        finally:
            server.terminate()
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def turns_of(branch):
    """(prompt, answer, log-probs) of each of the policy's turns, as one grows out of the other."""
    stream = []
    for node in branch["nodes"]:
        if node["sampled"]:
            num_sampled = sum(node["mask"])
            assert node["mask"] == [False] * (len(node["mask"]) - num_sampled) + [True] * num_sampled
            prompt = stream + node["token_ids"][:-num_sampled]
            yield prompt, node["token_ids"][-num_sampled:], node["logprobs"]
        else:
            assert not any(node["mask"])
        stream = stream + node["token_ids"]


def test_every_episode_ended_well_and_is_graded_by_what_it_said(episodes, tokenizer):
    assert len(episodes) == len(SEEDS)
    for episode in episodes:
        assert episode["errors"] == []
        [branch] = episode["branches"]
        *_, (_, answer, _) = turns_of(branch)
        finals = re.findall(r"<\|channel\|>final<\|message\|>(\d+)", tokenizer.decode(answer))
        assert episode["reply"] == "".join(finals)
        assert episode["reward"] == 2.0 * (finals == ["10"])  # 10 + 0
    assert {episode["reward"] for episode in episodes} == {0.0, 2.0}
    assert max(sum(node["sampled"] for node in e["branches"][0]["nodes"]) for e in episodes) > 1  # a tool was called


def test_prompts_are_those_of_harmony_and_then_thinking_is_begun(episodes, tokenizer):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
                    "required": ["a", "b"],
                },
            },
        }
    ]
    chat = [
        {"role": "system", "content": "Answer with the number alone."},
        {"role": "user", "content": "What is 10 + 0?"},
    ]
    system = SystemContent(conversation_start_date="2026-01-01")
    renderer = Renderer(tokenizer)
    opening = renderer.prompt(to_conversation(chat, declared_tools(tools), system=system))
    for episode in episodes:
        prompt, _, _ = next(turns_of(episode["branches"][0]))
        assert tokenizer.decode(prompt) == tokenizer.decode(opening) + "<|channel|>analysis<|message|>"
        assert prompt[: len(opening)] == opening


def test_ids_and_routes_are_what_the_engine_samples_for_the_same_seed(episodes, tokenizer, policy):
    async def sampled(prompt, seed):
        engine = EmbeddedEngine(
            policy, stop_ids=tokenizer.stop_ids, return_id=tokenizer.return_, num_slots=1, max_context_tokens=CONTEXT
        )
        return await engine(prompt, episode_id="e", seed=seed, max_tokens=MAX_TOKENS)

    for seed, episode in zip(SEEDS, episodes, strict=True):
        [branch] = episode["branches"]
        turns = list(turns_of(branch))
        for prompt, answer, log_probs in turns:
            action = asyncio.run(sampled(prompt, seed))
            assert tuple(answer) == action.token_ids
            assert log_probs == pytest.approx(action.log_probs, abs=1e-5)
        # Nothing predicts after the last token, so its row is a placeholder.
        routes = np.sort(np.array(branch["routes"])[:-1], axis=-1)
        assert np.array_equal(routes, np.sort(action.routes, axis=-1))


def test_log_probs_are_those_of_one_full_forward(episodes, policy):
    for episode in episodes:
        for prompt, answer, log_probs in turns_of(episode["branches"][0]):
            ids = torch.tensor(prompt + answer)
            attend = packed_attend(torch.tensor([0, len(ids)], dtype=torch.int32), kernel="reference")
            with torch.no_grad():
                hidden = policy(ids, torch.arange(len(ids)), attend, top_k_route(2))[len(prompt) - 1 : -1]
                scores = torch.log_softmax(hidden @ policy.lm_head.weight.T, dim=-1)
            expected = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert log_probs == pytest.approx(expected.tolist(), abs=1e-4)
