"""Applications behind sockets of this machine, for tests of what asks them."""

import asyncio
import contextlib
import socket
import subprocess
import threading
import time

import uvicorn


@contextlib.contextmanager
def serving(*fakes):
    """The urls under which the fakes (or ASGI applications) listen, each in a thread of its own."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving_one(fake)) for fake in fakes]


@contextlib.contextmanager
def reserved_port():
    """A port of this machine for a server that is started later: whoever asks for any free one does not get it."""
    with socket.socket() as holder:  # bound and not listening: a server may bind it too, as both reuse addresses
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def listening(command):
    """The url at which a process listens that is started as ``command`` and a port."""
    with reserved_port() as port, subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None, f"{command} has ended"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


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
