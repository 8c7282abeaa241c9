"""One optimizer step: micro-batches in, new weights and numbers about them out."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from poise.algo.correction import mismatch
from poise.algo.losses import kl, policy_loss
from poise.config import Config, OptimizerConfig, RunError, WarmStartConfig
from poise.model import GptOss, packed_attend, top_k_route
from poise.ops.log_probs import token_log_probs
from poise.types import Batch

Schedule = Callable[[int], float]
"""Steps done -> learning rate of the next step."""


class GradientError(RunError):
    """The gradient is not finite: a step along it would destroy the weights."""


class MismatchError(RunError):
    """Trainer and engine disagree about the same tokens under the same weights."""


def warmup_schedule(config: OptimizerConfig) -> Schedule:
    """Linear over ``warmup_steps`` steps, the first at 1 / warmup_steps of the peak; constant from then on."""
    return lambda step: config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))


def warm_start_schedule(config: WarmStartConfig) -> Schedule:
    """Linear over ``warmup_steps``, then along a cosine to a tenth of the peak, which the last step reaches."""

    def learning_rate(step: int) -> float:
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        # The step that ends the warm-up already ran at the peak; without one, step 0 does.
        peak = max(0, config.warmup_steps - 1)
        progress = min(1.0, (step - peak) / max(1, config.steps - 1 - peak))
        return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))

    return learning_rate


class Trainer:
    """A model and its optimizer for one phase of a run; a new phase is a new Trainer over the same model.

    AdamW with decoupled weight decay (Loshchilov and Hutter 2019), fused where torch has it; norms, biases and sinks do
    not decay. ``schedule`` defaults to ``warmup_schedule(config.optimizer)``. All there is to save is the model and
    ``optimizer``: the number of steps done lives in its ``state_dict`` too.
    """

    def __init__(self, model: GptOss, config: Config, *, schedule: Schedule | None = None) -> None:
        self.model = model
        self.config = config
        self.schedule = schedule or warmup_schedule(config.optimizer)
        self.device = model.lm_head.weight.device
        self.optimizer = _adamw(model, config.optimizer, self.device)

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this phase."""
        return int(self.optimizer.param_groups[0]["steps_done"])

    def make_reference(self) -> GptOss | None:
        """A frozen copy of the policy as it is now; None where ``kl_weight`` is 0 and nobody would read it."""
        if self.config.algorithm.kl_weight == 0:
            return None
        return deepcopy(self.model).eval().requires_grad_(False)

    def log_probs(
        self, batch: Batch, *, model: GptOss | None = None, temperature: float | None = None
    ) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
        """Log-probs of ``target_ids`` and entropies in nats; 0 outside ``response_mask``.

        The policy is softmax(logits / temperature), by default with the temperature of the rollouts. ``model``: whose;
        by default the policy's. Only rows in the mask go through the vocabulary.
        """
        model = self.model if model is None else model
        temperature = self.config.rollout.temperature if temperature is None else temperature
        batch = self._to_device(batch)
        hidden = model(
            batch.input_ids,
            batch.position_ids,
            packed_attend(batch.cu_seqlens),
            top_k_route(model.config.experts_per_token),
            recompute=self.config.run.recompute,
        )
        mask = batch.response_mask
        values = token_log_probs(hidden[mask], model.lm_head.weight, batch.target_ids[mask], temperature=temperature)
        log_probs, entropy = (hidden.new_zeros(len(mask), dtype=v.dtype).masked_scatter(mask, v) for v in values)
        return log_probs, entropy

    @torch.no_grad()
    def with_old_log_probs(self, batches: Sequence[Batch]) -> list[Batch]:
        """Batches that know the policy as it is now: call once before the first of several updates on them."""
        return [replace(batch, old_log_probs=self._log_probs_on(batch, self.model)) for batch in batches]

    @torch.no_grad()
    def with_ref_log_probs(self, batches: Sequence[Batch], reference: GptOss) -> list[Batch]:
        """Batches that know the frozen reference."""
        return [replace(batch, ref_log_probs=self._log_probs_on(batch, reference)) for batch in batches]

    def step(
        self,
        batches: Sequence[Batch],
        *,
        max_mismatch: float | None = None,
        on_batch: Callable[[int], None] = lambda num_tokens: None,
    ) -> dict[str, float]:
        """One policy-gradient step over the micro-batches together.

        loss = sum over the response tokens of all of them (policy_loss + kl_weight kl - entropy_weight entropy) / their
        number, so that the gradient does not depend on the cut. Without ``old_log_probs`` they are the log-probs of
        this very forward: the ratio is exactly 1. Mismatch compares the log-probs before the first update with the
        engine's. Returns numbers per step. Raises ValueError without a response token, or without ``ref_log_probs``
        where ``kl_weight`` asks for them. Raises, leaving the weights alone, MismatchError where the mean mismatch is
        above ``max_mismatch`` (nats; None: no bound), and GradientError for a gradient that is not finite.
        ``on_batch(num_tokens)`` is called after each micro-batch that has a response token.
        """
        algorithm = self.config.algorithm
        if algorithm.kl_weight > 0 and any(batch.ref_log_probs is None for batch in batches):
            raise ValueError("step: algorithm.kl_weight is positive but a batch has no ref_log_probs")
        started = time.perf_counter()
        num_tokens = _num_response_tokens(batches)
        totals = _Totals()
        for batch in self._with_response(batches):
            mask = batch.response_mask
            log_probs, entropy = self.log_probs(batch)
            old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
            loss, metrics = policy_loss(
                log_probs,
                old_log_probs,
                batch.advantages,
                mask,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
            )
            if batch.ref_log_probs is not None:
                kl_sum = kl(log_probs, batch.ref_log_probs, algorithm.kl_estimator)[mask].sum()
                loss = loss + algorithm.kl_weight * kl_sum
                totals.add(kl=kl_sum)
            if algorithm.entropy_weight != 0:
                loss = loss - algorithm.entropy_weight * entropy.sum()
            (loss / num_tokens).backward()
            difference = mismatch(old_log_probs, batch.rollout_log_probs, mask)
            totals.add(
                loss=loss,
                entropy=entropy.sum(),
                clip_fraction=metrics["clipped_tokens"],
                mismatch_mean=difference["abs_sum"],
                mismatch_k3=difference["k3_sum"],
            )
            totals.lower(ratio_min=metrics["ratio_min"])
            totals.raise_(ratio_max=metrics["ratio_max"], mismatch_max=difference["abs_max"])
            on_batch(len(mask))
        means = totals.per_token(num_tokens)
        # Not `mean > bound`: a NaN must not pass.
        if max_mismatch is not None and not means["mismatch_mean"] <= max_mismatch:
            self.optimizer.zero_grad()
            raise MismatchError(
                f"step {self.steps_done}: trainer and engine differ by {means['mismatch_mean']:.3g} nats per sampled "
                f"token in the mean ({means['mismatch_max']:.3g} at most); the bound on the mean is {max_mismatch:.3g}"
            )
        return means | self._update() | _throughput(batches, num_tokens, started)

    def supervised_step(self, batches: Sequence[Batch]) -> dict[str, float]:
        """One step of imitation: loss = -(sum of the response tokens' log-probs) / their number, at temperature 1.

        This is ``step`` on the same batches (their advantages are 1) but for the temperature. Raises as ``step`` does.
        """
        started = time.perf_counter()
        num_tokens = _num_response_tokens(batches)
        totals = _Totals()
        for batch in self._with_response(batches):
            log_probs, entropy = self.log_probs(batch, temperature=1.0)
            loss = -log_probs.sum()
            (loss / num_tokens).backward()
            totals.add(loss=loss, entropy=entropy.sum())
        return totals.per_token(num_tokens) | self._update() | _throughput(batches, num_tokens, started)

    def _update(self) -> dict[str, float]:
        """Clip, step, forget the gradient."""
        learning_rate = self.schedule(self.steps_done)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm).item()
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise GradientError(f"step {self.steps_done}: the gradient norm is {norm}; the weights were left alone")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            group["steps_done"] += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "learning_rate": learning_rate}

    def _with_response(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Those that can change anything, one at a time on the model's device."""
        return (self._to_device(batch) for batch in batches if batch.num_response_tokens)

    def _log_probs_on(self, batch: Batch, model: GptOss) -> Tensor:
        log_probs, _ = self.log_probs(batch, model=model)
        return log_probs.to(batch.input_ids.device)

    def _to_device(self, batch: Batch) -> Batch:
        tensors = {name: value.to(self.device) for name, value in vars(batch).items() if value is not None}
        return replace(batch, **tensors)


class _Totals:
    """Detached numbers of the micro-batches of one step, read once at its end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()

    def lower(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._extremes[name] = torch.minimum(self._extremes.get(name, value), value)

    def raise_(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._extremes[name] = torch.maximum(self._extremes.get(name, value), value)

    def per_token(self, num_tokens: int) -> dict[str, float]:
        means = {name: value.item() / num_tokens for name, value in self._sums.items()}
        return means | {name: value.item() for name, value in self._extremes.items()}


def _num_response_tokens(batches: Sequence[Batch]) -> int:
    num_tokens = sum(batch.num_response_tokens for batch in batches)
    if num_tokens == 0:
        raise ValueError("batches: no response token in any of them, so there is nothing to learn from")
    return num_tokens


def _throughput(batches: Sequence[Batch], num_response_tokens: int, started: float) -> dict[str, float]:
    num_rows = sum(len(batch.input_ids) for batch in batches)
    return {"response_tokens": num_response_tokens, "tokens_per_s": num_rows / (time.perf_counter() - started)}


def _adamw(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    decays: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_exempt = "norm" in name or name.endswith(("bias", "sinks"))
        (exempt if is_exempt else decays).append(parameter)
    # `steps_done` rides in the groups so that it is saved and restored with the moments it belongs to.
    groups = [
        {"params": decays, "weight_decay": config.weight_decay, "steps_done": 0},
        {"params": exempt, "weight_decay": 0.0, "steps_done": 0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda"),
    )
