"""Applications behind sockets of this machine, for tests of what asks them."""

import asyncio
import contextlib
import socket
import threading

import uvicorn


@contextlib.contextmanager
def serving(*fakes):
    """The urls under which the fakes (or ASGI applications) listen, each in a thread of its own."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving_one(fake)) for fake in fakes]


@contextlib.contextmanager
def serving_one(fake, port=0):
    """The url; ``port`` 0: any free one."""
    listener = socket.create_server(("127.0.0.1", port))
    app = fake.app() if hasattr(fake, "app") else fake
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
