"""Connects a run to the servers that its configuration names."""

import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from poise.config import Config, ConfigError
from poise.console import Console
from poise.engine import EngineError, Servers, SglangEngine, VllmEngine
from poise.engine.http import FAILURES, Outage
from poise.engine.process import ServerProcesses
from poise.harmony import HarmonyTokenizer
from poise.model import GptOss, save_model
from poise.model.checkpoint import Format
from poise.parallel import ALONE, Mesh, led
from poise.train.remote import RemoteEngine
from poise.train.sync import WeightSync, proved_sync, weight_sync
from poise.train.weights import FolderRoute, ServerKind


def connect(
    model: GptOss, tokenizer: HarmonyTokenizer, config: Config, console: Console, mesh: Mesh = ALONE
) -> RemoteEngine:
    """The engine of ``config.engine``, which follows ``model``. Nothing is asked of a server yet.

    What servers must read lies in a folder of its own beside the runs, which goes when the engine closes. All ranks of
    a mesh call it. Raises ConfigError for a command on a mesh: none of its ranks looks after the servers.
    """
    settings = config.engine
    if mesh.num_ranks > 1 and settings.command is not None:
        raise ConfigError(
            f"engine.command needs a trainer of one process, not {mesh.num_ranks}: start the servers beside it"
        )
    run = mesh.gather_from_all(secrets.token_hex(4))[0]
    stored_as: Format = "bf16" if model.lm_head.weight.dtype == torch.bfloat16 else "fp32"
    folder = Path(config.run.folder).resolve() / f".engine-{run}"
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
        first=mesh.rank,
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

    def on_close() -> None:
        if processes is not None:
            processes.stop()
        if mesh.is_first and folder.exists():
            shutil.rmtree(folder)

    return RemoteEngine(
        client,
        model,
        run=run,
        make_sync=lambda: sync_of(client, model, config, folder, mesh),
        max_context_tokens=config.rollout.max_context_tokens,
        is_ahead=config.rollout.max_staleness > 0,
        on_close=on_close,
        mesh=mesh,
    )


async def sync_of(
    client: SglangEngine | VllmEngine, model: GptOss, config: Config, folder: Path, mesh: Mesh
) -> WeightSync:
    """How weights get to servers of the kind that is there. Raises RunError for what cannot be served alike."""
    servers, context = client.servers, config.rollout.max_context_tokens
    if isinstance(client, SglangEngine):
        kind, folders = await led(mesh, lambda: sglang_kind(client), carries=FAILURES)
        route = FolderRoute(servers, kind, folder, tell=tell_sglang(client), mesh=mesh)
        return proved_sync(client, model, route, kind, folders, context, mesh)
    owners = await led(mesh, lambda: models_of(servers), carries=FAILURES)
    if {owner.get("owned_by") for owner in owners} != {"poise"}:
        if any(owner.get("owned_by") == "poise" for owner in owners):
            raise EngineError("engine.urls mixes poise serve with other servers: name servers of one kind")
        sends_files = config.engine.weights == "folder"
        return await weight_sync(
            client, model, folder=folder if sends_files else None, max_context_tokens=context, mesh=mesh
        )
    kind = ServerKind(dtype=getattr(torch, str(owners[0]["dtype"])), device="cpu")
    folders = {server.url: str(owner["root"]) for server, owner in zip(servers.all, owners, strict=True)}
    route = FolderRoute(servers, kind, folder, tell=reload_poise(servers), mesh=mesh)
    return proved_sync(client, model, route, kind, folders, context, mesh)


async def sglang_kind(client: SglangEngine) -> tuple[ServerKind, dict[str, str]]:
    """What the servers say that they are, and the checkpoint that each was started with, by url."""
    infos = await client.servers.ask_all("GET", "/get_server_info")
    is_exact = all(info.get("dtype") == "float32" for info in infos)
    kind = ServerKind(dtype=torch.float32 if is_exact else torch.bfloat16, device="cuda")
    return kind, {s.url: str(info.get("model_path")) for s, info in zip(client.servers.all, infos, strict=True)}


def tell_sglang(client: SglangEngine) -> Callable[[str, Path], Awaitable[None]]:
    """How SGLang is told to take over a checkpoint folder."""

    async def tell(url: str, path: Path) -> None:
        await client.load_folder(url, str(path))

    return tell


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
