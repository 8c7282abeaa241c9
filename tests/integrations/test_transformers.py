"""attn_implementation="poise" against Transformers' eager attention of the same GPT-OSS."""

import pytest
import torch
from largest import LargestTensor
from tiny import assert_same_grads, grads_of, tiny_config, twins
from transformers import GptOssForCausalLM

from poise.integrations import transformers as integration
from poise.integrations.transformers import attend, padding_mask, register

LENGTHS = (1, 5, 20, 13)  # shorter and longer than the window of 6


@pytest.fixture(autouse=True)
def registered():
    register()


def tokens(*shape):
    return torch.randint(1, 40, shape)


def padded(sides):
    """(input_ids, attention_mask [rows, 20]): a row per side, with 20, 13, 9, ... tokens."""
    lengths = [20, 13, 9, 1][: len(sides)]
    mask = torch.zeros(len(sides), 20, dtype=torch.int64)
    for row, (side, length) in enumerate(zip(sides, lengths, strict=True)):
        start = {"left": 20 - length, "right": 0, "both": (20 - length) // 2}[side]
        mask[row, start : start + length] = 1
    return tokens(len(sides), 20) * mask, mask


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("sides", [["left"] * 4, ["right"] * 4, ["both", "left", "both", "right"]])
def test_padded_batches_equal_eager(sides, dtype, tolerance):
    eager, poise = twins(dtype)
    input_ids, mask = padded(sides)
    weight = torch.randn(4, 20, 40, dtype=dtype) * mask.unsqueeze(-1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate and TRL give them
    logits = [
        model(input_ids=input_ids, attention_mask=mask, position_ids=positions).logits for model in (eager, poise)
    ]
    is_token = mask.bool()
    torch.testing.assert_close(logits[1][is_token], logits[0][is_token], rtol=tolerance, atol=tolerance)
    expected, actual = (grads_of(m, (x * weight).sum()) for m, x in zip((eager, poise), logits, strict=True))
    assert_same_grads(actual, expected, tolerance)


@pytest.mark.parametrize("mask", [None, torch.ones(3, 20, dtype=torch.int64)], ids=["no mask", "mask of ones"])
def test_full_batches_equal_eager(mask):
    eager, poise = twins()
    input_ids = tokens(3, 20)
    expected, actual = (model(input_ids=input_ids, attention_mask=mask, labels=input_ids) for model in (eager, poise))
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-10, atol=1e-10)
    assert_same_grads(grads_of(poise, actual.loss), grads_of(eager, expected.loss), 1e-10)


def packing_arguments(how):
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)
    cu_seq_lens = torch.tensor([0, 1, 6, 26, 39], dtype=torch.int32)
    extra = {
        "position_ids": {},
        "cu_seq_lens": {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens.clone(),
                        "max_length_q": 20, "max_length_k": 20},
    }[how]  # fmt: skip
    return {"position_ids": positions, **extra}


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_equal_eager_one_by_one(how):
    # Transformers' eager GPT-OSS has no packing: it would attend across the borders. So each sequence goes alone.
    eager, poise = twins()
    sequences = [tokens(1, n) for n in LENGTHS]
    weights = [torch.randn(1, n, 40, dtype=torch.float64) for n in LENGTHS]
    expected = [eager(input_ids=ids).logits for ids in sequences]
    actual = poise(input_ids=torch.cat(sequences, dim=1), **packing_arguments(how)).logits
    torch.testing.assert_close(actual, torch.cat(expected, dim=1), rtol=1e-10, atol=1e-10)
    expected_loss = sum((x * w).sum() for x, w in zip(expected, weights, strict=True))
    actual_grads = grads_of(poise, (actual * torch.cat(weights, dim=1)).sum())
    assert_same_grads(actual_grads, grads_of(eager, expected_loss), 1e-10)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_a_packed_neighbour_gets_no_gradient(how):
    _, poise = twins()
    embeddings = torch.randn(1, 39, 24, dtype=torch.float64, requires_grad=True)
    poise(inputs_embeds=embeddings, **packing_arguments(how)).logits[:, 6:26].sum().backward()
    assert (embeddings.grad[:, :6] == 0).all()
    assert (embeddings.grad[:, 26:] == 0).all()
    assert (embeddings.grad[:, 6:26] != 0).all(dim=-1).all()


