"""PPO on a mesh: a critic that has opinions from the start, and what comes of some steps with it."""

import torch
from ranks import LENGTHS, split_model, trajectories_of, whole_model, whole_tensors

from poise.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
)
from poise.loop import Rollout, train
from poise.parallel import ALONE, fill_part, local_part, make_mesh
from poise.train.critic import make_critic
from poise.train.packing import pack
from poise.train.trainer import Trainer

REWARDS = (1.0, -0.5, 0.25, 2.0, 0.0)
# Rows of 23, 9, 25, 31 and 38 make micro-batches of 47, 56 and 23: two data ranks have unequal numbers of them, and
# trajectories straddle the border of two sequence ranks.
MICRO_BATCH = 60


class Engine:
    """Its log-probs are in the rollouts already."""

    def new_policy_version(self, version):
        pass


def config_of(critic, *, recompute="none", **algorithm):
    return Config(
        algorithm=AlgorithmConfig(
            **{"normalize_advantages": "gae", "max_mismatch": 1e9, "entropy_weight": 0.1, **algorithm}
        ),
        critic=CriticConfig(**{"gamma": 0.95, "lam": 0.9, "learning_rate": 1e-2, **critic}),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, max_grad_norm=0.5, weight_decay=0.1),
        rollout=RolloutConfig(max_context_tokens=MICRO_BATCH, max_action_tokens=30),
        run=RunConfig(tokens_per_microbatch=MICRO_BATCH, recompute=recompute),
    )


CASES = {
    "own": config_of({"normalize_returns": "popart"}, updates_per_batch=2),
    "own, first alone": config_of({"pretrain_steps": 1}, recompute="block", aggregation="sequence"),
    "shared": config_of(
        {"backbone": "shared", "value_weight": 0.7}, updates_per_batch=2, replay_routes="trainer", recompute="experts"
    ),
}  # fmt: skip


def mesh_of(**degrees):
    return make_mesh(ParallelConfig(**{f"{k}_degree": v for k, v in degrees.items()}), torch.device("cpu"))


def trainer_on(mesh, config):
    """Its critic's head says something: a head of zeros gives its backbone no gradient."""
    model = whole_model() if mesh.shards is None else split_model(mesh)
    critic = make_critic(model, config, mesh=mesh)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in critic.head.named_parameters():
        values = 0.3 * torch.randn(parameter.shape, generator=generator)
        if mesh.shards is None:
            parameter.data.copy_(values)
        else:
            fill_part(name, parameter, values, mesh)
    return Trainer(model, config, mesh=mesh, critic=critic)


def steps(trainer, first, last):
    """Numbers of the steps ``first`` to ``last``, each on the same five episodes."""
    groups = [[[trajectory]] for trajectory in trajectories_of(LENGTHS, REWARDS)]
    numbers = []
    train(
        trainer,
        None,
        Engine(),
        [Rollout(groups=groups, seconds=1.0)] * (last - first + 1),
        trainer.config,
        first_step=first,
        on_step=lambda step, metrics, rollout: numbers.append(
            {k: v for k, v in metrics.items() if not k.endswith("_s")}
        ),
    )
    return numbers


def contents(trainer, mesh, parts=("", "exp_avg", "exp_avg_sq")):
    """Parameters and moments of policy and critic, whole, and the critic's statistics."""
    found = {"statistics": trainer.critic.statistics.clone()}
    for kind, module, optimizer in (
        ("policy", trainer.model, trainer.optimizer),
        ("critic", trainer.critic, trainer.critic.optimizer),
    ):
        named = dict(module.named_parameters())
        for part in parts:
            tensors = ((name, optimizer.state[p][part] if part else p) for name, p in named.items())
            found |= {f"{kind} {part} {name}": x for name, x in whole_tensors(tensors, _split(mesh)).items()}
    return found


def _split(mesh):
    return None if mesh.shards is None else mesh


def trained(mesh, config, num_steps=3):
    """Values and every first gradient; numbers of all steps; what is there in the end."""
    trainer, gradients = trainer_on(mesh, config), {}

    def keep(kind, module):
        named = [(name, p.grad) for name, p in module.named_parameters()]
        if not any(name.startswith(kind) for name in gradients):
            gradients.update({f"{kind} {name}": x for name, x in whole_tensors(named, _split(mesh)).items()})

    for kind, module, optimizer in (
        ("policy", trainer.model, trainer.optimizer),
        ("critic", trainer.critic, trainer.critic.optimizer),
    ):
        optimizer.register_step_pre_hook(lambda *_, kind=kind, module=module: keep(kind, module))
    batches = pack(trajectories_of(LENGTHS, REWARDS), torch.zeros(len(LENGTHS)), tokens_per_microbatch=MICRO_BATCH)
    return {
        "values": [batch.values for batch in trainer.with_values(batches)],
        "metrics": steps(trainer, 1, num_steps),
        "gradients": gradients,
        "parameters": contents(trainer, mesh, parts=("",)),
        "held": sum(local_part(p).numel() for p in trainer.critic.parameters()),
    }


def train_on_mesh(degrees):
    mesh = mesh_of(**degrees)
    return {name: trained(mesh, config) for name, config in CASES.items()}


def train_alone(name):
    return trained(ALONE, CASES[name])
