"""One optimizer step: micro-batches in, new weights and numbers about them out."""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from poise.algo.correction import mismatch, rollout_correction
from poise.algo.losses import aggregation_weights, kl, policy_loss
from poise.config import AlgorithmConfig, Config, ConfigError, RunError
from poise.model import GptOss, packed_attend, packed_copy, top_k_route
from poise.model.gpt_oss import Attend, Route
from poise.parallel import ALONE, Mesh, frozen_copy, gradient_norm, put_away, rows_of_rank, whole_rows
from poise.train.critic import Critic
from poise.train.forward import hidden_states, log_probs_of
from poise.train.optimizer import Schedule, adamw, steps_done, update, warmup_schedule
from poise.train.replay import recording_route, replay_route
from poise.train.totals import Totals, correction_means
from poise.types import Batch


class MismatchError(RunError):
    """Trainer and engine disagree about the same tokens under the same weights."""


class CorrectionError(RunError):
    """Rollout correction has left nothing to learn from."""


class Trainer:
    """A model and its optimizer for one phase of a run; a new phase is a new Trainer over the same model.

    ``schedule`` defaults to ``warmup_schedule(config.optimizer)``. All there is to save is the model and
    ``optimizer``: the number of steps done lives in its ``state_dict`` too.

    ``mesh``: the ranks that share the work. Each of them calls the same methods with the same batches, all of a step;
    within, a micro-batch is computed at one place of the mesh, and what comes of it is known to all.
    ``attend``: from ``cu_seqlens`` to the attention that the model is given. ``critic``: of PPO, which ``step`` updates
    too; it has an optimizer of its own, and is split over the same ``mesh``.
    """

    def __init__(
        self,
        model: GptOss,
        config: Config,
        *,
        schedule: Schedule | None = None,
        mesh: Mesh = ALONE,
        attend: Callable[[Tensor], Attend] = packed_attend,
        critic: Critic | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.mesh, self.attend = mesh, attend
        if mesh.shards is not None and config.algorithm.recompute_old_log_probs != "none":
            raise ConfigError("algorithm.recompute_old_log_probs is an experiment for one process, without torchrun")
        self.schedule = schedule or warmup_schedule(config.optimizer)
        self.device = mesh.device or model.lm_head.weight.device
        self.critic = critic
        self.optimizer = adamw(model, config.optimizer, self.device)

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this phase."""
        return steps_done(self.optimizer)

    def make_reference(self, first: GptOss | None = None) -> GptOss | None:
        """The frozen reference, made of ``first``, by default of the policy as it is now; None where ``kl_weight`` is 0
        and nobody would read it."""
        if self.config.algorithm.kl_weight == 0:
            return None
        if self.config.algorithm.reference_experts == "mxfp4":
            return packed_copy(self.model if first is None else first)
        return frozen_copy(self.model, self.mesh) if first is None else first

    def log_probs(
        self,
        batch: Batch,
        *,
        model: GptOss | None = None,
        temperature: float | None = None,
        route: Route | None = None,
    ) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
        """Log-probs of ``target_ids`` and entropies in nats; 0 outside ``response_mask``.

        The policy is softmax(logits / temperature), by default with the temperature of the rollouts. ``model``: whose;
        by default the policy's. ``route``: by default the router's top-k. Only rows in the mask go through the
        vocabulary. On a mesh: of all rows, on each of the ranks that share them; ``route`` sees this rank's rows.
        """
        model = self.model if model is None else model
        temperature = self.config.rollout.temperature if temperature is None else temperature
        batch = self._to_device(batch)
        hidden = self._hidden(batch, model, route)
        return log_probs_of(hidden, batch, model.lm_head.weight, self.mesh, temperature=temperature)

    def _hidden(self, batch: Batch, model: GptOss, route: Route | None = None) -> Tensor:
        """Hidden states of this rank's rows."""
        return hidden_states(model, batch, self.mesh, self.attend, route, recompute=self.config.run.recompute)

    @torch.no_grad()
    def with_old_log_probs(self, batches: Sequence[Batch]) -> list[Batch]:
        """Batches that know the policy as it is now: call once before the first of several updates on them.

        ``replay_routes`` "trainer" keeps the experts of this pass, "engine" replays those of the rollout. The
        experiment ``recompute_old_log_probs`` makes the pass in its type.
        """
        name = self.config.algorithm.recompute_old_log_probs
        dtype = self.model.lm_head.weight.dtype if name == "none" else getattr(torch, name)
        model = self.model if dtype is self.model.lm_head.weight.dtype else deepcopy(self.model).to(dtype)
        return self._map(lambda batch: self._with_old_log_probs(batch, model), batches)

    def _with_old_log_probs(self, batch: Batch, model: GptOss) -> Batch:
        if self.config.algorithm.replay_routes != "trainer":
            return replace(batch, old_log_probs=self._log_probs_on(batch, model, self._route(batch)))
        recorded: list[Tensor] = []
        route = recording_route(top_k_route(model.config.experts_per_token), recorded)
        old_log_probs = self._log_probs_on(batch, model, route)
        routes = whole_rows(torch.stack(recorded, dim=1), len(batch.input_ids), self.mesh)
        return replace(batch, old_log_probs=old_log_probs, routes=routes.to(batch.input_ids.device))

    @torch.no_grad()
    def with_ref_log_probs(self, batches: Sequence[Batch], reference: GptOss) -> list[Batch]:
        """Batches that know the frozen reference."""
        known = self._map(lambda b: replace(b, ref_log_probs=self._log_probs_on(b, reference)), batches)
        put_away(reference)
        return known

    @torch.no_grad()
    def with_values(self, batches: Sequence[Batch]) -> list[Batch]:
        """Batches that know what the critic expects now; a shared backbone takes the routes that a batch carries.

        Raises ValueError without a critic.
        """
        if self.critic is None:
            raise ValueError("with_values needs a critic")
        critic, replays = self.critic, self.config.algorithm.replay_routes == "engine"

        def with_values(batch: Batch) -> Batch:
            here = self._to_device(batch)
            takes_routes = critic.is_shared and replays and batch.routes is not None
            hidden = self._hidden(here, critic.backbone or self.model, self._route(here) if takes_routes else None)
            return replace(batch, values=critic.values(hidden, here).to(batch.input_ids.device))

        valued = self._map(with_values, batches)
        put_away(critic)
        return valued

    def _map(self, function: Callable[[Batch], Batch], batches: Sequence[Batch]) -> list[Batch]:
        return self.mesh.map(function, batches, _inert(batches[0])) if batches else []

    def step(
        self,
        batches: Sequence[Batch],
        *,
        max_mismatch: float | None = None,
        trains_policy: bool = True,
        on_batch: Callable[[int], None] = lambda num_tokens: None,
    ) -> dict[str, float]:
        """One policy-gradient step over the micro-batches together.

        loss = sum over the response tokens of all of them a_t (w_t policy_loss + kl_weight kl - entropy_weight entropy)
        / normalizer, with a_t and the normalizer from ``aggregation`` over the whole step, so that the gradient does
        not depend on the cut, and w_t from ``correction``. Without ``old_log_probs`` they are the log-probs of this
        very forward: the ratio is exactly 1. Mismatch compares the log-probs before the first update with the engine's.
        Returns numbers per step. Raises ValueError without a response token, or without the ``ref_log_probs`` or
        ``routes`` that the configuration asks for. Raises, leaving the weights alone, MismatchError where the mean
        mismatch is above ``max_mismatch`` (nats; None: no bound), CorrectionError where every token is masked, and
        GradientError for a gradient that is not finite. ``on_batch(num_tokens)`` is called after each micro-batch that
        has a response token.

        With a critic, its value loss, aggregated in the same way, updates it too: on a shared backbone as one more term
        of the loss, with ``value_weight``; on its own afterwards. ``trains_policy`` False: nothing else is updated.
        """
        algorithm = self.config.algorithm
        if algorithm.kl_weight > 0 and algorithm.kl_in == "loss" and any(b.ref_log_probs is None for b in batches):
            raise ValueError("step: algorithm.kl_weight is positive but a batch has no ref_log_probs")
        started = time.perf_counter()
        num_tokens = _num_response_tokens(batches)
        normalizer = sum(self._aggregation_weights(batch)[1] for batch in batches)
        mean_weight = self._mean_weight(batches) if algorithm.normalize_correction else 1.0
        totals = Totals()
        for batch in self._with_response(batches):
            if not batch.num_response_tokens:
                self._keep_pace(batch)
                continue
            loss = self._loss(batch, mean_weight, totals)
            (loss / normalizer).backward()
            totals.add(loss=loss * (num_tokens / normalizer))
            on_batch(len(batch.input_ids))
        totals = Totals.merged(self.mesh.gather(totals.cpu()))
        means = correction_means(totals.per_token(num_tokens))
        # Not `mean > bound`: a NaN must not pass.
        if max_mismatch is not None and not means["mismatch_mean"] <= max_mismatch:
            self.optimizer.zero_grad()
            raise MismatchError(
                f"step {self.steps_done}: trainer and engine differ by {means['mismatch_mean']:.3g} nats per sampled "
                f"token in the mean ({means['mismatch_max']:.3g} at most); the bound on the mean is {max_mismatch:.3g}"
            )
        if algorithm.correction == "mask" and means["correction_limited"] == 1:
            self.optimizer.zero_grad()
            raise CorrectionError(
                f"step {self.steps_done}: algorithm.correction masked every token: no ratio of trainer to engine lies "
                f"within correction_low ({algorithm.correction_low:g}) and correction_high "
                f"({algorithm.correction_high:g})"
            )
        numbers = self._update() if trains_policy else self._left_alone()
        if self.critic is not None:
            numbers |= self._critic_step(self.critic, batches, normalizer, num_tokens)
        return means | numbers | _throughput(batches, num_tokens, started)

    def _critic_step(
        self, critic: Critic, batches: Sequence[Batch], normalizer: int, num_tokens: int
    ) -> dict[str, float]:
        """On its own backbone: forward and backward over the micro-batches. On the policy's that is done already."""
        if critic.backbone is None:
            return critic.update()
        totals = Totals()
        for batch in self._with_response(batches):
            hidden = self._hidden(batch, critic.backbone)
            loss, numbers = critic.loss(hidden, batch, self._aggregation_weights(batch)[0])
            (loss / normalizer).backward()
            totals.add(**numbers)
        return Totals.merged(self.mesh.gather(totals.cpu())).per_token(num_tokens) | critic.update()

    def _loss(self, batch: Batch, mean_weight: float, totals: "Totals") -> Tensor:
        """The weighted sum of one micro-batch, with its graph; numbers about it go to ``totals``."""
        algorithm, mask = self.config.algorithm, batch.response_mask
        drifted: list[Tensor] = []
        hidden = self._hidden(batch, self.model, self._route(batch, drifted))
        head, temperature = self.model.lm_head.weight, self.config.rollout.temperature
        log_probs, entropy = log_probs_of(hidden, batch, head, self.mesh, temperature=temperature)
        if drifted:
            whole = whole_rows(torch.stack(drifted, dim=1), len(mask), self.mesh)
            share = whole.sum() / whole.numel()
            totals.add(route_drift=share * mask.sum())
        old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        shares, _ = self._aggregation_weights(batch)
        weights, _, correction = _rollout_correction(batch, old_log_probs, algorithm)
        loss, metrics = policy_loss(
            log_probs,
            old_log_probs,
            batch.advantages,
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            loss=algorithm.loss,
            dual_clip=algorithm.dual_clip,
            cu_seqlens=batch.cu_seqlens,
            weights=shares * weights / mean_weight,
        )
        if batch.ref_log_probs is not None:
            estimates = kl(log_probs, batch.ref_log_probs, algorithm.kl_estimator)
            loss = loss + algorithm.kl_weight * (shares * estimates)[mask].sum()
            totals.add(kl=estimates[mask].sum())
        if algorithm.entropy_weight != 0:
            loss = loss - algorithm.entropy_weight * (shares * entropy).sum()
        if self.critic is not None and self.critic.is_shared:
            value_term, numbers = self.critic.loss(hidden, batch, shares)
            loss = loss + self.config.critic.value_weight * value_term
            totals.add(**numbers)
        difference = mismatch(old_log_probs, batch.rollout_log_probs, mask)
        totals.add(
            entropy=entropy.sum(),
            clip_fraction=metrics["clipped_tokens"],
            approx_kl=metrics["approx_kl"],
            mismatch_mean=difference["abs_sum"],
            mismatch_k1=difference["k1_sum"],
            mismatch_k3=difference["k3_sum"],
            **correction,
        )
        totals.lower(ratio_min=metrics["ratio_min"])
        totals.raise_(ratio_max=metrics["ratio_max"], mismatch_max=difference["abs_max"])
        return loss

    def _route(self, batch: Batch, drifted: list[Tensor] | None = None) -> Route:
        """The router's own top-k, or the experts that the batch carries."""
        source = self.config.algorithm.replay_routes
        if source == "none":
            return top_k_route(self.model.config.experts_per_token)
        if batch.routes is None:
            raise ValueError(f'algorithm.replay_routes is "{source}" but a batch has no routes')
        return replay_route(rows_of_rank(batch.routes.to(self.device), self.mesh), drifted)

    def _aggregation_weights(self, batch: Batch) -> tuple[Tensor, int]:
        return aggregation_weights(
            batch.response_mask,
            batch.cu_seqlens,
            self.config.algorithm.aggregation,
            max_tokens=self.config.rollout.max_context_tokens,
        )

    def _mean_weight(self, batches: Sequence[Batch]) -> float:
        """Mean weight of rollout correction over the response tokens of the whole step."""
        total = 0.0
        is_known = all(batch.old_log_probs is not None for batch in batches)
        for known in batches if is_known else self.with_old_log_probs(batches):
            assert known.old_log_probs is not None
            total += _rollout_correction(known, known.old_log_probs, self.config.algorithm)[0].double().sum().item()
        # 0 only where every token is masked, which the step itself refuses.
        return total / _num_response_tokens(batches) or 1.0

    def supervised_step(self, batches: Sequence[Batch]) -> dict[str, float]:
        """One step of imitation: loss = -(sum of the response tokens' log-probs) / their number, at temperature 1.

        This is ``step`` on the same batches (their advantages are 1) but for the temperature. Raises as ``step`` does.
        """
        started = time.perf_counter()
        num_tokens = _num_response_tokens(batches)
        totals = Totals()
        for batch in self._with_response(batches):
            if not batch.num_response_tokens:
                self._keep_pace(batch)
                continue
            log_probs, entropy = self.log_probs(batch, temperature=1.0)
            loss = -log_probs.sum()
            (loss / num_tokens).backward()
            totals.add(loss=loss, entropy=entropy.sum())
        totals = Totals.merged(self.mesh.gather(totals.cpu()))
        return totals.per_token(num_tokens) | self._update() | _throughput(batches, num_tokens, started)

    def _update(self) -> dict[str, float]:
        limit = self.config.optimizer.max_grad_norm
        norm, learning_rate = update(self.model, self.optimizer, self.schedule, max_grad_norm=limit, mesh=self.mesh)
        return {"grad_norm": norm, "learning_rate": learning_rate}

    def _left_alone(self) -> dict[str, float]:
        """Forget the gradient."""
        norm = gradient_norm(self.model, self.mesh)
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "learning_rate": 0.0}

    def _with_response(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Those of this rank that can change anything, one at a time on the model's device.

        And, where other ranks have one more, one without a response token.
        """
        mine = self.mesh.share([b for b in batches if b.num_response_tokens], _inert(batches[0]))
        return (self._to_device(batch) for batch in mine)

    def _keep_pace(self, batch: Batch) -> None:
        """Forward and backward of nothing, which other ranks wait for: they gather parameters together."""
        hidden = self._hidden(batch, self.model)
        nothing, _ = log_probs_of(hidden, batch, self.model.lm_head.weight, self.mesh, temperature=1.0)
        if self.critic is not None and self.critic.is_shared:
            nothing = nothing + self.critic.predictions(hidden, batch)
        nothing.sum().backward()

    def _log_probs_on(self, batch: Batch, model: GptOss, route: Route | None = None) -> Tensor:
        log_probs, _ = self.log_probs(batch, model=model, route=route)
        return log_probs.to(batch.input_ids.device)

    def _to_device(self, batch: Batch) -> Batch:
        tensors = {name: value.to(self.device) for name, value in vars(batch).items() if value is not None}
        return replace(batch, **tensors)


def _inert(batch: Batch) -> Batch:
    """The first row of ``batch`` without its response: a micro-batch that changes nothing."""
    row = {name: value[:1] for name, value in vars(batch).items() if value is not None}
    borders = batch.cu_seqlens.new_tensor([0, 1])
    return replace(batch, **row | {"cu_seqlens": borders, "response_mask": torch.zeros_like(row["response_mask"])})


def _rollout_correction(
    batch: Batch, old_log_probs: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weights alone: what is rejected never comes here, since that is decided before the baseline."""
    return rollout_correction(
        old_log_probs,
        batch.rollout_log_probs,
        batch.response_mask,
        batch.cu_seqlens,
        correction=algorithm.correction,
        level=algorithm.correction_level,
        low=algorithm.correction_low,
        high=algorithm.correction_high,
    )


def _num_response_tokens(batches: Sequence[Batch]) -> int:
    num_tokens = sum(batch.num_response_tokens for batch in batches)
    if num_tokens == 0:
        raise ValueError("batches: no response token in any of them, so there is nothing to learn from")
    return num_tokens


def _throughput(batches: Sequence[Batch], num_response_tokens: int, started: float) -> dict[str, float]:
    num_rows = sum(len(batch.input_ids) for batch in batches)
    return {"response_tokens": num_response_tokens, "tokens_per_s": num_rows / (time.perf_counter() - started)}