def test_packed_rows_with_padding():
    # Positions restart within the rows, and the rows are padded: eager sees each sequence alone.
    eager, poise = twins()
    rows, lengths = tokens(3, 12), [[5, 4], [12], [1, 2, 3]]
    mask, positions, weight = torch.zeros(3, 12).int(), torch.zeros(3, 12).int(), torch.randn(12, 40).double()
    expected_loss = 0
    expected, where = [], []
    for row, (start, pieces) in enumerate(zip((3, 0, 2), lengths, strict=True)):
        for n in pieces:
            mask[row, start : start + n] = 1
            positions[row, start : start + n] = torch.arange(n)
            expected.append(eager(input_ids=rows[row : row + 1, start : start + n]).logits[0])
            where.append((row, slice(start, start + n)))
            expected_loss = expected_loss + (expected[-1] * weight[start : start + n]).sum()
            start += n
    logits = poise(input_ids=rows, attention_mask=mask, position_ids=positions).logits
    for (row, place), x in zip(where, expected, strict=True):
        torch.testing.assert_close(logits[row, place], x, rtol=1e-10, atol=1e-10)
    actual = grads_of(poise, (logits * weight * mask.unsqueeze(-1)).sum())
    assert_same_grads(actual, grads_of(eager, expected_loss), 1e-10)


def test_two_packed_rows():
    # Rows may be packed differently; one row of positions stands for all rows.
    eager, poise = twins()
    rows = tokens(2, 10)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
    actual = poise(input_ids=rows, position_ids=positions).logits
    pieces = [eager(input_ids=x).logits for x in (rows[:1, :4], rows[:1, 4:], rows[1:, :1], rows[1:, 1:])]
    expected = torch.cat([torch.cat(pieces[:2], dim=1), torch.cat(pieces[2:], dim=1)])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    shared = poise(input_ids=rows, position_ids=positions[:1]).logits
    torch.testing.assert_close(shared[0], expected[0], rtol=1e-10, atol=1e-10)
    second = torch.cat([eager(input_ids=rows[1:, :4]).logits, eager(input_ids=rows[1:, 4:]).logits], dim=1)
    torch.testing.assert_close(shared[1:], second, rtol=1e-10, atol=1e-10)


