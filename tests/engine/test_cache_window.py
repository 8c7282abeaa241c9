"""The cache's attention is the trainer's, at every distance around the window and however the tokens are fed."""

import pytest
import torch

from poise.engine.cache import Chunk, KeyValueCache
from poise.model import GptOssConfig
from poise.ops.attention import sink_attention

WINDOW, NUM_TOKENS, HEADS, CHANNELS = 128, 300, 4, 8
SLIDING, FULL = 0, 1  # layers


def empty_cache() -> KeyValueCache:
    config = GptOssConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=HEADS, num_kv_heads=2,
        head_dim=CHANNELS, num_experts=2, experts_per_token=1, sliding_window=WINDOW,
    )  # fmt: skip
    return KeyValueCache(
        config, num_slots=3, max_context_tokens=NUM_TOKENS, device=torch.device("cpu"), dtype=torch.float64
    )


def tokens() -> list[torch.Tensor]:
    shapes = [(NUM_TOKENS, HEADS, CHANNELS), (NUM_TOKENS, 2, CHANNELS), (NUM_TOKENS, 2, CHANNELS), (HEADS,)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def fed(layer: int, q, k, v, sinks, pieces) -> torch.Tensor:
    """The outputs of one episode in slot 1, fed ``pieces[i]`` tokens at a time."""
    cache, start, outs = empty_cache(), 0, []
    for length in pieces:
        attention = cache.attend([Chunk(slot=1, start=start, num_tokens=length)])
        rows = slice(start, start + length)
        outs.append(attention(layer, q[rows], k[rows], v[rows], sinks, cache.windows[layer]))
        start += length
    return torch.cat(outs)


FEEDINGS = {
    "a token at a time": [1] * NUM_TOKENS,
    "a prompt of one window, then tokens": [WINDOW] + [1] * (NUM_TOKENS - WINDOW),
    "a prompt beyond the window, then tokens": [200] + [1] * 100,
    "observations between tokens": [100, 1, 1, 26, 1, 1, 40, 1, 129],
}


@pytest.mark.parametrize("pieces", FEEDINGS.values(), ids=FEEDINGS.keys())
def test_every_position_sees_what_the_trainer_sees(pieces):
    assert sum(pieces) == NUM_TOKENS
    q, k, v, sinks = tokens()
    cu_seqlens = torch.tensor([0, NUM_TOKENS], dtype=torch.int32)
    for layer, window in ((SLIDING, WINDOW), (FULL, None)):
        expected = sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens, window=window, kernel="reference")
        # The cache's softmax is float32 at least.
        torch.testing.assert_close(fed(layer, q, k, v, sinks, pieces), expected, rtol=1e-5, atol=1e-5)
    for other in (WINDOW - 1, WINDOW + 1):  # a window off by one would show
        wrong = sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens, window=other, kernel="reference")
        assert (fed(SLIDING, q, k, v, sinks, pieces) - wrong).abs().max() > 1e-3


def test_layers_read_the_borders_of_fresh_prompts_once():
    # sink_attention remembers them by their version, which a tensor of inference mode does not have.
    with torch.inference_mode():
        attention = empty_cache().attend([Chunk(slot=i, start=0, num_tokens=n) for i, n in enumerate((3, 4))])
    assert not attention.fresh_cu_seqlens.is_inference()
    assert attention.fresh_cu_seqlens.dtype == torch.int32
    assert attention.fresh_cu_seqlens.tolist() == [0, 3, 7]


@pytest.mark.parametrize("pieces", FEEDINGS.values(), ids=FEEDINGS.keys())
def test_distance_127_matters_and_128_does_not(pieces):
    q, k, v, sinks = tokens()
    before = fed(SLIDING, q, k, v, sinks, pieces)
    v[40] += 1
    change = (fed(SLIDING, q, k, v, sinks, pieces) - before).abs().amax(dim=(1, 2))
    assert (change[40:168] > 0).all()
    assert (change[:40] == 0).all()
    assert (change[168:] == 0).all()


@pytest.mark.parametrize("max_scores", [1, 4 * 90 * 290 * 2, 2**24], ids=["one slot", "two slots", "all at once"])
def test_slots_that_continue_together_see_their_own_history_however_they_are_grouped(max_scores, monkeypatch):
    monkeypatch.setattr("poise.engine.cache.MAX_SCORES", max_scores)
    q, k, v, sinks = tokens()
    starts, lengths = (200, 130, 50), (90, 3, 70)  # each slot is fed the first tokens of its own sequence
    for layer, window in ((SLIDING, WINDOW), (FULL, None)):
        cache = empty_cache()
        episodes = [[x.roll(slot, dims=0) for x in (q, k, v)] for slot in range(3)]
        for slot, (start, episode) in enumerate(zip(starts, episodes, strict=True)):
            cache.attend([Chunk(slot=slot, start=0, num_tokens=start)])(
                layer, *(x[:start] for x in episode), sinks, window
            )
        attention = cache.attend(
            [
                Chunk(slot=slot, start=start, num_tokens=n)
                for slot, (start, n) in enumerate(zip(starts, lengths, strict=True))
            ]
        )
        assert len(attention.padded) == {1: 3, 2**24: 1}.get(max_scores, 2)
        fed_now = [
            torch.cat(
                [episode[i][start : start + n] for episode, start, n in zip(episodes, starts, lengths, strict=True)]
            )
            for i in range(3)
        ]
        outs = attention(layer, *fed_now, sinks, window).split(lengths)
        for out, episode, start, n in zip(outs, episodes, starts, lengths, strict=True):
            cu_seqlens = torch.tensor([0, start + n], dtype=torch.int32)
            whole = [x[: start + n] for x in episode]
            expected = sink_attention(*whole, sinks, cu_seqlens=cu_seqlens, window=window, kernel="reference")
            torch.testing.assert_close(out, expected[start:], rtol=1e-5, atol=1e-5)
