"""From the trainer to the servers after each step: pause, push, forget old keys, name the weights, resume, prove it."""

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from poise.engine.http import FAILURES, EngineError, Outage
from poise.engine.sglang import SglangEngine
from poise.engine.vllm import VllmEngine
from poise.model import GptOss
from poise.parallel import ALONE, Mesh, led
from poise.train.canary import TOLERANCES, Canary, choose_canary, difference, scores_of, trainer_scores, verify
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

T = TypeVar("T")

BEFORE, AT_START = "of the update before", "as the server was started"
CANARY_SEED = 20250805


class WeightSync:
    """Keeps servers at the trainer's weights, and proves after every update that they are.

    On a mesh all ranks call the same methods in the same order, but for ``give``; the first alone talks to the servers,
    and what it hears, or fails with, all know. ``tolerance``: of the canary, nats. ``started_with``: weights by the
    server's url. ``difference``: the last canary's, nats, of the server that was furthest off. Made by ``proved_sync``.
    """

    def __init__(
        self,
        engine: VllmEngine | SglangEngine,
        route: Route,
        canary: Canary,
        started_with: Mapping[str, Older],
        *,
        tolerance: float,
        mesh: Mesh = ALONE,
    ) -> None:
        self.engine, self.route, self.canary, self.mesh, self.tolerance = engine, route, canary, mesh, tolerance
        self.difference = 0.0
        self._started_with = started_with
        self._mine: list[Tensor] = []  # the trainer's scores of the weights that were pushed last

    async def sync(self, model: GptOss, version: int, *, mark: str, thorough: bool = False) -> None:
        """Every server gets ``model``'s weights, under the name ``mark``; sampled tokens count as of ``version``.

        Requests under way are frozen meanwhile, and go on with the new weights: their keys and values are computed
        again. Where a server does not answer, waits until it is back and pushes again (``engine.retries`` times).
        Raises SyncError where it does not take the weights, CanaryError where it took them and is another policy;
        ``thorough`` as in ``verify``.
        """
        servers = self.engine.servers

        async def rename() -> None:
            await self._forget([server.url for server in servers.all])
            await self.engine.write_marks(mark)
            await self.engine.resume()

        for attempt in itertools.count(1):
            try:
                await self._led(self.engine.pause)
                await self.route.push(model)
                self.engine.note_policy_version(version, mark=mark)
                await self._led(rename)
                break
            except (Outage, SyncError, EngineError) as error:
                if attempt > servers.retries:
                    raise SyncError(f"{error} (tried {attempt} times: engine.retries {servers.retries})") from error
                servers.tell(f"weights of step {version}: {error}; pushing them again")
                await self._led(servers.wait_until_all_healthy)
        await self.prove(model, thorough=thorough)

    async def prove(self, model: GptOss, *, thorough: bool = False) -> None:
        """The canary, on every server. Raises CanaryError."""
        self._mine = trainer_scores(model, self.canary, self.mesh)
        urls = [server.url for server in self.engine.servers.all]
        self.difference = max([await self._prove_one(model, url, thorough=thorough) for url in urls])

    async def give(self, url: str, *, mark: str) -> None:
        """The weights pushed last, and proof, for one server that came back from a restart.

        Its scores are held against those that the trainer had then, so that the trainer may have gone on, and so that a
        rank can do it alone. Raises SyncError.
        """
        await self.route.give(url)
        await self._forget([url])
        await self.engine.write_mark(url, mark)
        mean, largest = difference(await scores_of(self._score(url), self.canary), self._mine)
        if not mean <= self.tolerance:
            raise SyncError(
                f"{url} was given the weights of the last step again and has others: its log-probs differ by "
                f"{mean:.3g} nats, up to {largest:.3g}, where {self.tolerance:g} is arithmetic"
            )

    async def rehearse(self, model: GptOss, version: int, *, mark: str) -> None:
        """Proves, before anything is trained, that every parameter takes the way: pushes ``model`` with all of them
        moved far, and then as it is.

        One step of training may move a parameter by less than the canary can see; here a group that stays behind shows
        at once. Raises as ``sync``.
        """
        moved = replacement(model, _moved, self.mesh)
        with put_back(model, [moved], self.mesh):
            await self.sync(model, version, mark=f"{mark} rehearsal", thorough=True)
        await self.sync(model, version, mark=mark)

    async def _led(self, work: Callable[[], Awaitable[T]]) -> T:
        return await led(self.mesh, work, carries=FAILURES)

    async def _forget(self, urls: Sequence[str]) -> None:
        if isinstance(self.engine, VllmEngine):  # SGLang forgets its cached keys as it reads the weights
            await forget_cached_keys(self.engine.servers, urls)

    async def _prove_one(self, model: GptOss, url: str, *, thorough: bool) -> float:
        """The canary's mean difference, nats, on one server. Raises CanaryError."""
        before = self.route.older()
        older: Mapping[str, Older] = {} if before is None else {BEFORE: before}
        return await verify(
            self.canary,
            model,
            self._score(url),
            tolerance=self.tolerance,
            older={**older, AT_START: self._started_with[url]},
            where=url,
            thorough=thorough,
            mesh=self.mesh,
            mine=self._mine,
        )

    def _score(self, url: str) -> Callable[[Sequence[int]], Awaitable[list[float]]]:
        servers = self.engine.servers

        async def score(token_ids: Sequence[int]) -> list[float]:
            for attempt in itertools.count(1):
                try:
                    return await self.engine.score(token_ids, url=url)
                except Outage as error:  # a server that is gone came back without the weights: the canary shows it
                    if attempt > servers.retries:
                        raise SyncError(f"the canary got no answer: {error}") from error
                    await servers.wait_until_healthy(url)
            raise AssertionError

        return score


