"""Log-probs and entropies from hidden states: time and peak memory beside the plain computation, with ratios.

Plain is one [T, V] tensor of logits, log_softmax and gather, differentiated by autograd. float32 on the CPU; forward
with the gradients of hidden states and head, loss = sum of the log-probs. Memory is what the allocator held at most at
once beyond operands and gradients. Cases that would not fit into memory or take too long are left out and said so.

    python benchmarks/log_probs.py [--hidden 256 2880] [--tokens 2048 4096 16384] [--vocabulary 201088] [--threads 2]
"""

import argparse

import torch
from measuring import CLOCKS, cells, free_gib, measured, where

from poise.ops.log_probs import reference_log_probs, token_log_probs

FUNCTIONS = {"poise": token_log_probs, "plain": reference_log_probs}
PLAIN_COPIES = 4  # of [T, V] that the plain computation holds at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 2880])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--vocabulary", type=int, default=201088)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=2, help="turns that count")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="per case and implementation")
    parser.add_argument("--max-gib", type=float, default=0.7 * free_gib(), help="of one case; default 0.7 of the free")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{where(args.threads, args.clock)}; vocabulary {args.vocabulary}; seconds and MiB, ratios to poise\n")
    print("| hidden | tokens | poise s | MiB | plain s | MiB |")
    print("|---|---|---|---|---|---|")
    found = []
    for channels in args.hidden:
        per_token = dict.fromkeys(FUNCTIONS, 0.0)
        lm_head = (torch.randn(args.vocabulary, channels) * channels**-0.5).requires_grad_()
        for tokens in args.tokens:
            hidden = torch.randn(tokens, channels, requires_grad=True)
            target_ids = torch.randint(0, args.vocabulary, (tokens,))

            def run(name: str, hidden=hidden, lm_head=lm_head, target_ids=target_ids) -> object:
                log_probs, _ = FUNCTIONS[name](hidden, lm_head, target_ids)
                return torch.autograd.grad(log_probs.sum(), (hidden, lm_head))

            gradients = 4 * (hidden.numel() + lm_head.numel())
            results = measured(
                {name: lambda name=name, run=run: run(name) for name in FUNCTIONS},
                {"poise": gradients + 2**30, "plain": gradients + 4.0 * PLAIN_COPIES * tokens * args.vocabulary},
                {name: seconds * tokens for name, seconds in per_token.items()},
                repeats=args.repeats, max_gib=args.max_gib, max_seconds=args.max_seconds, clock=CLOCKS[args.clock],
            )  # fmt: skip
            for name, result in results.items():
                result.peak_bytes -= gradients if result.peak_bytes else 0
                per_token[name] = max(per_token[name], result.seconds / tokens)
            own, plain = results["poise"], results["plain"]
            print(f"| {channels} | {tokens} |", " | ".join(cells(own, own) + cells(plain, own)), "|", flush=True)
            where_ = f"{channels}, {tokens}"
            if not own.note:
                verdict = "met" if own.peak_bytes < 2**30 else "MISSED"
                found.append(f"{where_}: peak below 1 GiB: {own.peak_bytes / 2**30:.2f} GiB, {verdict}")
            if not own.note and not plain.note:
                ratio = own.seconds / plain.seconds
                verdict = "met" if ratio <= 1.2 else "MISSED"
                found.append(f"{where_}: at most 1.2x the time of plain: {ratio:.2f}x, {verdict}")
    print()
    print("\n".join(found))


if __name__ == "__main__":
    main()
