"""A whole training step, tiny and of 100M parameters: peak memory by phase with Transformers' eager paths, with each
kind of recomputation, and as `poise plan` predicts it.

    python benchmarks/phases.py [--cases tiny 100M]

"eager" is Transformers' model with its eager attention and experts, one [T, V] tensor of log-probs, fused AdamW and the
same two micro-batches. Peaks are the most bytes that torch's CPU allocator had handed out at once since before the
model was made, in MiB: forward, backward, and the optimizer's step.
"""

import argparse
import gc
from dataclasses import replace

import torch
from plan import CASES, full_batches, measured_peaks
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import GptOssConfig as HfConfig
from transformers import GptOssForCausalLM

from poise.config import Config
from poise.model import GptOss, GptOssConfig
from poise.plan import make_plan
from poise.train.trainer import Trainer

RECOMPUTE = ("none", "experts", "around_attention", "block")
PHASES = ("forward", "backward", "optimizer")


def peaks_of(run) -> dict[str, float]:
    """MiB at once at most in each phase that ``run`` marks as "phase:NAME"."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    peaks: dict[str, float] = {}
    total, phase = 0, "start"
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith("phase:"):
            phase = event.name().removeprefix("phase:")
        elif event.name() == "[memory]":
            total += event.nbytes()
            peaks[phase] = max(peaks.get(phase, 0.0), total / 2**20)
    return {name: peaks[name] for name in PHASES}


def eager_step(model_config: GptOssConfig, config: Config) -> None:
    model = GptOssForCausalLM(HfConfig(**model_config.to_hf_dict(), attn_implementation="eager")).float()
    model.config._experts_implementation = "eager"
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    context = config.rollout.max_context_tokens
    for _ in range(2):  # in the second step the optimizer has its moments
        for batch in full_batches(model_config, config):
            input_ids, target_ids = (x.view(-1, context) for x in (batch.input_ids, batch.target_ids))
            with record_function("phase:forward"):
                log_probs = model(input_ids).logits.float().log_softmax(dim=-1)
                loss = -log_probs.gather(2, target_ids[..., None]).mean()
            del log_probs
            with record_function("phase:backward"):
                loss.backward()
        with record_function("phase:optimizer"):
            optimizer.step()
            optimizer.zero_grad()


def poise_step(model_config: GptOssConfig, config: Config) -> None:
    trainer = Trainer(GptOss(model_config).init_weights(0), config)
    batches = full_batches(model_config, config)
    loss_of, step = trainer._loss, trainer.optimizer.step

    def marked_loss(*args):
        with record_function("phase:forward"):
            loss = loss_of(*args)
        with record_function("phase:backward"):
            return loss

    def marked_step(*args):
        with record_function("phase:optimizer"):
            return step(*args)

    trainer._loss, trainer.optimizer.step = marked_loss, marked_step  # type: ignore[method-assign]
    for _ in range(2):
        trainer.step(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["tiny", "100M"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| case | step |", " | ".join(PHASES), "| planned, training (with the engine's cache) | measured |")
    print("|---|---|" + "---|" * (len(PHASES) + 2))
    for name in args.cases:
        model_config, config = CASES[name]
        eager = peaks_of(lambda model_config=model_config, config=config: eager_step(model_config, config))
        print(f"| {name} | eager |", " | ".join(f"{eager[phase]:.1f}" for phase in PHASES), "| | |", flush=True)
        for how in RECOMPUTE:
            changed = replace(config, run=replace(config.run, recompute=how))
            own = peaks_of(lambda model_config=model_config, changed=changed: poise_step(model_config, changed))
            planned = sum(make_plan(model_config, changed).phases["training"].values()) / 2**20
            measured = measured_peaks(model_config, changed)["training"] / 2**20
            cells = " | ".join(f"{own[phase]:.1f}" for phase in PHASES)
            print(f"| {name} | recompute {how} | {cells} | {planned:.1f} | {measured:.1f} |", flush=True)


if __name__ == "__main__":
    main()
