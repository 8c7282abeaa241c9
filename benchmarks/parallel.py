"""What sequence parallelism sends, and what it saves: bytes of a layer's exchanges, activation memory of a rank.

    python benchmarks/parallel.py [--tokens 16384] [--degrees 1,4] [--layers 24] [--hidden 256] [--vocabulary 8192]

The degrees are processes on this machine over gloo; each prints bytes, which do not depend on how busy it is. Sent
bytes are those of the collectives that one attention layer starts in a forward, without what a rank keeps for itself;
the formula is 4 T H C (P - 1) / P^2 numbers where every query head has a key/value head of its own, and
(2 H + 2 lcm(K, P)) T C (P - 1) / P^2 in general. Memory is the most that the allocator held at once over forward,
log-probs and backward, beyond parameters: gradients and gathered parameters are in it.
"""

import argparse
import math
import multiprocessing
import socket
from typing import Any

import torch
import torch.distributed as dist
from measuring import peak_bytes_of
from torch.utils._python_dispatch import TorchDispatchMode

from poise.config import Config, OptimizerConfig, ParallelConfig, RolloutConfig, RunConfig
from poise.model import GptOss, GptOssConfig, packed_attend
from poise.model.config import FULL, SLIDING
from poise.parallel import ALONE, empty_model, init_parts, make_mesh, rows_of_rank, ulysses
from poise.train.trainer import Trainer
from poise.types import Batch

MIB = 2**20


class SentBytes(TorchDispatchMode):
    """Bytes that leave this rank in all-to-alls of equal parts."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks, self.total = num_ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall" in str(func):
            sent = next(x for x in args[1:2] if isinstance(x, torch.Tensor))
            self.total += sent.nbytes * (self.num_ranks - 1) // self.num_ranks
        return func(*args, **(kwargs or {}))


def sent_by_attention(mesh: Any, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    borders = torch.tensor([0, num_tokens], dtype=torch.int32)
    attend = ulysses(packed_attend(borders), mesh)
    q, k, v = (
        rows_of_rank(torch.zeros(num_tokens, h, head_dim), mesh) for h in (num_heads, num_kv_heads, num_kv_heads)
    )
    with SentBytes(mesh.sequence) as counter:
        attend(0, q, k, v, torch.zeros(num_heads), 128)
    return counter.total


def shape(options: argparse.Namespace) -> GptOssConfig:
    return GptOssConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden // 2,
        num_layers=options.layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=options.hidden // 8,
        num_experts=4,
        experts_per_token=2,
        # One full layer is enough: more take time, and no other memory.
        layer_types=(FULL, *[SLIDING] * (options.layers - 1)),
    )


def peak_of_step(mesh: Any, options: argparse.Namespace) -> int:
    config = shape(options)
    if mesh is ALONE:
        model = GptOss(config).init_weights(0)
    else:
        model = empty_model(config, mesh)
        init_parts(model, 0, mesh)
    num_tokens = options.tokens
    settings = Config(
        optimizer=OptimizerConfig(learning_rate=1e-6),
        rollout=RolloutConfig(max_context_tokens=num_tokens),
        run=RunConfig(tokens_per_microbatch=num_tokens, recompute=options.recompute),
    )
    trainer = Trainer(model, settings, mesh=mesh)
    ids = torch.randint(0, config.vocab_size, (num_tokens + 1,), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        input_ids=ids[:-1],
        target_ids=ids[1:],
        position_ids=torch.arange(num_tokens),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        response_mask=torch.arange(num_tokens) >= num_tokens // 16,
        rollout_log_probs=torch.zeros(num_tokens),
        advantages=torch.ones(num_tokens),
    )
    # Without its update, whose moments are no activations.
    return peak_bytes_of(lambda: trainer.log_probs(batch)[0].sum().backward())


def rank_of(rank: int, degree: int, port: int, queue: Any, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, degree, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=degree)
    mesh = make_mesh(ParallelConfig(sequence_degree=degree), torch.device("cpu"))
    sent = {heads: sent_by_attention(mesh, 4096, *heads, 64) for heads in ((8, 8), (8, 2), (8, 1))}
    queue.put((sent, peak_of_step(mesh, options)))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(degree: int, options: argparse.Namespace) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=rank_of, args=(r, degree, port, queue, options)) for r in range(degree)]
    for process in processes:
        process.start()
    results = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--degrees", default="1,4")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--recompute", default="none", choices=("none", "experts", "block"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone = peak_of_step(ALONE, options)
    print(
        f"| degree | peak, {options.tokens} tokens, recompute {options.recompute} (MiB) | of degree 1 |\n|---|---|---|"
    )
    print(f"| 1 | {alone / MIB:.0f} | 1.00x |", flush=True)
    sent_lines = []
    for degree in (int(text) for text in options.degrees.split(",") if text != "1"):
        results = on_ranks(degree, options)
        peak = max(peak for _, peak in results)
        print(f"| {degree} | {peak / MIB:.0f} | {peak / alone:.2f}x |", flush=True)
        for (heads, kv_heads), sent in results[0][0].items():
            factor = 4096 * 64 * (degree - 1) / degree**2 * 4  # float32
            formula, general = 4 * heads * factor, (2 * heads + 2 * math.lcm(kv_heads, degree)) * factor
            sent_lines.append(
                f"| {degree} | {heads} | {kv_heads} | {sent / MIB:.3f} | {general / MIB:.3f} | {formula / MIB:.3f} |"
            )
    print("\n| degree | heads | key/value heads | sent (MiB) | with lcm(K, P) | 4 T H C (P-1)/P^2 |")
    print("|---|---|---|---|---|---|")
    print("\n".join(sent_lines))


if __name__ == "__main__":
    main()
