"""What `poise plan` predicts beside what torch's allocator hands out: rollout and training, tiny to medium, on the CPU.

    python benchmarks/plan.py [NAME ...]

Each configuration runs for real, at its worst: engine slots filled to the context by prompts and then by long tool
results, micro-batches of full length, two of them, so that gradients accumulate. The measured peak is the most bytes
that torch's CPU allocator had handed out at once since before the model was made (parameters, gradients, moments and
cache included; what the interpreter and the libraries themselves take is not).
"""

import asyncio
import gc
import sys

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from poise.config import AlgorithmConfig, Config, ModelConfig, RolloutConfig, RunConfig
from poise.engine import EmbeddedEngine
from poise.model import GptOss, GptOssConfig
from poise.plan import make_plan
from poise.train.packing import pack
from poise.train.trainer import Trainer
from poise.types import Stop, Trajectory, Turn

PHASES = ("rollout", "scoring", "training")
TOOL_RESULT = 40  # tokens that an episode grows by, at least


def case(
    *,
    context: int,
    micro: int,
    slots: int,
    prefill: int = 8192,
    kl: float = 0.0,
    recompute: str = "none",
    dtype: str = "float32",
    updates: int = 1,
    entropy: float = 0.0,
    old: str = "none",
    reference: str = "plain",
    **shape: int,
) -> tuple[GptOssConfig, Config]:
    model = GptOssConfig(
        **{
            "vocab_size": 300,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_layers": 2,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 32,
            "num_experts": 8,
            "experts_per_token": 2,
            "sliding_window": 8,
            **shape,
        }
    )
    config = Config(
        model=ModelConfig(dtype=dtype, sliding_window=8),  # type: ignore[arg-type]
        rollout=RolloutConfig(
            max_context_tokens=context, max_action_tokens=4, num_slots=slots, max_prefill_tokens=prefill
        ),
        algorithm=AlgorithmConfig(
            kl_weight=kl,
            updates_per_batch=updates,
            entropy_weight=entropy,
            recompute_old_log_probs=old,  # type: ignore[arg-type]
            reference_experts=reference,  # type: ignore[arg-type]
        ),
        run=RunConfig(tokens_per_microbatch=micro, recompute=recompute),  # type: ignore[arg-type]
    )
    return model, config


SMALL = {"slots": 8, "prefill": 1024}
_100M = {"hidden_size": 512, "intermediate_size": 512, "num_layers": 6, "num_experts": 16, "vocab_size": 8000}

CASES = {
    "tiny": case(context=384, micro=3072, slots=64, prefill=4096),
    "tiny, experts again": case(context=384, micro=3072, recompute="experts", **SMALL),
    "tiny, around attention": case(context=384, micro=3072, recompute="around_attention", **SMALL),
    "tiny, blocks again": case(context=384, micro=3072, recompute="block", **SMALL),
    "tiny, copy for old log-probs": case(context=256, micro=256, old="bfloat16", num_experts=64, **SMALL),
    "many slots": case(context=512, micro=1024, slots=64, prefill=2048),
    "deep, reference": case(context=512, micro=1024, num_layers=8, sliding_window=32, kl=0.1, **SMALL),
    "deep, packed reference": case(
        context=512, micro=1024, num_layers=8, sliding_window=32, kl=0.1, reference="mxfp4", **SMALL
    ),
    "large vocabulary": case(context=256, micro=512, vocab_size=50_000, hidden_size=64, **SMALL),
    "many experts": case(context=256, micro=1024, num_experts=64, experts_per_token=4, **SMALL),
    "wide experts": case(context=256, micro=1024, intermediate_size=768, num_layers=4, **SMALL),
    "100M": case(context=256, micro=512, sliding_window=64, **SMALL, **_100M),
    "100M, blocks again": case(context=256, micro=1024, sliding_window=64, recompute="block", **SMALL, **_100M),
}


