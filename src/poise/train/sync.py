"""From the trainer to the servers after each step: pause, push, forget old keys, name the weights, resume, prove it."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from poise.engine.http import EngineError, Outage
from poise.engine.sglang import SglangEngine
from poise.engine.vllm import VllmEngine
from poise.model import GptOss
from poise.train.canary import TOLERANCES, Canary, choose_canary, verify
from poise.train.diagnosis import Older, put_back, replacement
from poise.train.weights import (
    FolderRoute,
    Route,
    ServerKind,
    SyncError,
    TransferRoute,
    forget_cached_keys,
    require_servable,
    server_kind,
    stored_parameters,
)

BEFORE, AT_START = "of the update before", "as the server was started"
CANARY_SEED = 20250805


class WeightSync:
    """Keeps vLLM servers at the trainer's weights, and proves after every update that they are.

    ``difference``: the last canary's, nats, of the server that was furthest off. Made by ``weight_sync``.
    """

    def __init__(
        self,
        engine: VllmEngine | SglangEngine,
        route: Route,
        kind: ServerKind,
        canary: Canary,
        started_with: list[Older],
    ) -> None:
        self.engine, self.route, self.kind, self.canary = engine, route, kind, canary
        self.difference = 0.0
        self._started_with = started_with

    async def sync(self, model: GptOss, version: int, *, mark: str, thorough: bool = False) -> None:
        """Every server gets ``model``'s weights, under the name ``mark``; sampled tokens count as of ``version``.

        Requests under way are frozen meanwhile, and go on with the new weights: their keys and values are computed
        again. Where a server does not answer, waits until it is back and pushes again (``engine.retries`` times).
        Raises SyncError where it does not take the weights, CanaryError where it took them and is another policy;
        ``thorough`` as in ``verify``.
        """
        retries = self.engine.servers.retries
        for attempt in itertools.count(1):
            try:
                await self.engine.pause()
                await self.route.push(model)
                await self._forget([server.url for server in self.engine.servers.all])
                await self.engine.set_policy_version(version, mark=mark)
                await self.engine.resume()
                break
            except (Outage, SyncError, EngineError) as error:
                if attempt > retries:
                    raise SyncError(f"{error} (tried {attempt} times: engine.retries {retries})") from error
                self.engine.servers.tell(f"weights of step {version}: {error}; pushing them again")
                for server in self.engine.servers.all:
                    await self.engine.servers.wait_until_healthy(server.url)
        await self.prove(model, thorough=thorough)

    async def prove(self, model: GptOss, *, thorough: bool = False) -> None:
        """The canary, on every server. Raises CanaryError."""
        urls = [server.url for server in self.engine.servers.all]
        self.difference = max([await self.prove_one(model, url, thorough=thorough) for url in urls])

    async def give(self, model: GptOss, url: str, *, mark: str) -> None:
        """The weights pushed last, and proof, for one server that came back from a restart; they are ``model``'s."""
        await self.route.give(url)
        await self._forget([url])
        await self.engine.write_mark(url, mark)
        await self.prove_one(model, url)

    async def _forget(self, urls: Sequence[str]) -> None:
        if isinstance(self.engine, VllmEngine):  # SGLang forgets its cached keys as it reads the weights
            await forget_cached_keys(self.engine.servers, urls)

    async def prove_one(self, model: GptOss, url: str, *, thorough: bool = False) -> float:
        """The canary's mean difference, nats, on one server. Raises CanaryError."""
        before = self.route.older()
        (started,) = (
            one for server, one in zip(self.engine.servers.all, self._started_with, strict=True) if server.url == url
        )
        older: Mapping[str, Older] = ({} if before is None else {BEFORE: before}) | {AT_START: started}

        async def score(token_ids: Sequence[int]) -> list[float]:
            for attempt in itertools.count(1):
                try:
                    return await self.engine.score(token_ids, url=url)
                except Outage as error:  # a server that is gone came back without the weights: the canary shows it
                    if attempt > self.engine.servers.retries:
                        raise SyncError(f"the canary got no answer: {error}") from error
                    await self.engine.servers.wait_until_healthy(url)
            raise AssertionError

        return await verify(
            self.canary,
            model,
            score,
            tolerance=max(TOLERANCES[self.kind.dtype], TOLERANCES[model.lm_head.weight.dtype]),
            older=older,
            where=url,
            thorough=thorough,
        )

    async def rehearse(self, model: GptOss, version: int, *, mark: str) -> None:
        """Proves, before anything is trained, that every parameter takes the way: pushes ``model`` with all of them
        moved far, and then as it is.

        One step of training may move a parameter by less than the canary can see; here a group that stays behind shows
        at once. Raises as ``sync``.
        """
        moved = replacement(model, _moved)
        with put_back(model, [moved]):
            await self.sync(model, version, mark=f"{mark} rehearsal", thorough=True)
        await self.sync(model, version, mark=mark)


async def weight_sync(engine: VllmEngine, model: GptOss, *, folder: Path | None, max_context_tokens: int) -> WeightSync:
    """``folder``: where checkpoints for the servers go; None sends the weights over a process group.

    Raises ConfigError for a model that vLLM has not, SyncError for servers without the plugin.
    """
    require_servable(model.config)
    kind = await server_kind(engine.servers)
    route: Route = TransferRoute(engine.servers, kind) if folder is None else FolderRoute(engine.servers, kind, folder)
    canary = choose_canary(model, seed=CANARY_SEED, max_tokens=max_context_tokens)
    started_with = []
    for server in engine.servers.all:
        models = await engine.servers.ask(server.url, "GET", "/v1/models")
        started_with.append(stored_parameters(Path(str(models["data"][0].get("root")))))
    return WeightSync(engine, route, kind, canary, started_with)


def _moved(name: str, value: Tensor) -> Tensor:
    """``value`` with noise of a quarter of its size, or of a quarter where it is nothing at all, as fresh sinks are."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = float(value.float().square().mean().sqrt()) or 1.0
    noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    return value + 0.25 * size * noise
