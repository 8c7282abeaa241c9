"""Is the policy that is trained the policy that acted? Two tables: three steps at learning rate 0, and bf16 engines.

The first samples with the embedded engine and trains on the same weights in the same type: ratio and clip fraction,
packed and one sequence a micro-batch, and what becomes of them when old log-probs come from a separate pass in another
type. Bounds of the ratio are tight (1e-3), so that a failure shows. The second samples with a bf16 engine, trains in
float32 from the same (rounded) weights, and compares the KL(engine || trainer), k3, with and without the engine's
routes. "random" is a new model of 32 experts, top 4; give --model a checkpoint folder for a policy that has learnt.

    python benchmarks/integrity.py [--model runs/arithmetic_tiny-001/checkpoints/step_000060] [--groups 4]
"""

import argparse
from copy import deepcopy
from dataclasses import replace

import torch

from poise.assembly import assemble
from poise.config import Config, OptimizerConfig
from poise.console import Console
from poise.interrupt import Interrupt
from poise.loop import Rollout, pack_update, roll_out
from poise.recipes.tiny import arithmetic_tiny
from poise.train.scoring import scored
from poise.train.trainer import Trainer


def settings(model: str | None, dtype: str, num_groups: int) -> Config:
    config = arithmetic_tiny()
    shape = replace(config.model, path=model, dtype=dtype, device="cpu")
    if model is None:
        shape = replace(shape, num_experts=32, experts_per_token=4)
    return replace(
        config,
        model=shape,
        rollout=replace(config.rollout, groups_per_step=num_groups, group_size=4, num_slots=4 * num_groups),
        optimizer=OptimizerConfig(learning_rate=0.0),
        algorithm=replace(config.algorithm, normalize_advantages="none", clip_low=1e-3, clip_high=1e-3),
    )


def with_advantages(rollout: Rollout) -> Rollout:
    """Rewards that differ within each group, so that clipping has something to clip."""
    groups = [
        [[replace(stream, reward=float(number % 2)) for stream in episode] for number, episode in enumerate(group)]
        for group in rollout.groups
    ]
    return replace(rollout, groups=groups)


def sample(config: Config, step: int = 1):
    parts = assemble(config, Console())
    rollout = roll_out(
        parts.engine, parts.renderer, parts.task, config, step=step, interrupt=Interrupt(), on_group=lambda group: None
    )
    return parts.model, with_advantages(rollout)


def integrity(model_path: str | None, num_groups: int) -> list[str]:
    lines = []
    for dtype, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        config = settings(model_path, dtype, num_groups)
        model, rollout = sample(config)
        for name, budget, recompute in (
            ("packed", 8192, "none"),
            ("one by one", 384, "none"),
            (f"separate pass, {other}", 8192, other),
        ):
            changed = replace(
                config,
                run=replace(config.run, tokens_per_microbatch=budget),
                algorithm=replace(config.algorithm, recompute_old_log_probs=recompute),
            )
            groups = scored(rollout.groups, changed)
            batches = pack_update(groups, changed)
            if name == "one by one":
                batches = [batch for group in groups for pair in group for batch in pack_update([[pair]], changed)]
            trainer = Trainer(deepcopy(model), changed)
            steps = []
            for _ in range(3):
                ready = trainer.with_old_log_probs(batches) if recompute != "none" else batches
                steps.append(trainer.step(ready))
            ratio_min, ratio_max = min(s["ratio_min"] for s in steps), max(s["ratio_max"] for s in steps)
            clipped, k3 = max(s["clip_fraction"] for s in steps), steps[0]["mismatch_k3"]
            ratios = f"{ratio_min:.6g} | {ratio_max:.6g} | {clipped:.1%} | {max(s['approx_kl'] for s in steps):.1e}"
            lines.append(f"| {dtype} | {name} | {ratios} | {k3:.1e} |")
    return lines


def replay(model_path: str | None, num_groups: int) -> str:
    config = settings(model_path, "bfloat16", num_groups)
    model, rollout = sample(config)
    seen = {}
    for source in ("none", "engine"):
        changed = replace(config, algorithm=replace(config.algorithm, replay_routes=source))
        trainer = Trainer(deepcopy(model).float(), changed)
        seen[source] = trainer.step(pack_update(scored(rollout.groups, changed), changed))
    none, engine = seen["none"], seen["engine"]
    return (
        f"| {none['response_tokens']} | {engine['route_drift']:.2%} | {none['mismatch_k3']:.2e} | "
        f"{engine['mismatch_k3']:.2e} | {none['mismatch_k3'] / engine['mismatch_k3']:.2f} | "
        f"{none['mismatch_max']:.3f} | {engine['mismatch_max']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--groups", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    models = {"random": None} | ({args.model: args.model} if args.model else {})
    tables = []
    for name, path in models.items():
        tables.append(
            f"\n{name}\n\n| type | batches | ratio min | ratio max | clipped | approx KL | k3 to the engine |"
            "\n|---|---|---|---|---|---|---|"
        )
        tables += integrity(path, args.groups)
        tables.append(
            "\n| tokens | route drift | k3, own routes | k3, replayed | quotient | max, own | max, replayed |"
            "\n|---|---|---|---|---|---|---|\n" + replay(path, args.groups)
        )
    print("\n".join(tables))


if __name__ == "__main__":
    main()