def measured_peaks(model_config: GptOssConfig, config: Config) -> dict[str, int]:
    """Most bytes at once in each phase."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("phase:start"):
            dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
            model = GptOss(model_config).to(dtype).init_weights(0)
            trainer = Trainer(model, config)
            reference = trainer.make_reference()
        engine = EmbeddedEngine(
            model,
            stop_ids=(),
            return_id=-1,
            num_slots=config.rollout.num_slots,
            max_context_tokens=config.rollout.max_context_tokens,
            max_prefill_tokens=config.rollout.max_prefill_tokens,
        )
        batches = full_batches(model_config, config)
        if reference is not None:
            batches = trainer.with_ref_log_probs(batches, reference)
        trainer.step(batches[:1])  # from now on AdamW has its moments
        with record_function("phase:rollout"):
            asyncio.run(sample_to_the_brim(engine, model_config, config))
            engine.rest()  # as before a run trains
            gc.collect()
        if "scoring" in make_plan(model_config, config).phases:
            with record_function("phase:scoring"):
                trainer.with_old_log_probs(batches)
                if reference is not None:
                    trainer.with_ref_log_probs(batches, reference)
            gc.collect()
        with record_function("phase:training"):
            trainer.step(batches)
    peaks: dict[str, int] = {}
    total, phase = 0, "phase:start"
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith("phase:"):
            phase = event.name()
        elif event.name() == "[memory]":
            total += event.nbytes()
            peaks[phase] = max(peaks.get(phase, 0), total)
    return {name: peaks[f"phase:{name}"] for name in PHASES if f"phase:{name}" in peaks}


async def sample_to_the_brim(engine: EmbeddedEngine, model_config: GptOssConfig, config: Config) -> None:
    """Every slot at once: a first prompt, one action, then a tool result up to the end of the context."""
    rollout = config.rollout
    grows_by = max(TOOL_RESULT, min(512, rollout.max_prefill_tokens // rollout.num_slots))
    grows_by = min(grows_by, rollout.max_context_tokens // 2)
    generator = torch.Generator().manual_seed(0)

    def token_ids(count: int) -> list[int]:
        return torch.randint(0, model_config.vocab_size, (count,), generator=generator).tolist()

    first = rollout.max_context_tokens - grows_by - 2
    streams = [token_ids(first) for _ in range(rollout.num_slots)]
    for result in (0, grows_by):  # all tools are done at the same time: nothing is larger
        for stream in streams:
            stream += token_ids(result)
        requests = (
            engine(stream, episode_id=str(number), seed=number, max_tokens=1) for number, stream in enumerate(streams)
        )
        for stream, action in zip(streams, await asyncio.gather(*requests), strict=True):
            stream += action.token_ids


def full_batches(model_config: GptOssConfig, config: Config) -> list:
    """Two micro-batches of full length, all but the first token of each episode sampled."""
    context, rows = config.rollout.max_context_tokens, config.run.tokens_per_microbatch
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for number in range(2 * (rows // context)):
        ids = tuple(torch.randint(0, model_config.vocab_size, (context + 1,), generator=generator).tolist())
        turn = Turn(observation_ids=ids[:1], action_ids=ids[1:], rollout_log_probs=(-1.0,) * context)
        trajectories.append(Trajectory(group_id=0, episode_id=str(number), turns=(turn,), reward=0.0, stop=Stop.DONE))
    return pack(trajectories, torch.ones(len(trajectories)), tokens_per_microbatch=rows)


def _cell(planned: int, real: int) -> str:
    return f"{planned / 2**20:.1f} / {real / 2**20:.1f} ({planned / real - 1:+.1%})"


def main(names: list[str]) -> None:
    columns = (*PHASES, "peak")
    print("| MiB: plan / measured |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for name in names or CASES:
        model_config, config = CASES[name]
        plan, real = make_plan(model_config, config), measured_peaks(model_config, config)
        pairs = {phase: (sum(items.values()), real[phase]) for phase, items in plan.phases.items()}
        pairs["peak"] = plan.peak, max(real.values())
        cells = [_cell(*pairs[column]) if column in pairs else "" for column in columns]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(sys.argv[1:])
