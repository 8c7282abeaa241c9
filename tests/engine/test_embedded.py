"""The engine against a fresh full forward of the same model: same log-probs and routes whatever the batch."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from poise.engine import EmbeddedEngine
from poise.model import GptOss, GptOssConfig, packed_attend
from poise.model.gpt_oss import top_k_route
from poise.types import Action

WINDOW = 8
VOCAB = 40
CALL, RETURN = 38, 39


def model_with_large_sinks() -> GptOss:
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=20,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_experts=6,
        experts_per_token=2,
        sliding_window=WINDOW,
    )
    model = GptOss(config).init_weights(0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_(0, 2.0, generator=generator)
        model.lm_head.weight.mul_(20)  # probabilities far from uniform
    return model


def engine_of(model: GptOss, **overrides) -> EmbeddedEngine:
    arguments = {"stop_ids": {CALL, RETURN}, "return_id": RETURN, "num_slots": 4, "max_context_tokens": 96}
    return EmbeddedEngine(model, **(arguments | {"temperature": 0.7} | overrides))


@dataclass
class Replayed:
    """The whole stream of one episode, with what the engine said of each sampled token."""

    token_ids: list[int]
    log_probs: dict[int, float]
    routes: np.ndarray


async def episode(engine: EmbeddedEngine, name: str, observations: list[list[int]], seed: int) -> Replayed:
    stream: list[int] = []
    log_probs: dict[int, float] = {}
    routes = np.zeros(0)
    for turn, observation in enumerate(observations):
        stream += observation
        action: Action = await engine(stream, episode_id=name, seed=seed + turn, max_tokens=15)
        for offset, log_prob in enumerate(action.log_probs):
            log_probs[len(stream) + offset] = log_prob
        stream += action.token_ids
        assert action.routes is not None
        assert len(action.routes) == len(stream) - 1
        routes = action.routes
    return Replayed(token_ids=stream, log_probs=log_probs, routes=routes)


def full_forward(model: GptOss, token_ids: list[int], temperature: float) -> tuple[torch.Tensor, np.ndarray]:
    """Log-probs [T, V] by one uncached forward with the reference kernel, and its routes."""
    recorded = []
    inner = top_k_route(model.config.experts_per_token)

    def route(layer, logits):
        ids, weights = inner(layer, logits)
        recorded.append(ids)
        return ids, weights

    ids = torch.tensor(token_ids)
    cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), packed_attend(cu_seqlens, kernel="reference"), route)
        logits = hidden @ model.lm_head.weight.T
    return torch.log_softmax(logits / temperature, dim=-1), torch.stack(recorded, dim=1).numpy()


def observations_of(rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
    return [rng.integers(0, CALL, size=length).tolist() for length in lengths]


def check(model: GptOss, played: Replayed, temperature: float = 0.7) -> None:
    log_probs, routes = full_forward(model, played.token_ids, temperature)
    for position, log_prob in played.log_probs.items():
        expected = log_probs[position - 1, played.token_ids[position]].item()
        assert log_prob == pytest.approx(expected, abs=1e-4)
    # The last sampled token was never an input.
    assert np.array_equal(np.sort(played.routes, -1), np.sort(routes[: len(played.routes)], -1))


# Prompts shorter than the window, equal to it, one beyond, far beyond; observations of one token and of many.
LENGTHS = [[1, 1, 20], [7, 3, 2], [8, 1, 9], [9, 17, 1], [30, 8, 7], [3, 2, 1], [16, 12, 3]]


@pytest.mark.parametrize("num_slots", [1, 3, 8])
@pytest.mark.parametrize("max_prefill_tokens", [5, 4096])
def test_log_probs_equal_a_full_forward_for_any_batch(num_slots, max_prefill_tokens):
    # One slot serves the episodes in turn and evicts them between turns; eight slots sample all at once; with three
    # they wait, evict and resume. A small prefill budget cuts prompts into pieces.
    model = model_with_large_sinks()
    rng = np.random.default_rng(0)
    plays = [observations_of(rng, lengths) for lengths in LENGTHS]

    async def play(order: list[int]) -> dict[int, Replayed]:
        engine = engine_of(model, num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)
        replayed = await asyncio.gather(*(episode(engine, f"e{i}", plays[i], seed=100 * i) for i in order))
        return dict(zip(order, replayed, strict=True))

    forward = asyncio.run(play(list(range(len(plays)))))
    backward = asyncio.run(play(list(reversed(range(len(plays))))))
    for i in range(len(plays)):
        check(model, forward[i])
        assert forward[i].token_ids == backward[i].token_ids  # the same seed samples the same tokens in any company


@pytest.mark.parametrize("max_prefill_tokens", [5, 4096])
@pytest.mark.parametrize("prompt_length", [1, 2, 7, 8, 9, 30])
def test_episodes_of_a_group_prefill_their_prompt_once(prompt_length, max_prefill_tokens):
    model = model_with_large_sinks()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, CALL, size=prompt_length).tolist() for _ in range(2)]
    fed = []
    model.register_forward_pre_hook(lambda module, arguments: fed.append(len(arguments[0])))

    async def play(num_slots):
        engine = engine_of(model, num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)
        plays = [[prompts[i % 2], rng.integers(0, CALL, size=1 + i).tolist()] for i in range(6)]
        return await asyncio.gather(*(episode(engine, f"e{i}", p, seed=7 * i) for i, p in enumerate(plays)))

    for num_slots in (6, 4):
        fed.clear()
        together = asyncio.run(play(num_slots))
        num_fed = sum(fed)  # before the checks below run the model as well
        for played in together:
            check(model, played)
        if num_slots == 6 and prompt_length > 1:
            # Two prompts, in each of the other four episodes its last token, all observations, and every sampled token
            # but each episode's very last.
            sampled = sum(len(played.log_probs) for played in together)
            observed = sum(1 + i for i in range(6))
            assert num_fed == 2 * prompt_length + 4 + observed + sampled - 6


def test_a_cancelled_leader_leaves_its_followers_working():
    model = model_with_large_sinks()
    engine = engine_of(model, max_prefill_tokens=4)
    prompt = np.random.default_rng(6).integers(0, CALL, size=20).tolist()

    async def run():
        leader = asyncio.create_task(engine(prompt, episode_id="a", seed=0, max_tokens=5))
        follower = asyncio.create_task(engine(prompt, episode_id="b", seed=1, max_tokens=5))
        for _ in range(3):
            await asyncio.sleep(0)
        leader.cancel()
        return await follower

    action = asyncio.run(run())
    log_probs, _ = full_forward(model, [*prompt, *action.token_ids], 0.7)
    expected = [log_probs[19 + i, t].item() for i, t in enumerate(action.token_ids)]
    assert action.log_probs == pytest.approx(expected, abs=1e-4)


def test_long_observations_are_fed_in_pieces():
    import poise.engine.embedded as embedded

    assert embedded.MAX_CONTINUING_TOKENS == 512
    model = model_with_large_sinks()
    rng = np.random.default_rng(3)
    engine = engine_of(model, max_context_tokens=1400, num_slots=2)
    played = asyncio.run(episode(engine, "long", observations_of(rng, [5, 700, 600]), seed=4))
    check(model, played)


def test_new_policy_version_drops_the_cache():
    model = model_with_large_sinks()
    rng = np.random.default_rng(1)
    engine = engine_of(model)
    first, second = observations_of(rng, [12, 5])

    async def run() -> tuple[list[int], Action]:
        action = await engine(first, episode_id="a", seed=0, max_tokens=10)
        stream = [*first, *action.token_ids, *second]
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
        engine.new_policy_version(3)
        return stream, await engine(stream, episode_id="a", seed=1, max_tokens=10)

    stream, action = asyncio.run(run())
    assert action.policy_version == 3
    log_probs, _ = full_forward(model, [*stream, *action.token_ids], 0.7)
    expected = [log_probs[len(stream) - 1 + i, t].item() for i, t in enumerate(action.token_ids)]
    assert action.log_probs == pytest.approx(expected, abs=1e-4)


def test_stops_at_stop_ids_and_at_max_tokens():
    model = model_with_large_sinks()

    async def run(favoured: int, max_tokens: int) -> Action:
        engine = engine_of(model, stop_ids={favoured}, return_id=favoured)
        return await engine([1, 2, 3], episode_id="a", seed=5, max_tokens=max_tokens)

    free = asyncio.run(run(VOCAB + 1, 12))  # no stop id at all
    assert len(free.token_ids) == 12
    assert not free.is_stopped
    third = free.token_ids[2]
    stopped = asyncio.run(run(third, 12))
    end = free.token_ids.index(third) + 1
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.is_stopped


def test_seeds_differ_and_frequencies_match_the_distribution():
    # 4,000 single-token requests for the same prompt against the exact distribution: chi-square, likely tokens.
    model = model_with_large_sinks()
    engine = engine_of(model, num_slots=256, temperature=1.0, max_context_tokens=8)

    async def run() -> list[int]:
        calls = [engine([4, 9, 1], episode_id=str(i), seed=i, max_tokens=1) for i in range(4000)]
        return [action.token_ids[0] for action in await asyncio.gather(*calls)]

    counts = np.bincount(asyncio.run(run()), minlength=VOCAB)
    log_probs, _ = full_forward(model, [4, 9, 1, 0], 1.0)
    expected = log_probs[2].exp().double().numpy() * 4000
    likely = expected > 20
    chi2 = float(((counts - expected) ** 2 / expected)[likely].sum())
    degrees = int(likely.sum())
    assert degrees >= 3
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


def test_bad_requests_are_refused():
    engine = engine_of(model_with_large_sinks())
    with pytest.raises(ValueError, match="max_context_tokens 96"):
        asyncio.run(engine([1] * 90, episode_id="a", seed=0, max_tokens=10))
    with pytest.raises(ValueError, match="token_ids"):
        asyncio.run(engine([], episode_id="a", seed=0, max_tokens=10))


def test_an_error_in_a_step_reaches_every_caller():
    model = model_with_large_sinks()
    engine = engine_of(model)

    async def run() -> list[object]:
        calls = [engine([VOCAB + 7], episode_id=str(i), seed=0, max_tokens=3) for i in range(3)]  # no such token
        return list(await asyncio.gather(*calls, return_exceptions=True))

    assert all(isinstance(result, IndexError) for result in asyncio.run(run()))
    # and the engine works again afterwards
    assert asyncio.run(engine([1], episode_id="x", seed=0, max_tokens=1)).token_ids


def test_a_cancelled_request_frees_its_slot():
    engine = engine_of(model_with_large_sinks(), num_slots=1, stop_ids={VOCAB + 1})

    async def run() -> Action:
        task = asyncio.create_task(engine([1], episode_id="a", seed=0, max_tokens=80))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        return await engine([2], episode_id="b", seed=0, max_tokens=2)

    assert len(asyncio.run(run()).token_ids) == 2


def test_weights_that_move_under_way_leave_each_token_its_version_log_prob_and_routes():
    old, new = model_with_large_sinks(), model_with_large_sinks()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    acting = model_with_large_sinks()
    engine = engine_of(acting, stop_ids=set(), max_context_tokens=200)
    engine.new_policy_version(4)

    async def main():
        prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5, 3]]
        tasks = [
            asyncio.create_task(engine(prompt, episode_id=f"{i}", seed=i, max_tokens=40))
            for i, prompt in enumerate(prompts)
        ]
        for version in (5, 6):
            for _ in range(13):
                await asyncio.sleep(0)
            if version == 5:
                with pytest.raises(RuntimeError, match="while episodes are being sampled"):
                    engine.new_policy_version(version)
                acting.load_state_dict(new.state_dict())
            engine.new_policy_version(version, in_flight=True)  # the second time nothing has moved but the version
        return prompts, await asyncio.gather(*tasks)

    for prompt, action in zip(*asyncio.run(main()), strict=True):
        versions = list(action.policy_versions)
        assert versions == sorted(versions)
        assert set(versions) == {4, 5, 6}
        assert action.policy_version == 4
        stream = [*prompt, *action.token_ids]
        said = {model: full_forward(model, stream, 0.7) for model in (old, new)}
        for offset, (token, log_prob, version) in enumerate(
            zip(action.token_ids, action.log_probs, versions, strict=True)
        ):
            log_probs, routes = said[old if version == 4 else new]
            row = len(prompt) + offset - 1  # of the input that predicted it
            assert log_prob == pytest.approx(log_probs[row, token].item(), abs=1e-4)
            assert np.array_equal(np.sort(action.routes[row], -1), np.sort(routes[row], -1))


def test_an_action_within_one_version_names_it_once():
    engine = engine_of(model_with_large_sinks())
    engine.new_policy_version(7)
    action = asyncio.run(engine([1, 2, 3], episode_id="e", seed=0, max_tokens=5))
    assert (action.policy_version, action.policy_versions) == (7, ())


def test_requests_with_temperatures_and_stops_of_their_own_share_forwards():
    model = model_with_large_sinks()
    engine = engine_of(model)
    prompt = [3, 1, 4]

    async def main():
        return await asyncio.gather(
            engine.sample(prompt, episode_id="a", seed=1, max_tokens=20, temperature=1.5, stop_ids=[7], num_top=3),
            engine.sample(prompt, episode_id="b", seed=1, max_tokens=20),
        )

    (hot, tops), (plain, no_tops) = asyncio.run(main())
    for action, temperature, stops in ((hot, 1.5, {7}), (plain, 0.7, {CALL, RETURN})):
        stream = [*prompt, *action.token_ids]
        log_probs, _ = full_forward(model, stream, temperature)
        expected = [log_probs[i - 1, stream[i]].item() for i in range(len(prompt), len(stream))]
        assert action.log_probs == pytest.approx(expected, abs=1e-4)
        assert not stops & set(action.token_ids[:-1])
        assert action.is_stopped == (action.token_ids[-1] in stops)
    assert no_tops == []
    log_probs, _ = full_forward(model, prompt, 1.5)
    values, ids = log_probs[-1].topk(3)
    assert list(tops[0]) == ids.tolist()
    assert list(tops[0].values()) == pytest.approx(values.tolist(), abs=1e-4)


def test_a_paused_engine_goes_on_where_it_was():
    async def main(pauses):
        engine = engine_of(model_with_large_sinks(), stop_ids=set())
        task = asyncio.create_task(engine([1, 2, 3], episode_id="e", seed=0, max_tokens=30))
        for _ in range(10):
            await asyncio.sleep(0)
        if pauses:
            engine.pause()
            late = asyncio.create_task(engine([1, 2], episode_id="late", seed=0, max_tokens=5))
            await asyncio.sleep(0.01)
            before = engine.num_sampled_tokens
            await asyncio.sleep(0.01)
            assert engine.num_sampled_tokens == before > 0
            assert not late.done()
            engine.resume()
            await late
        return await task

    paused, straight = asyncio.run(main(True)), asyncio.run(main(False))
    assert paused.token_ids == straight.token_ids


@pytest.mark.parametrize("max_prefill_tokens", [5, 4096])
def test_scores_of_given_tokens_equal_a_full_forward(max_prefill_tokens):
    # Two turns, the first with a stop id in the middle of its action; beside it, a request that samples.
    model = model_with_large_sinks()
    rng = np.random.default_rng(8)
    prompt, action, result, answer = ([int(i) for i in rng.integers(0, CALL, size=n)] for n in (11, 9, 4, 6))
    action[3] = CALL

    async def run():
        engine = engine_of(model, max_prefill_tokens=max_prefill_tokens)
        sampled = asyncio.create_task(engine([4, 2], episode_id="b", seed=3, max_tokens=20))
        first = await engine.score(prompt, action, episode_id="a")
        second = await engine.score([*prompt, *action, *result], answer, episode_id="a")
        return first, second, await sampled, await engine([4, 2], episode_id="c", seed=3, max_tokens=20)

    first, second, beside, alone = asyncio.run(run())
    stream = [*prompt, *action, *result, *answer]
    log_probs, routes = full_forward(model, stream, 0.7)
    for scored, start in ((first, len(prompt)), (second, len(stream) - len(answer))):
        expected = [log_probs[i - 1, stream[i]].item() for i in range(start, start + len(scored.token_ids))]
        assert list(scored.token_ids) == stream[start : start + len(scored.token_ids)]
        assert scored.log_probs == pytest.approx(expected, abs=1e-4)
    assert np.array_equal(np.sort(second.routes, -1), np.sort(routes[:-1], -1))
    assert beside.token_ids == alone.token_ids
    with pytest.raises(ValueError, match="max_tokens at least 1"):
        asyncio.run(engine_of(model).score([1], [], episode_id="a"))
