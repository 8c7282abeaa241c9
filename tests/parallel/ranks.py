"""Processes that form a mesh on this machine, and what they compute: tiny policies whose sinks and biases matter."""

import multiprocessing
import traceback
from datetime import timedelta
from functools import partial
from queue import Empty

import torch
import torch.distributed as dist

from poise.config import AlgorithmConfig, Config, OptimizerConfig, ParallelConfig, RolloutConfig, RunConfig
from poise.model import GptOss, GptOssConfig, packed_attend
from poise.parallel import empty_model, fill_part, full_tensor, make_mesh
from poise.train.packing import pack
from poise.train.trainer import Trainer
from poise.types import Stop, Trajectory, Turn

VOCABULARY = 40
PATIENCE = timedelta(minutes=10)  # of ranks with each other: against hanging alone


def on_ranks(num_ranks, function, *args):
    """``function(*args)`` in ``num_ranks`` processes of one group; what each returned, or the first traceback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["poise.train.trainer"])  # torch is imported once
    # Kept here: it must outlast every rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, num_ranks, store.port, queue, function, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        results = {}
        while len(results) < num_ranks:
            try:
                rank, result, error = queue.get(timeout=10)
            except Empty:
                lost = [i for i, p in enumerate(processes) if i not in results and p.exitcode not in (None, 0)]
                assert not lost, f"ranks {lost} ended without a word"
                continue
            assert error is None, f"rank {rank}:\n{error}"
            results[rank] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(num_ranks)]


def _rank(rank, num_ranks, port, queue, function, args):
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=PATIENCE)
        queue.put((rank, _plain(function(*args)), None))
        dist.barrier()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    queue.close()
    queue.join_thread()


def _plain(value):
    """Tensors as arrays: torch would pass them through shared memory, which ends with the process."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# --- what is computed ---


def shape(**changes):
    return GptOssConfig(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20, "num_layers": 2, "num_heads": 4,
            "num_kv_heads": 2, "head_dim": 8, "num_experts": 4, "experts_per_token": 2, "sliding_window": 6,
            **changes,
        }
    )  # fmt: skip


def whole_model(**changes):
    """On one device: sinks that differ per head and are as large as the scores, biases and norms that matter."""
    model = GptOss(shape(**changes)).init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 4, len(parameter)))
            elif name.endswith(("bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith(("lm_head.weight", "router.weight")):
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


def split_model(mesh, **changes):
    """The same, each rank with its part."""
    model = empty_model(shape(**changes), mesh)
    for (name, whole), parameter in zip(whole_model(**changes).named_parameters(), model.parameters(), strict=True):
        fill_part(name, parameter, whole.detach(), mesh)
    return model


def trajectories_of(lengths, rewards=None):
    """Trajectories with ``lengths`` rows each and two turns, every one a group of its own."""
    generator = torch.Generator().manual_seed(3)

    def ids(num):
        return tuple(torch.randint(0, VOCABULARY, (num,), generator=generator).tolist())

    trajectories = []
    for number, length in enumerate(lengths):
        parts = [2, length // 3, 1, length - 2 - length // 3]  # observation, action, observation, action
        turns = [
            Turn(observation_ids=ids(seen), action_ids=ids(acted), rollout_log_probs=(-2.0,) * acted)
            for seen, acted in zip(parts[::2], parts[1::2], strict=True)
        ]
        reward = 0.0 if rewards is None else rewards[number]
        trajectories.append(
            Trajectory(group_id=number, episode_id=str(number), turns=tuple(turns), reward=reward, stop=Stop.DONE)
        )
    return trajectories


def batches_of(lengths, *, tokens_per_microbatch=57):
    """They, packed, with advantages of both signs."""
    advantages = torch.linspace(-1, 1.3, len(lengths))
    return pack(trajectories_of(lengths), advantages, tokens_per_microbatch=tokens_per_microbatch)


# 57 rows in three sequences that straddle the borders of two and four ranks; a micro-batch of 31 and one of 38.
LENGTHS = (23, 9, 25, 31, 38)


def config_of(recompute="none", **algorithm):
    return Config(
        algorithm=AlgorithmConfig(**{"entropy_weight": 0.1, **algorithm}),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, max_grad_norm=0.5, weight_decay=0.1),
        rollout=RolloutConfig(max_context_tokens=200),
        run=RunConfig(recompute=recompute),
    )


# name -> (settings, kernel).
CASES = {
    "reference": ({}, "reference"),
    "cpu": ({}, "cpu"),
    "recomputed blocks": ({"recompute": "block"}, "cpu"),
    "recomputed experts": ({"recompute": "experts"}, "reference"),
    "sequence ratios and replayed routes": (
        {"loss": "gspo", "aggregation": "sequence", "replay_routes": "trainer", "updates_per_batch": 2}, "cpu"
    ),
}  # fmt: skip


def trained(model, mesh, settings, kernel, batches, num_steps=5):
    """Loss, log-probs and gradient of the first step; parameters after ``num_steps``."""
    attend = partial(packed_attend, kernel=kernel) if isinstance(kernel, str) else kernel(model)
    options = {} if mesh is None else {"mesh": mesh}
    trainer = Trainer(model, config_of(**settings), attend=attend, **options)
    gradients = {}

    def keep(*_):
        if not gradients:
            gradients.update(whole_tensors(((n, p.grad) for n, p in model.named_parameters()), mesh))

    trainer.optimizer.register_step_pre_hook(keep)
    known = trainer.with_old_log_probs(batches)
    log_probs = [batch.old_log_probs for batch in known]
    metrics = [trainer.step(known if trainer.config.algorithm.updates_per_batch > 1 else batches)]
    metrics += [trainer.step(batches if known[0].routes is None else known) for _ in range(num_steps - 1)]
    return {
        "metrics": {k: v for k, v in metrics[0].items() if k != "tokens_per_s"},
        "log_probs": log_probs,
        "gradients": gradients,
        "parameters": whole_tensors(model.named_parameters(), mesh),
    }


def whole_tensors(named, mesh):
    """Copies, whole, of what the ranks hold parts of, by name."""
    if mesh is None:
        return {name: x.detach().clone() for name, x in named}
    return {name: full_tensor(name, x.detach(), mesh, torch.float32).clone() for name, x in named}


def train_on_mesh(degrees, cases, changes, lengths):
    data, sequence, expert = degrees
    mesh = make_mesh(
        ParallelConfig(data_degree=data, sequence_degree=sequence, expert_degree=expert), torch.device("cpu")
    )
    results = {}
    for name, (settings, kernel) in cases.items():
        results[name] = trained(split_model(mesh, **changes), mesh, settings, kernel, batches_of(lengths))
    return results if mesh.is_first else None
