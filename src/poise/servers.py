"""Connects a run to the servers that its configuration names."""

import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from poise.config import Config
from poise.console import Console
from poise.engine import EngineError, Servers, SglangEngine, VllmEngine
from poise.engine.http import Outage
from poise.engine.process import ServerProcesses
from poise.harmony import HarmonyTokenizer
from poise.model import GptOss, save_model
from poise.model.checkpoint import Format
from poise.train.canary import choose_canary
from poise.train.remote import ReloadRoute, RemoteEngine
from poise.train.sync import CANARY_SEED, WeightSync, weight_sync
from poise.train.weights import ServerKind, stored_parameters


def connect(model: GptOss, tokenizer: HarmonyTokenizer, config: Config, console: Console) -> RemoteEngine:
    """The engine of ``config.engine``, which follows ``model``. Nothing is asked of a server yet.

    What servers must read lies in a folder of its own beside the runs, which goes when the engine closes.
    """
    settings = config.engine
    stored_as: Format = "bf16" if model.lm_head.weight.dtype == torch.bfloat16 else "fp32"
    folder = Path(config.run.folder).resolve() / f".engine-{secrets.token_hex(4)}"
    start = folder / "start"

    def checkpoint() -> Path:
        """For a server that is started before anything was pushed: it gets the current weights afterwards."""
        if not start.exists():
            start.parent.mkdir(parents=True, exist_ok=True)
            save_model(model, start, stored_as, tokenizer=tokenizer.save)
        return start

    processes = None
    if settings.command is not None:
        processes = ServerProcesses(settings.command, checkpoint=checkpoint, log_folder=folder.parent)
    servers = Servers(
        settings.urls,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        max_wait_s=settings.max_wait_s,
        restart=None if processes is None else processes.start,
        tell=lambda line: console.line(f"engine: {line}"),
    )
    wants_routes = config.algorithm.replay_routes == "engine"
    make_client = SglangEngine if settings.kind == "sglang" else VllmEngine
    client: SglangEngine | VllmEngine = make_client(
        servers,
        stop_ids=tokenizer.stop_ids,
        vocab_size=model.config.vocab_size,
        temperature=config.rollout.temperature,
        routes_shape=(model.config.num_layers, model.config.experts_per_token) if wants_routes else None,
    )

    async def make_sync() -> WeightSync:
        context = config.rollout.max_context_tokens
        if isinstance(client, SglangEngine):
            return await sglang_sync(client, model, folder, stored_as, context)
        owners = await models_of(servers)
        if {owner.get("owned_by") for owner in owners} != {"poise"}:
            if any(owner.get("owned_by") == "poise" for owner in owners):
                raise EngineError("engine.urls mixes poise serve with other servers: name servers of one kind")
            sends_files = settings.weights == "folder"
            return await weight_sync(client, model, folder=folder if sends_files else None, max_context_tokens=context)
        route = ReloadRoute(servers, folder, reload_poise(servers), format=stored_as)
        canary = choose_canary(model, seed=CANARY_SEED, max_tokens=context)
        started_with = [stored_parameters(Path(str(owner["root"]))) for owner in owners]
        kind = ServerKind(dtype=getattr(torch, str(owners[0]["dtype"])), device="cpu")
        return WeightSync(client, route, kind, canary, started_with)

    def on_close() -> None:
        if processes is not None:
            processes.stop()
        if folder.exists():
            shutil.rmtree(folder)

    return RemoteEngine(
        client,
        model,
        make_sync=make_sync,
        max_context_tokens=config.rollout.max_context_tokens,
        is_ahead=config.rollout.max_staleness > 0,
        on_close=on_close,
    )


async def sglang_sync(
    client: SglangEngine, model: GptOss, folder: Path, stored_as: Format, max_context_tokens: int
) -> WeightSync:
    """Weights by a folder; the canary as strict as the type in which the servers say that they compute."""
    infos = await client.servers.ask_all("GET", "/get_server_info")
    is_exact = all(info.get("dtype") == "float32" for info in infos)

    async def tell(url: str, path: Path) -> None:
        await client.load_folder(url, str(path))

    route = ReloadRoute(client.servers, folder, tell, format=stored_as)
    canary = choose_canary(model, seed=CANARY_SEED, max_tokens=max_context_tokens)
    started_with = [stored_parameters(Path(str(info.get("model_path")))) for info in infos]
    kind = ServerKind(dtype=torch.float32 if is_exact else torch.bfloat16, device="cuda")
    return WeightSync(client, route, kind, canary, started_with)


async def models_of(servers: Servers) -> list[dict[str, Any]]:
    """What each server says of its model."""
    try:
        return [answer["data"][0] for answer in await servers.ask_all("GET", "/v1/models")]
    except Outage as error:
        raise EngineError(f"a server went away during the handshake: {error}") from error


def reload_poise(servers: Servers) -> Callable[[str, Path], Awaitable[None]]:
    """How ``poise serve`` is told to take over a checkpoint folder."""

    async def tell(url: str, path: Path) -> None:
        await servers.ask(url, "POST", "/load_checkpoint", json={"path": str(path), "weight_version": "arrived"})

    return tell
