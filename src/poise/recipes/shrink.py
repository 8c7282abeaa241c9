"""``--shrink``: a recipe for a cluster, small enough to be run through on the CPU."""

from dataclasses import replace

from poise.config import Config, ModelConfig

# The proportions of the released models: eight query heads to a key/value head, four active experts, windows.
SHRUNK = ModelConfig(
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=1,
    head_dim=16,
    num_experts=8,
    experts_per_token=4,
    sliding_window=64,
    device="cpu",
)
MAX_DEGREE = 2


def shrunk(config: Config) -> Config:
    """Everything but sizes as it was: task, objective, degrees of parallelism (at most 2 each), recomputation.

    A tiny policy of random weights with a byte tokenizer, the embedded engine, two steps of two groups of two episodes.
    """
    rollout, run, parallel = config.rollout, config.run, config.parallel
    context = 2048  # bytes are short tokens, and a prompt that describes its tools has more than a thousand
    return replace(
        config,
        model=SHRUNK,
        task=replace(config.task, num_train_rows=8, num_test_rows=4),
        rollout=replace(
            rollout,
            groups_per_step=2 * config.algorithm.updates_per_batch,
            group_size=2,
            max_turns=min(2, rollout.max_turns),
            max_action_tokens=16,
            max_context_tokens=context,
            num_slots=8,
        ),
        optimizer=replace(config.optimizer, warmup_steps=1),
        run=replace(run, steps=2, tokens_per_microbatch=context, save_every=1, eval_every=0, eval_problems=2),
        parallel=replace(
            parallel,
            data_degree=0,
            sequence_degree=min(MAX_DEGREE, parallel.sequence_degree),
            expert_degree=min(MAX_DEGREE, parallel.expert_degree),
            offload=False,
        ),
    )
