"""Which weights sampled each token: ``choices[].weight_versions`` in the answers of ``/inference/v1/generate``.

A request that is frozen by ``/pause?mode=keep`` goes on with other weights after an update. The names are those given
to ``/update_weight_version`` or ``/finish_weight_update``. Exact where one API server serves the engine, as by default:
the name changes while sampling is paused, and what was sampled before came over the same queue before the pause did.
"""

from collections.abc import AsyncGenerator
from typing import Any

_current = "default"  # vLLM's own name for the weights that a server was started with


def report_weight_versions() -> None:
    """Patches the API server's process; elsewhere the patched functions are never called."""
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

    rename, note, answer = (
        AsyncLLM.update_weight_version,
        RequestState.make_request_output,
        ServingTokens.serve_tokens_full_generator,
    )
    if rename.__module__ == __name__:
        return

    class VersionedResponse(GenerateResponse):
        def model_dump(self, **arguments: Any) -> dict[str, Any]:
            content = super().model_dump(**arguments)
            for choice, versions in zip(content["choices"], self.__dict__["weight_versions"], strict=True):
                choice["weight_versions"] = versions
            return content

    async def update_weight_version(self: Any, new_version: str) -> None:
        global _current
        await rename(self, new_version)
        _current = new_version

    def make_request_output(self: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        versions = self.__dict__.setdefault("poise_versions", [])
        versions += [_current] * len(new_token_ids)
        result = note(self, new_token_ids, *args, **kwargs)
        for output in getattr(result, "outputs", ()):
            output.poise_versions = versions
        return result

    async def serve_tokens_full_generator(
        self: Any, request: Any, result_generator: AsyncGenerator[Any, None], *args: Any, **kwargs: Any
    ) -> Any:
        last: list[Any] = []

        async def watched() -> AsyncGenerator[Any, None]:
            async for result in result_generator:
                last[:] = result.outputs
                yield result

        response = await answer(self, request, watched(), *args, **kwargs)
        if not isinstance(response, GenerateResponse):
            return response
        versioned = VersionedResponse.model_construct(**response.__dict__)
        versioned.__dict__["weight_versions"] = [_of(output) for output in last]
        return versioned

    AsyncLLM.update_weight_version = update_weight_version
    RequestState.make_request_output = make_request_output
    ServingTokens.serve_tokens_full_generator = serve_tokens_full_generator


def _of(output: Any) -> list[str] | None:
    """One name per token; None where several samples of one request were counted together."""
    versions = getattr(output, "poise_versions", [])
    return list(versions) if len(versions) == len(output.token_ids) else None
