"""FlashAttention 2, 3 and 4 with sinks and their gradient.

Their variable-length forward returns out and lse, the log-sum-exp of each row's scores, and their backward reads both.
As on the CPU: out' = out * sigmoid(lse - s) and lse' = logaddexp(lse, s), given to their backward, make P and dS those
of the softmax with the sink s, and d s = -sum over rows of exp(s - lse') * rowsum(dO * out'). FlashAttention 4 has
sinks of its own; they are used where its backward has their gradient too (compute capability 9 to 11).

The argument names are those of flash_attn 2.6 to 2.8, of flash_attn_interface (3) with the window as a pair or as two
numbers, and of flash_attn.cute (4). A version that lacks one of the arguments used here is refused when it is loaded.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise.ops.remembered import is_remembering, remembered

MODULES = {
    2: ("flash_attn.flash_attn_interface",),
    3: ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    4: ("flash_attn.cute.interface",),
}


@dataclass(frozen=True)
class Packing:
    """Where sequences begin and end, and what a row sees. ``longest``: tokens of the longest sequence."""

    cu_seqlens: Tensor
    longest: int
    window: int | None
    scale: float


@dataclass(frozen=True)
class Flash:
    """One installed version behind one interface.

    ``forward(q, k, v, packing) -> (out, lse [H, T])``; ``backward(grad_out, q, k, v, out, lse, packing) -> (grad_q,
    grad_k, grad_v)``; ``with_sinks(q, k, v, sinks, packing) -> out`` is differentiable by itself, or None.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Packing], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    with_sinks: Callable[[Tensor, Tensor, Tensor, Tensor, Packing], Tensor] | None = None


def flash_attention(
    version: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    bounds: tuple[int, ...],
    window: int | None,
    scale: float,
) -> Tensor:
    """``sink_attention`` by FlashAttention ``version``; ``bounds``: ``cu_seqlens`` as integers."""
    longest = max(end - start for start, end in pairwise(bounds))
    packing = Packing(_on_device(bounds, q.device), longest, window, scale)
    return attend(load(version), q, k, v, sinks, packing)


def attend(flash: Flash, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, packing: Packing) -> Tensor:
    """Attention with sinks by the given version."""
    if flash.with_sinks is not None and _has_sink_gradient(q) and not is_remembering():  # it would run again
        return flash.with_sinks(q, k, v, sinks, packing)
    return _FlashWithSinks.apply(q, k, v, sinks, flash, packing)


def unavailable_reason(version: int, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention ``version`` cannot run such operands here; None if it can."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in {2: range(8, 13), 3: (9,), 4: range(9, 13)}[version]:
        wanted = {2: "8 to 12", 3: "9", 4: "9 to 12"}[version]
        return f"it needs compute capability {wanted}, this GPU has {major}.{minor}"
    largest = 128 if version == 4 and major != 9 else 256
    if head_dim % 8 or head_dim > largest:
        return f"it takes head dims up to {largest} that 8 divides, not {head_dim}"
    try:
        load(version)
    except (ImportError, RuntimeError) as error:
        return str(error)
    except Exception as error:  # other people's code, some of it beta: a broken one must not take the others along
        return f"{MODULES[version][0]} does not load: {type(error).__name__}: {error}"
    return None


@lru_cache(maxsize=3)
def load(version: int) -> Flash:
    """The installed FlashAttention ``version``. Raises ImportError, or RuntimeError for an interface unknown here."""
    *others, last = MODULES[version]
    for name in others:
        try:
            return interface(version, importlib.import_module(name))
        except ModuleNotFoundError:
            continue
    try:
        return interface(version, importlib.import_module(last))
    except ModuleNotFoundError as error:
        raise ImportError(f"{MODULES[version][0]} is not installed ({error.name} is missing)") from error


def interface(version: int, module: ModuleType | Any) -> Flash:
    """FlashAttention ``version`` in ``module``, or in anything with the same functions."""
    return {2: _flash2, 3: _flash3, 4: _flash4}[version](module)


# --- sinks over any version ---


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, flash: Flash, packing: Packing) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

        def run() -> tuple[Tensor, Tensor]:
            out, lse = flash.forward(q, k, v, packing)
            if lse.shape != (q.shape[1], len(q)):
                raise RuntimeError(f"FlashAttention returned lse {list(lse.shape)}, expected [heads, tokens]")
            column = sinks.to(lse.dtype).unsqueeze(-1)
            out = (out * torch.sigmoid(lse - column).t().unsqueeze(-1)).to(q.dtype)
            return out, torch.logaddexp(lse, column).contiguous()

        out, lse = remembered(run)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.flash, ctx.packing = flash, packing
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        row_sums = (grad.to(lse.dtype) * out).sum(dim=-1).t()  # first: its products are gone when the others come
        grad_sinks = -(torch.exp(sinks.to(lse.dtype).unsqueeze(-1) - lse) * row_sums).sum(dim=-1)
        grads = ctx.flash.backward(grad, q, k, v, out, lse, ctx.packing)
        return *grads, grad_sinks.to(sinks.dtype), None, None


@lru_cache(maxsize=16)  # every layer of a forward asks for the same
@torch.inference_mode(False)  # the first to ask may be sampling, the next one training
def _on_device(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def _has_sink_gradient(q: Tensor) -> bool:
    return q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] in (9, 10, 11)


# --- the three interfaces ---

_PACKING = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
_GRADIENTS = ("dq", "dk", "dv")


