"""What a server may answer: token ids and log-probs that can be trained on, or an error that says why not."""

import base64
import binascii
import io
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from poise.engine.http import EngineError
from poise.types import Action

# vLLM writes this in place of a log-prob that is missing or minus infinity; no token sampled from a softmax comes near.
PLACEHOLDER = -9999.0


def checked_action(
    token_ids: Sequence[object] | None,
    log_probs: Sequence[object] | None,
    *,
    where: str,
    stop_ids: Collection[int],
    max_tokens: int,
    vocab_size: int,
    stopped_by_server: bool,
    policy_version: int,
    routes: NDArray[np.int16] | None,
) -> Action:
    """An Action, or EngineError that names ``where`` and what is wrong with the answer."""
    if not token_ids:
        raise EngineError(f"{where} answered without token ids: text cannot be trained on")
    if log_probs is None:
        raise EngineError(f"{where} answered without log-probs")
    if len(token_ids) != len(log_probs):
        raise EngineError(f"{where} answered {len(token_ids)} token ids and {len(log_probs)} log-probs")
    ids, values = list[int](), list[float]()
    for index, (token_id, value) in enumerate(zip(token_ids, log_probs, strict=True)):
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise EngineError(f"{where}: token {index} has the id {token_id!r}, not one of 0 to {vocab_size - 1}")
        ids.append(token_id)
        values.append(checked_log_prob(value, where=f"{where}: token {index}"))
    if len(ids) > max_tokens:
        raise EngineError(f"{where} answered {len(ids)} tokens where at most {max_tokens} were asked for")
    is_stopped = ids[-1] in stop_ids
    if stopped_by_server and not is_stopped:
        raise EngineError(
            f"{where} stopped at token {ids[-1]}, which is none of the stop ids {sorted(stop_ids)}: a default of its "
            "generation_config.json ends actions that the trainer would go on with"
        )
    if not is_stopped and len(ids) < max_tokens:
        raise EngineError(f"{where} ended an action after {len(ids)} of {max_tokens} tokens, without a stop id")
    return Action(
        token_ids=tuple(ids),
        log_probs=tuple(values),
        is_stopped=is_stopped,
        policy_version=policy_version,
        routes=routes,
    )


def checked_log_prob(value: object, *, where: str) -> float:
    """Natural log-probability. Raises EngineError for what is none: missing, not finite, positive, a placeholder."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineError(f"{where} has the log-prob {value!r}, which is no number")
    if not math.isfinite(value) or value <= PLACEHOLDER:
        raise EngineError(f"{where} has the log-prob {value}: it is missing, or the token has no probability at all")
    if value > 1e-3:  # rounding may leave a little above 0
        raise EngineError(f"{where} has the log-prob {value}, above 0: these are logits, not log-probs")
    return float(value)


def decoded_routes(
    sent: object, *, where: str, num_rows: int, num_layers: int, experts_per_token: int
) -> NDArray[np.int16] | None:
    """int16 [rows, layers, A] from what a server sent; row i holds the experts that input i was sent to, which
    predicted token i + 1. None where the server sends none. Raises EngineError for any other shape or content.

    ``sent``: base64 of a .npy file, as vLLM writes it, or what ``encoded_routes`` makes.
    """
    if sent is None:
        return None
    try:
        if isinstance(sent, Mapping):
            raw = base64.b64decode(sent["data"], validate=True)
            routes = np.frombuffer(raw, np.dtype(sent["dtype"])).reshape(sent["shape"])
        else:
            routes = np.load(io.BytesIO(base64.b64decode(sent, validate=True)), allow_pickle=False)  # type: ignore[arg-type]
    except (ValueError, EOFError, OSError, TypeError, KeyError, binascii.Error) as error:
        raise EngineError(f"{where}: its routed experts are no base64 of a .npy file or an array: {error}") from error
    expected = (num_rows, num_layers, experts_per_token)
    if routes.shape != expected:
        raise EngineError(
            f"{where}: its routed experts have shape {list(routes.shape)}, where prompt and answer make "
            f"{list(expected)} (tokens - 1, layers, experts per token)"
        )
    if routes.dtype.kind not in "iu":
        raise EngineError(f"{where}: its routed experts are {routes.dtype}, not whole numbers")
    if routes.size and (routes.min() < 0 or routes.max() > np.iinfo(np.int16).max):
        raise EngineError(f"{where}: its routed experts run from {routes.min()} to {routes.max()}")
    return routes.astype(np.int16)


def encoded_routes(routes: NDArray[np.int16], *, start: int = 0) -> dict[str, object]:
    """Rows from ``start`` on: base64 of the raw array first, then its shape, type and start, as verifiers reads them.

    uint8 where the experts' numbers allow it.
    """
    rows = np.ascontiguousarray(routes[start:])
    if not rows.size or rows.max() < 256:
        rows = rows.astype(np.uint8)
    data = base64.b64encode(rows.tobytes()).decode("ascii")
    return {"data": data, "shape": list(rows.shape), "dtype": str(rows.dtype), "start": start}


def signed_seed(seed: int) -> int:
    """An unsigned 64-bit seed as the signed number of the same bits, which servers keep in an int64.

    -1 means "no seed" to vLLM, so it becomes -2.
    """
    signed = (seed & (2**64 - 1)) - (2**64 if seed & 2**63 else 0)
    return -2 if signed == -1 else signed