async def weight_sync(
    engine: VllmEngine, model: GptOss, *, folder: Path | None, max_context_tokens: int, mesh: Mesh = ALONE
) -> WeightSync:
    """``folder``: where checkpoints for the servers go; None sends the weights over a process group.

    All ranks of a mesh call it. Raises ConfigError for a model that vLLM has not, SyncError for servers without the
    plugin.
    """
    require_servable(model.config)
    servers = engine.servers

    async def describe() -> tuple[ServerKind, dict[str, str]]:
        kind, folders = await server_kind(servers), {}
        for server in servers.all:
            models = await servers.ask(server.url, "GET", "/v1/models")
            folders[server.url] = str(models["data"][0].get("root"))
        return kind, folders

    kind, folders = await led(mesh, describe, carries=FAILURES)
    by_folder = None if folder is None else FolderRoute(servers, kind, folder, mesh=mesh)
    route = by_folder or TransferRoute(servers, kind, mesh=mesh)
    return proved_sync(engine, model, route, kind, folders, max_context_tokens, mesh)


def proved_sync(
    engine: VllmEngine | SglangEngine,
    model: GptOss,
    route: Route,
    kind: ServerKind,
    folders: Mapping[str, str],
    max_context_tokens: int,
    mesh: Mesh = ALONE,
) -> WeightSync:
    """With a canary that suits ``model``, as strict as the types of the servers and of the trainer allow.

    ``folders``: of the checkpoint that each server was started with, by url. All ranks of a mesh call it.
    """
    canary = choose_canary(model, seed=CANARY_SEED, max_tokens=max_context_tokens, mesh=mesh)
    started_with = {url: stored_parameters(Path(folder)) for url, folder in folders.items()}
    computed_in = model.lm_head.weight.dtype if mesh.shards is None else mesh.compute
    tolerance = max(TOLERANCES[kind.dtype], TOLERANCES[computed_in])
    return WeightSync(engine, route, canary, started_with, tolerance=tolerance, mesh=mesh)


def _moved(name: str, value: Tensor) -> Tensor:
    """``value`` with noise of a quarter of its size, or of a quarter where it is nothing at all, as fresh sinks are."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = float(value.float().square().mean().sqrt()) or 1.0
    noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    return value + 0.25 * size * noise
