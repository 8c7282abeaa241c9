"""The process behind ``VerifiersTask``: environments of the package verifiers, asked and answered in lines of JSON.

``PYTHON -P verifiers_child.py``, with an interpreter that has verifiers and need not have poise: nothing of poise is
imported here. The first line in is ``{"env": verifiers' [env] block, "num_tasks": at most}``, the first line out
``{"num_tasks": N}`` or ``{"error": sentence}``. Then come in

    {"play": EPISODE, "task": INDEX}               starts an episode
    {"answer": REQUEST, "message", "finish_reason"}  what the policy said
    {"refuse": REQUEST}                            the policy has no room left: its context is full
    {"stop": EPISODE}                              gives an episode up

and go out

    {"request": REQUEST, "episode", "messages", "tools"}  the environment asks the policy
    {"end": EPISODE, "reward", "metrics"}          or with "error": a sentence

The environment reaches the policy as it reaches any other: at a chat-completions endpoint, which is in here.
"""

import asyncio
import itertools
import json
import os
import sys
from typing import Any, BinaryIO

MODEL = "policy"
# The words by which verifiers' programs know that a context is full: a limit that was reached, and no failure.
FULL = "the maximum context length is reached"


class Worker:
    """One verifiers environment, its tasks, and the endpoint that stands for the policy."""

    def __init__(self, settings: dict[str, Any], out: BinaryIO) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self.env = load_environment(resolve_env_config(settings["env"]))
        for name, agent in agent_config_fields(self.env.config).items():
            if agent.client is None and agent.sampling is not None:
                raise ValueError(f"agent {name} has settings of sampling, which the keys of the rollout decide")
        self.tasks = list(itertools.islice(self.env.taskset, settings["num_tasks"]))
        self.out = out
        self.episode_of: dict[str, int] = {}  # by the id of the trace, which verifiers sends with each request
        self.playing: dict[int, asyncio.Task[None]] = {}
        self.waiting: dict[int, tuple[int, asyncio.Future[dict[str, Any]]]] = {}  # request -> its episode, the answer
        self.numbers = itertools.count()

    def tell(self, **line: Any) -> None:
        _write(self.out, line)

    async def run(self, lines: asyncio.StreamReader) -> None:
        """Until there is nobody left to talk to."""
        from aiohttp import web
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self.context = ModelContext(
            model=MODEL, client=EvalClientConfig(base_url=self.url, api_key_var="POISE_NEEDS_NO_KEY")
        )
        try:
            async with self.env.serving():
                self.tell(num_tasks=len(self.tasks))
                while line := await lines.readline():
                    self.obey(json.loads(line))
                for task in self.playing.values():
                    task.cancel()
                await asyncio.gather(*self.playing.values(), return_exceptions=True)
        finally:
            await runner.cleanup()

    def obey(self, order: dict[str, Any]) -> None:
        if "play" in order:
            task = asyncio.create_task(self.play(order["play"], order["task"]))
            self.playing[order["play"]] = task
            task.add_done_callback(lambda _: self.playing.pop(order["play"], None))
        elif "stop" in order:
            if order["stop"] in self.playing:
                self.playing[order["stop"]].cancel()
        else:
            self.answer(order["answer"] if "answer" in order else order["refuse"], order)

    def answer(self, request: int, answer: dict[str, Any]) -> None:
        _, future = self.waiting.pop(request, (0, None))
        if future is not None and not future.done():
            future.set_result(answer)

    async def play(self, episode: int, index: int) -> None:
        traces: list[Any] = []

        def mint(trace: Any) -> None:
            if trace.agent.config.client.base_url == self.url:
                traces.append(trace)
                self.episode_of[trace.id] = episode

        try:
            [slot] = self.env.slots(self.tasks[index])
            done = await self.env.run_slot(slot, self.context, on_trace=mint)
            error = done.last_error or next((trace.last_error for trace in traces if not trace.ok), None)
            if len(traces) != 1:
                sentence = (
                    f"the policy was run {len(traces)} times in one episode (several agents, or retries), not once"
                )
                self.tell(end=episode, error=sentence if traces or error is None else _sentence(error))
            elif error is not None or not done.ok:
                self.tell(end=episode, error="it failed" if error is None else _sentence(error))
            else:
                [trace] = traces
                numbers = {f"reward/{name}": reward.value for name, reward in trace.rewards.items() if reward}
                numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
                self.tell(end=episode, reward=trace.reward, metrics=numbers)
        except Exception as error:
            self.tell(end=episode, error=_sentence(error))
        finally:
            for trace in traces:
                self.episode_of.pop(trace.id, None)
            for request in [number for number, (of, _) in self.waiting.items() if of == episode]:
                self.answer(request, {})  # nobody waits for it any more; the server must not wait for it when it ends

    async def chat(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        episode = self.episode_of.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return _is_over(web)
        number = next(self.numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting[number] = episode, future
        self.tell(request=number, episode=episode, messages=body["messages"], tools=body.get("tools") or [])
        answer = await future
        if not answer:
            return _is_over(web)
        if "refuse" in answer:
            return web.json_response({"error": {"message": FULL, "code": "context_length_exceeded"}}, status=400)
        head = {"id": f"chatcmpl-{number}", "created": 0, "model": MODEL}
        choice = {"index": 0, "finish_reason": answer["finish_reason"]}
        if not body.get("stream"):
            whole = head | {"object": "chat.completion", "choices": [choice | {"message": answer["message"]}]}
            return web.json_response(whole)
        delta = dict(answer["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [call | {"index": i} for i, call in enumerate(delta["tool_calls"])]
        chunk = head | {"object": "chat.completion.chunk", "choices": [choice | {"delta": delta}]}
        events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")


def _is_over(web: Any) -> Any:
    return web.json_response({"error": {"message": "this episode is over"}}, status=409)


def _sentence(error: Any) -> str:
    """Of an exception, or of an error as verifiers records it."""
    return f"{getattr(error, 'type', type(error).__name__)}: {getattr(error, 'message', error)}"


def _write(out: BinaryIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line).encode() + b"\n")
    out.flush()


async def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what environments print is no answer
    lines = asyncio.StreamReader(limit=2**30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    settings = json.loads(await lines.readline())
    try:
        worker = Worker(settings, out)
    except Exception as error:  # the border to verifiers: the other side raises it again
        _write(out, {"error": _sentence(error)})
    else:
        await worker.run(lines)


if __name__ == "__main__":
    asyncio.run(main())