def _packing_arguments(packing: Packing) -> dict[str, Any]:
    lengths = (packing.cu_seqlens, packing.cu_seqlens, packing.longest, packing.longest)
    return dict(zip(_PACKING, (*lengths, packing.scale), strict=True))


def _flash2(module: Any) -> Flash:
    names = ("causal", "window_size_left", "window_size_right", "dropout_p", "softcap", "alibi_slopes", *_PACKING)
    call_forward = _function(module, "_flash_attn_varlen_forward", names)
    call_backward = _function(module, "_flash_attn_varlen_backward", (*names, *_GRADIENTS, "deterministic"))

    def arguments(packing: Packing) -> dict[str, Any]:
        left, right = (-1, -1) if packing.window is None else (packing.window - 1, 0)
        options = {"causal": True, "dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
        return {**_packing_arguments(packing), **options, "window_size_left": left, "window_size_right": right}

    def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        out, lse, *_ = call_forward(q=q, k=k, v=v, **arguments(packing))
        return out, lse

    return Flash(forward, _backward_into(call_backward, arguments))


def _flash3(module: Any) -> Flash:
    call_forward = _function(module, "_flash_attn_forward", _PACKING)
    call_backward = _function(module, "_flash_attn_backward", (*_PACKING, *_GRADIENTS, "deterministic"))

    def arguments_of(name: str) -> Callable[[Packing], dict[str, Any]]:
        # Versions differ in the name of `causal` and in how they take the window.
        parameters = _parameters(getattr(module, name))
        causal = "causal" if "causal" in parameters else "is_causal"
        is_pair = "window_size" in parameters
        names = (causal, "window_size") if is_pair else (causal, "window_size_left", "window_size_right")
        _function(module, name, names)

        def arguments(packing: Packing) -> dict[str, Any]:
            left, right = (-1, -1) if packing.window is None else (packing.window - 1, 0)
            window = ((left, right),) if is_pair else (left, right)
            return {**_packing_arguments(packing), **dict(zip(names, (True, *window), strict=True))}

        return arguments

    forward_arguments = arguments_of("_flash_attn_forward")

    def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        out, lse, *_ = call_forward(q=q, k=k, v=v, **forward_arguments(packing))
        return out, lse

    return Flash(forward, _backward_into(call_backward, arguments_of("_flash_attn_backward")))


def _flash4(module: Any) -> Flash:
    names = ("causal", "window_size_left", "window_size_right", *_PACKING)
    call_forward = _function(module, "_flash_attn_fwd", (*names, "return_lse"))
    call_backward = _function(module, "_flash_attn_bwd", (*names, "dout", "lse", "deterministic"))
    whole = ("causal", "window_size", "learnable_sink", "deterministic", *_PACKING)
    call_whole = _function(module, "flash_attn_varlen_func", whole)

    def sides(packing: Packing) -> tuple[int | None, int | None]:
        return (None, None) if packing.window is None else (packing.window - 1, 0)

    def arguments(packing: Packing) -> dict[str, Any]:
        left, right = sides(packing)
        return {
            **_packing_arguments(packing), "causal": True, "window_size_left": left, "window_size_right": right
        }  # fmt: skip

    def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        out, lse, *_ = call_forward(q=q, k=k, v=v, return_lse=True, **arguments(packing))
        return out, lse

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = call_backward(
            q=q, k=k, v=v, out=out, dout=grad, lse=lse, deterministic=_is_deterministic(), **arguments(packing)
        )
        return grad_q, grad_k, grad_v

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, packing: Packing) -> Tensor:
        result = call_whole(
            q=q, k=k, v=v, learnable_sink=sinks, causal=True, window_size=sides(packing),
            deterministic=_is_deterministic(), **_packing_arguments(packing),
        )  # fmt: skip
        return result[0] if isinstance(result, tuple) else result

    has_gradient = "learnable_sink" in _parameters(module._flash_attn_bwd)
    return Flash(forward, backward, with_sinks if has_gradient else None)


def _backward_into(call: Callable[..., Any], arguments: Callable[[Packing], dict[str, Any]]) -> Callable[..., Any]:
    """The backward of versions 2 and 3, which write into the tensors they are given."""

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        call(
            dout=grad, q=q, k=k, v=v, out=out, softmax_lse=lse, deterministic=_is_deterministic(),
            **dict(zip(_GRADIENTS, grads, strict=True)), **arguments(packing),
        )  # fmt: skip
        return grads

    return backward


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    # A torch custom operator keeps the function it was made of.
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


def _function(module: Any, name: str, names: Sequence[str]) -> Callable[..., Any]:
    """``module``'s function, to be called by keyword; arguments it requires beside ``names`` are None.

    Raises RuntimeError if there is no such function or it lacks one of ``names``.
    """
    function = getattr(module, name, None)
    where = f"{getattr(module, '__name__', 'FlashAttention')}.{name}"
    if function is None:
        raise RuntimeError(f"{where} is missing: poise does not know this version of FlashAttention")
    parameters = _parameters(function)
    if missing := [wanted for wanted in names if wanted not in parameters]:
        raise RuntimeError(f"{where} takes no {missing[0]}: poise does not know this version of FlashAttention")
    required = [parameter.name for parameter in parameters.values() if parameter.default is inspect.Parameter.empty]

    def call(**arguments: Any) -> Any:
        return function(**{name: None for name in required if name not in arguments}, **arguments)

    return call