def test_positions_that_are_written_to_are_read_again():
    # What a tensor said is remembered, until it says something else.
    _, poise = twins()
    ids, positions = tokens(1, 8), torch.arange(8).unsqueeze(0)
    whole = poise(input_ids=ids, position_ids=positions).logits
    positions.copy_(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    halves = poise(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(halves[:, 4:], poise(input_ids=ids[:, 4:]).logits, rtol=1e-10, atol=1e-10)
    assert (halves[:, 4:] - whole[:, 4:]).abs().max() > 1e-3
    # The same beside a mask that stays the same.
    q, k, v = layer_inputs(batch=1, queries=8, keys=8)
    mask, sinks = torch.tensor([[True] * 7 + [False]]), torch.zeros(8, dtype=torch.float64)
    as_halves, _ = attend(Layer(), q, k, v, mask, s_aux=sinks, position_ids=positions)
    positions.copy_(torch.arange(8))
    for whole_positions in (positions, torch.arange(8).unsqueeze(0)):
        as_whole, _ = attend(Layer(), q, k, v, mask, s_aux=sinks, position_ids=whole_positions)
        torch.testing.assert_close(as_whole[:, :4], as_halves[:, :4], rtol=1e-12, atol=1e-12)
        assert (as_whole[:, 4:7] - as_halves[:, 4:7]).abs().max() > 1e-3


def test_training_after_evaluation_of_the_same_batch():
    _, poise = twins()
    input_ids, mask = padded(["left", "right"])
    q, k, v = (x.requires_grad_() for x in layer_inputs())
    sinks = torch.randn(8, dtype=torch.float64)
    layer_mask = torch.tensor([[True] * 10, [False] * 4 + [True] * 6])
    with torch.inference_mode():
        poise(input_ids=input_ids, attention_mask=mask)
        evaluated, _ = attend(Layer(), q.detach(), k.detach(), v.detach(), layer_mask, s_aux=sinks, sliding_window=4)
    trained, _ = attend(Layer(), q, k, v, layer_mask, s_aux=sinks, sliding_window=4)
    torch.testing.assert_close(trained.detach(), evaluated.clone(), rtol=0, atol=0)
    trained.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    poise(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss.backward()


def test_generation_with_a_cache_equals_eager():
    # 25 new tokens after prompts of 4 to 9: every sequence crosses the window of 6.
    eager, poise = twins()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9, [0, 0, 0, 0, 0, 1, 1, 1, 1]])
    prompt = tokens(3, 9) * mask
    options = {"max_new_tokens": 25, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        expected, actual = (m.generate(prompt, attention_mask=mask, eos_token_id=None, **options)
                            for m in (eager, poise))  # fmt: skip
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-9, atol=1e-9)


def test_a_prompt_in_two_pieces_equals_the_whole():
    # Several queries behind a cache, in blocks of 4, with gradients to the sinks.
    eager, poise = twins()
    ids = tokens(2, 30)
    expected = eager(input_ids=ids).logits
    first = poise(input_ids=ids[:, :13], use_cache=True)
    integration.QUERY_BLOCK, before = 4, integration.QUERY_BLOCK
    try:
        second = poise(input_ids=ids[:, 13:], past_key_values=first.past_key_values, use_cache=True)
    finally:
        integration.QUERY_BLOCK = before
    actual = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert_same_grads(grads_of(poise, actual.square().sum()), grads_of(eager, expected.square().sum()), 1e-10)


@pytest.mark.parametrize("is_padded", [False, True])
def test_no_tensor_grows_with_the_square_of_the_length(is_padded):
    num_tokens = 1024
    largest = {}
    for model in twins(torch.float32):
        mask = torch.ones(1, num_tokens, dtype=torch.int64)
        mask[:, :100] = 0 if is_padded else 1
        with LargestTensor() as seen:
            model(input_ids=tokens(1, num_tokens), attention_mask=mask).logits.sum().backward()
        largest[model.config._attn_implementation] = seen.numel
    assert largest["eager"] >= 8 * num_tokens**2
    assert largest["poise"] < num_tokens**2 / 4


def test_gradient_checkpointing_gives_the_same_gradients():
    _, poise = twins()
    input_ids, mask = padded(["left", "right", "both"])
    plain = grads_of(poise, poise(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    plain = {name: grad.clone() for name, grad in plain.items()}
    poise.gradient_checkpointing_enable()
    poise.train()
    again = grads_of(poise, poise(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
    assert_same_grads(again, plain, 1e-12)


def test_autocast_computes_in_its_type():
    # Float32 weights under bfloat16 autocast: queries and keys come in float32, values in bfloat16.
    eager, poise = twins(torch.float32)
    ids = tokens(2, 20)
    wide = eager(input_ids=ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = poise(input_ids=ids, labels=ids)
    scale = wide.abs().max()
    assert ((output.logits - wide).abs().max() / scale) < 0.1  # bfloat16 everywhere else too
    assert all(grad.isfinite().all() for grad in grads_of(poise, output.loss).values())
    assert poise.model.layers[0].self_attn.sinks.grad.abs().max() > 0


# --- the function itself ---


class Layer(torch.nn.Module):
    is_causal = True


def layer_inputs(batch=2, heads=8, kv_heads=2, queries=10, keys=10, channels=8):
    q = torch.randn(batch, heads, queries, channels, dtype=torch.float64)
    k, v = torch.randn(2, batch, kv_heads, keys, channels, dtype=torch.float64).unbind()
    return q, k, v


def test_split_heads_take_their_slice_of_the_sinks():
    q, k, v = layer_inputs()
    sinks = torch.randn(8, dtype=torch.float64)
    whole, _ = attend(Layer(), q, k, v, None, s_aux=sinks, sliding_window=4)
    for rank in (0, 1):
        heads, kv_heads = slice(4 * rank, 4 * rank + 4), slice(rank, rank + 1)
        part, _ = attend(Layer(), q[:, heads], k[:, kv_heads], v[:, kv_heads], None, s_aux=sinks, sliding_window=4,
                         sequence_parallel_rank=lambda rank=rank: rank)  # fmt: skip
        torch.testing.assert_close(part, whole[:, :, heads], rtol=1e-12, atol=1e-12)


def test_rows_that_see_nothing_give_zero_and_finite_gradients():
    # Row 1 of the batch has no tokens, in training and behind a cache.
    for queries, dtype in ((10, torch.bool), (3, torch.bool), (10, torch.int64), (3, torch.int64)):
        q, k, v = (x.requires_grad_() for x in layer_inputs(queries=queries))
        sinks = torch.randn(8, dtype=torch.float64, requires_grad=True)
        mask = torch.tensor([[1] * 10, [0] * 10]).to(dtype)
        out, _ = attend(Layer(), q, k, v, mask, s_aux=sinks, sliding_window=4)
        assert (out[1] == 0).all()
        assert (out[0] != 0).all()
        out.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v, sinks))
        assert all((x.grad[1] == 0).all() for x in (q, k, v))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"s_aux": None}, "Layer passes no s_aux"),
        ({"s_aux": torch.zeros(7)}, "7 sinks, which the 8 heads"),
        ({"s_aux": torch.zeros(16)}, "16 sinks for 8 heads.*sequence_parallel_rank"),
        ({"s_aux": torch.zeros(16), "sequence_parallel_rank": lambda: 2}, "gave 2, but there are 2 parts"),
        ({"dropout": 0.1}, "no dropout"),
        ({"softcap": 30.0}, "no softcap"),
        ({"is_causal": False}, "is causal"),
        ({"block_table": torch.zeros(1)}, "paged cache"),
        ({"attention_mask": torch.ones(2, 1, 10, 10)}, r"\[batch, tokens\], got \[2, 1, 10, 10\]"),
        ({"attention_mask": torch.tensor([[1] * 10, [1, 0, 1] + [0] * 7])}, "attention_mask has a gap"),
        ({"attention_mask": torch.tensor([[1] * 10, [0, 1, 0, 0, 1, 0, 0, 0, 0, 0]])}, "attention_mask has a gap"),
        ({"position_ids": torch.zeros(3, 2, 10)}, "position_ids must be"),
        ({"position_ids": torch.zeros(2, 9)}, "position_ids must be"),
        ({"cu_seq_lens_q": torch.tensor([0, 20])}, "one packed row, but the batch has 2"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 20]), "attention_mask": torch.tensor([[1] * 10, [1] * 9 + [0]])},
            "cu_seq_lens_q and an attention_mask with padding",
        ),
    ],
)
def test_errors_name_the_argument(change, words):
    q, k, v = layer_inputs()
    arguments = {"attention_mask": None, "s_aux": torch.zeros(8, dtype=torch.float64), **change}
    with pytest.raises(ValueError, match=words):
        attend(Layer(), q, k, v, **arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seq_lens_k": torch.tensor([0, 5, 10])}, "cu_seq_lens_k must equal"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seqlens must run from 0 to 10"),
    ],
)
def test_errors_of_a_packed_row(change, words):
    q, k, v = layer_inputs(batch=1)
    sinks = torch.zeros(8, dtype=torch.float64)
    with pytest.raises(ValueError, match=words):
        attend(Layer(), q, k, v, None, s_aux=sinks, **{"cu_seq_lens_q": torch.tensor([0, 4, 10]), **change})


