"""MXFP4 against values by hand and against Transformers' dequantization."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from poise.ops.mxfp4 import pack, unpack

POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_unpack_by_hand():
    # Byte 0x21: low nibble 1 (0.5) first, then 2 (1.0). 0xF9: -0.5, -6. Scale 130 multiplies by 8, 126 halves.
    blocks = torch.zeros(2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([0x21, 0xF9])
    blocks[1, 0, 0] = 0x75
    values = unpack(blocks, torch.tensor([[130], [126]], dtype=torch.uint8), torch.float32)
    assert values.shape == (2, 32)
    assert values[0, :5].tolist() == [4.0, 8.0, -4.0, -48.0, 0.0]
    assert values[1, :3].tolist() == [1.5, 3.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpack_equals_transformers_bit_for_bit(dtype):
    # Every byte and every scale, NaN and overflow of the extreme scales included.
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 256, 16, 16).contiguous()
    blocks[1] = blocks[1].flip(-1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(2, 256, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [experts, in, out]
    actual = unpack(blocks, scales, dtype).transpose(1, 2).contiguous()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(actual.view(bits), expected.view(bits))


def test_pack_by_hand():
    # Largest 6 = 1.5 * 2^2 -> scale 2^0. Nearest values, ties to the even code: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1,
    # 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4; signs survive, also that of zero.
    row = torch.zeros(1, 32)
    row[0, :18] = torch.tensor(
        [6, 0.25, 0.26, 0.75, 0.74, 1.25, 1.26, 1.75, 1.74, 2.5, 2.51, 3.5, 3.49, 5, 5.01, -0.0, -0.3, -6]
    )
    blocks, scales = pack(row)
    assert scales.tolist() == [[127]]
    codes = [7, 0, 1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6, 7, 8, 9, 15]
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten()
    assert nibbles.tolist() == codes + [0] * 14
    assert blocks[0, 0, 0] == 0x07  # the first value is the low nibble


@pytest.mark.parametrize(
    ("largest", "scale", "value"),
    [
        (4.0, 127, 4.0),
        (7.9, 127, 6.0),  # saturates: the scale is that of floor(log2)
        (8.0, 128, 8.0),
        (3.0, 126, 3.0),
        (1.0, 125, 1.0),
        (0.0, 0, 0.0),
        (2.0**-127, 0, 2.0**-127),
        (2.0**127, 252, 2.0**127),
    ],
)
def test_scale_by_hand(largest, scale, value):
    row = torch.zeros(32)
    row[31] = -largest
    blocks, scales = pack(row)
    assert scales.tolist() == [scale]
    assert unpack(blocks, scales, torch.float32)[31].item() == -value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_packed_packs_to_the_same_bytes(dtype):
    weight = (torch.randn(3, 50, 128) * torch.logspace(-6, 6, 50)[:, None]).to(dtype)
    blocks, scales = pack(weight)
    again = pack(unpack(blocks, scales, dtype))
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)


@settings(max_examples=50)
@given(codes=st.lists(st.integers(0, 255), min_size=16, max_size=16), scale=st.integers(3, 250))
def test_any_block_keeps_its_values(codes, scale):
    # A block whose largest code is below 4 gets another scale, never another value.
    blocks = torch.tensor([codes], dtype=torch.uint8)
    scales = torch.tensor([scale], dtype=torch.uint8)
    values = unpack(blocks, scales, torch.float32)
    again = unpack(*pack(values), torch.float32)
    assert torch.equal(again.view(torch.int32), values.view(torch.int32))
    if any(code & 7 >= 6 or (code >> 4) & 7 >= 6 for code in codes):  # canonical: holds a 4 or a 6
        assert torch.equal(pack(values)[0], blocks)


def test_pack_takes_the_nearest_value():
    weight = torch.randn(64, 32)
    blocks, scales = pack(weight)
    packed = unpack(blocks, scales, torch.float32)
    grid = torch.tensor([s * v for v in POSITIVE for s in (1, -1)])
    candidates = grid * 2.0 ** (scales.float() - 127)[:, :, None]  # [64, 1, 16]
    best = (weight[:, :, None] - candidates).abs().amin(dim=-1)
    torch.testing.assert_close((weight - packed).abs(), best, rtol=1e-6, atol=0)


def test_errors_name_the_argument(annotations_unchecked):
    bytes_of = {"dtype": torch.uint8}
    with pytest.raises(ValueError, match="must be uint8"):
        unpack(torch.zeros(1, 16), torch.zeros(1, **bytes_of), torch.float32)
    with pytest.raises(ValueError, match=r"blocks must be \[\.\.\., G, 16\]"):
        unpack(torch.zeros(1, 15, **bytes_of), torch.zeros(1, **bytes_of), torch.float32)
    with pytest.raises(ValueError, match="scales"):
        unpack(torch.zeros(2, 16, **bytes_of), torch.zeros(1, **bytes_of), torch.float32)
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(torch.zeros(4, 48))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            pack(torch.full((32,), bad))
