"""``poise serve``: a checkpoint's policy behind vLLM's token endpoints, sampled by the embedded engine."""

import contextlib
import socket
from pathlib import Path

from poise.assembly import embedded_engine, load_policy
from poise.config import Config, ConfigError
from poise.console import Console


def serve_job(config: Config, console: Console, *, host: str, port: int) -> None:
    """Serves ``model.path`` until it is interrupted. Port 0: any free one. ConfigError where it cannot listen."""
    try:
        import uvicorn

        from poise.engine.server import EngineServer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"poise serve needs {error.name}: pip install 'poise[serve]'") from error
    assert config.model.path is not None
    model, tokenizer = load_policy(config, console, trains=False)
    engine = embedded_engine(model, tokenizer, config)
    server = EngineServer(engine, tokenizer, name=str(Path(config.model.path)))
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}") from error
    with listener:
        address = f"http://{host}:{listener.getsockname()[1]}"
        settings = config.rollout
        console.line(f"serving up to {settings.num_slots} episodes of {settings.max_context_tokens} tokens at once")
        console.line(f"listening on {address}; Ctrl-C stops")
        with contextlib.suppress(KeyboardInterrupt):  # the server has shut down, and then passes the signal on
            uvicorn.Server(uvicorn.Config(server.app, log_level="warning")).run(sockets=[listener])
