"""A server with one worker, which receives what a trainer broadcasts as vLLM with poise's plugin does."""

import asyncio
from datetime import timedelta

import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore


class FakeTransfer:
    """``received``: the tensors of the last update by name, in the order of their coming. ``gives_up``: after so many
    tensors the worker answers with an error instead of receiving more."""

    def __init__(self, gives_up=None):
        self.received, self.announced, self.group, self.gives_up = {}, None, None, gives_up

    def app(self):
        paths = {
            "/collective_rpc": self.call, "/init_weight_transfer_engine": self.init, "/start_weight_update": self.start,
            "/update_weights": self.update, "/finish_weight_update": self.start,
        }  # fmt: skip
        return Starlette(
            routes=[Route(path, handler, methods=["POST"]) for path, handler in paths.items()]
            + [Route("/get_world_size", self.world_size), Route("/health", lambda request: Response())]
        )

    async def call(self, request):
        body = await request.json()
        assert body["method"] == "poise_prepare_update"
        (self.announced,) = body["args"]
        return JSONResponse({"results": [None]})

    async def world_size(self, request):
        return JSONResponse({"world_size": 1})

    async def init(self, request):
        info = (await request.json())["init_info"]
        assert info["backend"] == "gloo"
        timeout = timedelta(seconds=300)

        def join():
            store = TCPStore(info["host"], info["port"], is_master=False, timeout=timeout)
            return ProcessGroupGloo(store, info["first_rank"], info["world_size"], timeout)

        self.group = await asyncio.to_thread(join)
        return JSONResponse({})

    async def start(self, request):
        return JSONResponse({})

    async def update(self, request):
        info = (await request.json())["update_info"]
        self.received = {}

        def receive():
            options = BroadcastOptions()
            options.rootRank = 0
            for name, shape in zip(info["names"], info["shapes"], strict=True):
                if len(self.received) == self.gives_up:
                    return False
                tensor = torch.empty(shape, dtype=getattr(torch, info["dtype"]))
                self.group.broadcast([tensor], options).wait()
                self.received[name] = tensor
            return True

        if not await asyncio.to_thread(receive):
            return JSONResponse({"error": "the worker has no more memory"}, status_code=400)
        return JSONResponse({})
