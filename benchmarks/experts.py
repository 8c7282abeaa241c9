"""Routed experts: time and peak memory beside Transformers' three implementations, in one run, with ratios.

float32 on the CPU, top 4 of 32, one layer; forward with all gradients, forward alone without gradients, and "prepared":
the same as the embedded engine samples, on a copy of the weights laid out for few rows, whose making is not timed and
whose memory is not counted. "20b" is a layer of GPT-OSS 20B (hidden and inner 2880). Transformers' module holds the
weights and poise uses the same. Memory is what the allocator held at most at once beyond operands and weights: result
and gradients included. Cases that would not fit into memory or take too long are left out and said so.

    python benchmarks/experts.py [--sizes 512 2880] [--tokens 64 1024 4096 16384] [--threads 2] [--backward-only]
"""

import argparse

import torch
from measuring import CLOCKS, Result, Run, cells, free_gib, measured, where
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from poise.ops.experts import routed_experts
from poise.ops.prepared import pays, prepared_stack

PREPARED = "prepared"
NAMES = ("poise", "eager", "grouped_mm", "batched_mm")


def experts_of(size: int, num_experts: int, num_active: int) -> GptOssExperts:
    config = GptOssConfig(
        hidden_size=size, intermediate_size=size, num_local_experts=num_experts, num_experts_per_tok=num_active
    )
    module = GptOssExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=size**-0.5)
    return module


def runs_of(module: GptOssExperts, tokens: int, num_active: int, *, with_gradients: bool) -> dict[str, Run]:
    x = torch.randn(tokens, module.hidden_size, requires_grad=True)
    logits = torch.randn(tokens, module.num_experts)
    top, expert_ids = logits.topk(num_active, dim=-1)
    weights = top.softmax(dim=-1).requires_grad_()
    grad = torch.randn(tokens, module.hidden_size)
    rows_of_expert = tokens * num_active // module.num_experts
    stacks = (module.gate_up_proj, module.gate_up_proj_bias, module.down_proj, module.down_proj_bias)

    prepared = list[object](stacks)
    is_prepared = not with_gradients and pays(stacks[2][0].numel(), rows_of_expert, x.dtype, x.device)
    if is_prepared:
        prepared[0], prepared[2] = prepared_stack(stacks[0]), prepared_stack(stacks[2])

    def forward(name: str) -> torch.Tensor:
        if name in ("poise", PREPARED):
            return routed_experts(x, *(stacks if name == "poise" else prepared), expert_ids, weights)
        module.config._experts_implementation = name
        return module(x, expert_ids, weights)

    def run(name: str) -> object:
        if with_gradients:
            return torch.autograd.grad(forward(name), (x, weights, *stacks), grad)
        with torch.no_grad():
            return forward(name)

    return {name: lambda name=name: run(name) for name in (*NAMES, *[PREPARED] * is_prepared)}


def needed_bytes(module: GptOssExperts, tokens: int, num_active: int, *, with_gradients: bool) -> dict[str, float]:
    """What the implementations of Transformers hold at once, at least."""
    size, stack = module.hidden_size, 3 * module.num_experts * module.hidden_size**2
    rows = tokens * num_active
    gradients = stack if with_gradients else 0
    return {
        "poise": 4.0 * (gradients + 5 * size * tokens),
        "eager": 4.0 * (2 * gradients + 5 * size * tokens),
        "grouped_mm": 4.0 * (gradients + (8 if with_gradients else 4) * size * rows),
        "batched_mm": 4.0 * 3 * size**2 * rows * (1.4 if with_gradients else 1),
    }


def aims(size: int, tokens: int, results: dict[str, Result]) -> list[str]:
    """The aims that a case speaks of, forward and backward."""
    own = results["poise"]
    others = [results[name] for name in NAMES[1:] if not results[name].note]
    found = []
    if size == 2880 and tokens == 16384:
        beyond = own.peak_bytes - 4 * 3 * 32 * 2880**2
        verdict = "met" if beyond <= 6 * 2**30 else "MISSED"
        found.append(f"at most 6 GiB beside the weights' gradients: {beyond / 2**30:.2f} GiB, {verdict}")
    if not others:
        return found
    if not results["batched_mm"].note:
        ratio = results["batched_mm"].peak_bytes / own.peak_bytes
        found.append(f"100x leaner than batched_mm, weights' gradients included: {ratio:.0f}x")
    faster = min(r.seconds for r in others) / own.seconds
    leaner = min(r.peak_bytes for r in others) / own.peak_bytes
    if tokens >= 4096:
        verdict = "met" if faster >= 1.3 and leaner >= 2.5 else "MISSED"
        found.append(f"1.3x faster and 2.5x leaner than the best: {faster:.2f}x, {leaner:.2f}x, {verdict}")
    else:
        found.append(f"never slower than the best: {faster:.2f}x, {'met' if faster >= 1 else 'MISSED'}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 2880], help="hidden and inner size")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--active", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3, help="turns that count")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="per case and implementation")
    parser.add_argument("--max-gib", type=float, default=0.7 * free_gib(), help="of one case; default 0.7 of the free")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--backward-only", action="store_true", help="leave out the forward without gradients")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{where(args.threads, args.clock)}; top {args.active} of {args.experts}; seconds and MiB, ratios to poise\n")
    print("| hidden | tokens | pass |", " | ".join(f"{name} s | MiB" for name in NAMES), "|")
    print("|---|---|---|" + "---|" * (2 * len(NAMES)))
    found = []
    for size in args.sizes:
        module = experts_of(size, args.experts, args.active)
        seconds: dict[tuple[str, bool], float] = {}
        for tokens in args.tokens:
            for with_gradients in (True,) if args.backward_only else (True, False):
                results = measured(
                    runs_of(module, tokens, args.active, with_gradients=with_gradients),
                    needed_bytes(module, tokens, args.active, with_gradients=with_gradients),
                    {name: seconds.get((name, with_gradients), 0) * tokens for name in NAMES},
                    repeats=args.repeats, max_gib=args.max_gib, max_seconds=args.max_seconds,
                    clock=CLOCKS[args.clock],
                )  # fmt: skip
                for name, result in results.items():
                    if result.seconds and tokens >= 1024:
                        seconds[name, with_gradients] = result.seconds / tokens
                for own in [name for name in ("poise", PREPARED) if name in results]:
                    row = [c for name in (own, *NAMES[1:]) for c in cells(results[name], results[own])]
                    kind = "forward + backward" if with_gradients else "no_grad forward"
                    kind += ", prepared" if own == PREPARED else ""
                    print(f"| {size} | {tokens} | {kind} |", " | ".join(row), "|", flush=True)
                if with_gradients and args.experts == 32 and not results["poise"].note:
                    found += [f"{size}, {tokens}: {line}" for line in aims(size, tokens, results)]
    print()
    print("\n".join(found))


if __name__ == "__main__":
    main()
