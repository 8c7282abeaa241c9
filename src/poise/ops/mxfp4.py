"""MXFP4 as OpenAI's checkpoints hold it: blocks of 32 FP4 values (E2M1) that share one power of two (E8M0).

OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3, 5.4.1 and 6.3.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

BLOCK = 32
SCALE_BIAS = 127
MAX_EXPONENT = 2  # 6.0, the largest E2M1 value, is 1.5 * 2**2
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway between neighbours. A tie goes to the even code: down where the lower code is even, else up.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True)
class Mxfp4Stack:
    """Frozen matrices [E, I, O] as OpenAI's checkpoint holds them: each transposed, then packed along I.

    ``blocks`` uint8 [E, O, I / 32, 16], ``scales`` uint8 [E, O, I / 32]: 4.25 bits a value. Raises ValueError for other
    shapes and types.
    """

    blocks: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        _check(self.blocks, self.scales)
        if self.blocks.dim() != 4:
            raise ValueError(f"blocks must be [E, O, I / 32, 16], got {list(self.blocks.shape)}")

    @classmethod
    def of(cls, weight: Float[Tensor, "E I O"]) -> "Mxfp4Stack":
        """The nearest values, see ``pack``."""
        return cls(*pack(weight.transpose(1, 2)))

    @property
    def shape(self) -> torch.Size:
        """[E, I, O] of the matrices."""
        experts, outputs, groups, _ = self.blocks.shape
        return torch.Size((experts, groups * BLOCK, outputs))

    def matrix(self, expert: int, dtype: torch.dtype) -> Float[Tensor, "I O"]:
        """One matrix, unpacked."""
        return unpack(self.blocks[expert], self.scales[expert], dtype).t()


def unpack(
    blocks: UInt8[Tensor, "*batch G 16"], scales: UInt8[Tensor, "*batch G"], dtype: torch.dtype
) -> Float[Tensor, "*batch N"]:
    """Values [..., 32 G]: E2M1(nibble) * 2**(scale - 127), low nibble first.

    Raises ValueError for tensors that are not uint8 or do not fit together.
    """
    _check(blocks, scales)
    values = _values_of_bytes(blocks.device)[blocks.int()].flatten(-2)
    return values.ldexp_((scales.to(torch.int32) - SCALE_BIAS).unsqueeze(-1)).flatten(-2).to(dtype)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the first to ask may be sampling, the next one training
def _values_of_bytes(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values of a byte. A byte at a time, the temporaries are half as large."""
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.float32, device=device)
    codes = torch.arange(256, device=device)
    return torch.stack((values[codes & 0x0F], values[codes >> 4]), dim=-1)


def pack(
    weight: Float[Tensor, "*batch N"],
) -> tuple[UInt8[Tensor, "*batch G 16"], UInt8[Tensor, "*batch G"]]:
    """Blocks [..., N / 32, 16] and scales [..., N / 32] of the nearest values, ties to even.

    scale = 2**(floor(log2 max|w|) - 2), so the largest of a block becomes 4 or 6 (above 6 it saturates) and packing
    what was unpacked gives the same bytes. A block of zeros takes scale byte 0. Raises ValueError unless N is a
    multiple of 32 and every value is finite.
    """
    if weight.dim() == 0 or weight.shape[-1] % BLOCK:
        raise ValueError(f"weight's last dimension must be a multiple of {BLOCK}, got {list(weight.shape)}")
    grouped = weight.float().contiguous().unflatten(-1, (-1, BLOCK))
    largest = grouped.abs().amax(dim=-1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("weight holds a value that is not finite")
    # frexp gives largest = mantissa * 2**exponent with mantissa in [0.5, 1), so floor(log2) = exponent - 1.
    exponent = torch.frexp(largest).exponent - 1 - MAX_EXPONENT
    exponent = torch.where(largest > 0, exponent, -SCALE_BIAS).clamp_(min=-SCALE_BIAS)
    scaled = torch.ldexp(grouped, -exponent.unsqueeze(-1))
    limits = torch.tensor(MIDPOINTS, dtype=torch.float32, device=weight.device)
    is_odd = torch.arange(len(MIDPOINTS), device=weight.device) % 2 == 1
    limits = torch.where(is_odd, torch.nextafter(limits, torch.zeros_like(limits)), limits)
    codes = torch.bucketize(scaled.abs(), limits, out_int32=True).to(torch.uint8)
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(dim=-1)
    return low | (high << 4), (exponent + SCALE_BIAS).to(torch.uint8)


def _check(blocks: Tensor, scales: Tensor) -> None:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks and scales must be uint8, got {blocks.dtype} and {scales.dtype}")
    if blocks.shape[-1:] != (BLOCK // 2,) or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"blocks must be [..., G, 16] and scales [..., G], got {list(blocks.shape)} and {list(scales.shape)}"
        )
