"""The canary of a run: made once, asked of every server after every update, and before the first one in a rehearsal."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from poise.engine.http import Outage
from poise.engine.vllm import VllmEngine
from poise.model import GptOss
from poise.train.canary import TOLERANCES, Canary, choose_canary, verify
from poise.train.diagnosis import Older, put_back, replacement
from poise.train.weights import Route, SyncError, stored_parameters

BEFORE, AT_START = "of the update before", "as the server was started"
CANARY_SEED = 20250805


@dataclass
class Proof:
    """``check(url)`` raises CanaryError where that server is not at ``model``'s weights. Made by ``prepare_proof``.

    ``older``: the weights of the update before, None where there are none. ``tolerance``: nats. ``differences``: what
    the last check found, by url.
    """

    client: VllmEngine
    model: GptOss
    canary: Canary
    older: Callable[[], Older | None]
    tolerance: float
    started_with: dict[str, Older] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    async def check(self, url: str) -> None:
        """Not while the server is paused: it would not answer. Raises CanaryError, and SyncError for no answer."""

        async def score(token_ids: Sequence[int]) -> list[float]:
            servers = self.client.servers
            for attempt in itertools.count(1):
                try:
                    return await self.client.score(token_ids, url=url)
                except Outage as error:  # a server that died comes back with other weights: the canary sees it
                    if attempt > servers.retries:
                        raise SyncError(f"the canary got no answer: {error}") from error
                    await servers.wait_until_healthy(url)
            raise AssertionError

        before, at_start = self.older(), self.started_with.get(url)
        older = {name: value for name, value in ((BEFORE, before), (AT_START, at_start)) if value is not None}
        self.differences[url] = await verify(
            self.canary, self.model, score, tolerance=self.tolerance, older=older, where=url
        )

    async def rehearse(self, route: Route) -> None:
        """Proves, before anything is trained, that every parameter takes ``route``: pushes all of them, moved far.

        A step of training may move a parameter by less than the canary can see. Here a group that stays behind shows at
        once. The servers are left with the moved weights, the trainer's model as it was. Raises as ``check``.
        """
        with put_back(self.model, [replacement(self.model, _moved)]):
            await self.client.pause()
            try:
                await route.push(self.model)
            finally:
                await self.client.resume()
            for server in self.client.servers.all:
                await self.check(server.url)


async def prepare_proof(
    client: VllmEngine,
    model: GptOss,
    *,
    older: Callable[[], Older | None],
    dtype: torch.dtype,
    max_context_tokens: int,
) -> Proof:
    """``dtype``: the servers'. Where their starting checkpoints can be read from here, a diagnosis knows them too."""
    started_with = {}
    for server in client.servers.all:
        models = await client.servers.ask(server.url, "GET", "/v1/models")
        stored = stored_parameters(Path(str(models["data"][0].get("root"))))
        if _is_like(stored, model):
            started_with[server.url] = stored
    return Proof(
        client,
        model,
        choose_canary(model, seed=CANARY_SEED, max_tokens=max_context_tokens),
        older,
        max(TOLERANCES[dtype], TOLERANCES[model.lm_head.weight.dtype]),
        started_with,
    )


def _is_like(older: Older, model: GptOss) -> bool:
    """Whether these are weights of such a model that can be read here; a server elsewhere may have its own files."""
    try:
        return all(older(name).shape == parameter.shape for name, parameter in model.named_parameters())
    except (OSError, KeyError):
        return False


def _moved(name: str, value: Tensor) -> Tensor:
    """``value`` with noise of a quarter of its size, or of a quarter where it is nothing at all, as fresh sinks are."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = float(value.float().square().mean().sqrt()) or 1.0
    noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    return value + 0.25 * size * noise