def test_more_queries_than_keys_are_refused():
    q, k, v = layer_inputs(queries=11)
    with pytest.raises(ValueError, match="11 queries cannot end with 10 keys"):
        attend(Layer(), q, k, v, None, s_aux=torch.zeros(8, dtype=torch.float64))


def test_packed_sequences_behind_a_cache_are_refused():
    q, k, v = layer_inputs(batch=1, queries=3)
    with pytest.raises(ValueError, match="cu_seq_lens_q cannot say"):
        attend(Layer(), q, k, v, None, s_aux=torch.zeros(8), cu_seq_lens_q=torch.tensor([0, 3]))


def test_a_static_cache_and_other_masks_are_refused():
    _, poise = twins()
    with pytest.raises(ValueError, match="use a dynamic cache"):
        poise.generate(tokens(1, 4), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match=r"\[batch, tokens\], got \[1, 1, 4, 4\]"):
        poise(input_ids=tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match="or_mask_function"):
        padding_mask(1, 4, 4, use_vmap=True)


def test_another_kernel_may_be_named():
    eager, poise = twins()
    ids = tokens(2, 9)
    register(kernel="reference")
    torch.testing.assert_close(poise(input_ids=ids).logits, eager(input_ids=ids).logits, rtol=1e-10, atol=1e-10)
    register(kernel="flash3")
    with pytest.raises(RuntimeError, match="kernel 'flash3' cannot run here"):
        poise(input_ids=ids)


def test_a_checkpoint_loads_with_it(tmp_path):
    eager, _ = twins(torch.float32)
    eager.save_pretrained(tmp_path)
    loaded = GptOssForCausalLM.from_pretrained(tmp_path, attn_implementation="poise", dtype=torch.float32)
    ids = tokens(1, 12)
    torch.testing.assert_close(loaded(input_ids=ids).logits, eager(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    switched = GptOssForCausalLM(tiny_config())
    switched.set_attn_implementation("poise")
    assert switched.config._attn_implementation == "poise"
