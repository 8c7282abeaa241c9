"""The memory of a run before it starts: bytes per rank, by kind and phase, from the shapes that the code makes.

Everything is counted at its worst: engine slots filled to the context, micro-batches of full length, gradients that
accumulate; bfloat16 as GPUs run it; tokens spread evenly over the experts of ranks that share them. What the
interpreter and the libraries take for themselves is not counted.
"""

from math import gcd

import torch

from poise.config import Config, ConfigError
from poise.config.errors import require
from poise.engine.cache import MAX_SCORES
from poise.engine.embedded import MAX_CONTINUING_TOKENS
from poise.engine.prepared import paying_matrices
from poise.model import GptOss, GptOssConfig, require_packable
from poise.ops.attention_cpu import MIN_BLOCK
from poise.ops.experts import room_to_keep
from poise.ops.experts_rows import MAX_BLOCK, rows_per_span
from poise.ops.log_probs import tile_shape
from poise.ops.mxfp4 import BLOCK
from poise.plan.tables import Items, Mesh, Plan

WIDE, INDEX = 4, 8  # bytes of float32 and of int64
PER_ROW = 240  # bytes of a micro-batch's row and of what the losses keep for it, all of them scalars


def make_plan(model_config: GptOssConfig, config: Config, *, mesh: Mesh | None = None, trains: bool = True) -> Plan:
    """The plan of a run.

    Raises ConfigError for a mesh that the model cannot be split over, and a packed reference that cannot be.
    """
    mesh = mesh or Mesh()
    _require_divisible(model_config, mesh)
    _require_packable(model_config, config, mesh)
    sizes = _Sizes(model_config, config, mesh)
    held = sizes.held(trains=trains)
    phases = {"rollout": held | sizes.rollout()}
    if trains:
        beside = held | sizes.sampled_ahead()
        if scoring := sizes.scoring():
            phases["scoring"] = beside | scoring
        phases["training"] = beside | sizes.training()
    return Plan(phases=phases)


def _require_packable(model_config: GptOssConfig, config: Config, mesh: Mesh) -> None:
    if config.algorithm.reference_experts == "mxfp4":
        require(mesh.num_ranks == 1, 'algorithm.reference_experts "mxfp4" works on one rank only')
        try:
            require_packable(model_config)
        except ValueError as error:
            raise ConfigError(f'algorithm.reference_experts "mxfp4": {error}') from error


def _require_divisible(model_config: GptOssConfig, mesh: Mesh) -> None:
    if model_config.num_experts % mesh.expert:
        raise ConfigError(f"the expert degree ({mesh.expert}) must divide the {model_config.num_experts} experts")
    if model_config.num_heads % mesh.sequence:
        raise ConfigError(f"the sequence degree ({mesh.sequence}) must divide the {model_config.num_heads} heads")


class _Sizes:
    """The shapes of one rank. Letters are those of the kernels: T rows, R = T A routed rows, D, H, K, C, E, F, V."""

    def __init__(self, model_config: GptOssConfig, config: Config, mesh: Mesh) -> None:
        self.model, self.config, self.mesh = model_config, config, mesh
        self.width = 2 if config.model.dtype == "bfloat16" else 4
        self.stored = self.width if mesh.num_ranks == 1 else WIDE  # of parameters, gradients and moments
        if config.parallel.offload:
            self.stored = 0  # they are in host memory
        with torch.device("meta"):
            meta = GptOss(model_config)
        self.num_expert = sum(p.numel() for name, p in meta.named_parameters() if ".experts." in name)
        self.num_dense = sum(p.numel() for p in meta.parameters()) - self.num_expert
        block = meta.model.layers[0]
        self.block_expert = sum(p.numel() for name, p in block.named_parameters() if ".experts." in name)
        self.block_dense = sum(p.numel() for p in block.parameters()) - self.block_expert
        self.head = model_config.vocab_size * model_config.hidden_size
        rollout, context = config.rollout, config.rollout.max_context_tokens
        episodes = rollout.groups_per_step * rollout.group_size // config.algorithm.updates_per_batch
        demonstrations = config.warm_start.demonstrations_per_step if config.warm_start.steps else 0
        rows = context * max(episodes, demonstrations)  # of one optimizer step, at most
        self.accumulates = rows > config.run.tokens_per_microbatch * mesh.data * mesh.expert
        self.rows = -(-min(config.run.tokens_per_microbatch, rows) // mesh.sequence)
        self.is_embedded = config.engine.kind == "embedded"
        self.num_slots = rollout.num_slots if self.is_embedded else 1  # servers have caches of their own

    def held(self, *, trains: bool) -> Items:
        """What lives from the first step to the last."""
        shard = -(-(self.num_expert + self.num_dense) // self.mesh.num_ranks)
        model, config = self.model, self.config.rollout
        cached = sum(
            config.max_context_tokens if window is None else window for window in model.windows
        )  # rows of a slot, all layers
        routes = config.max_context_tokens * model.num_layers * model.experts_per_token * 2  # int16
        items = {"parameters": shard * self.stored}
        if trains:
            items["optimizer"] = 2 * shard * self.stored
            if self.config.algorithm.kl_weight > 0:
                items["reference"] = self._reference(shard)
            if self.config.algorithm.normalize_advantages == "gae" and self.config.critic.backbone == "own":
                # Weights and moments. Its gradients and activations live when the policy's do not, and are no larger.
                own = self.num_expert + self.num_dense - self.head + model.hidden_size + 1  # one number, not a word
                items["critic"] = 3 * -(-own // self.mesh.num_ranks) * self.stored
        items["engine cache"] = self.num_slots * (
            2 * cached * model.num_kv_heads * model.head_dim * self.width + routes
        )
        if self.is_embedded and (self.mesh.num_ranks > 1 or (trains and config.max_staleness)):
            items["engine weights"] = (self.num_expert + self.num_dense) * self.width  # whole, on each rank
        if gathered := self._gathered():
            items["gathered blocks"] = 2 * gathered  # the one that computes and the one that is fetched ahead
            items["embedding and head"] = 2 * self.head * self.width  # gathered from the first block to the last
        return items

    def _reference(self, shard: int) -> int:
        if self.config.algorithm.reference_experts == "plain":
            return shard * self.stored
        packed = 3 * self.model.num_layers * self.model.num_experts * self._matrix
        return (shard - packed) * self.stored + packed // BLOCK * (BLOCK // 2 + 1)

    @property
    def _matrix(self) -> int:
        """Elements of an expert's down projection; gate and up are two of them."""
        return self.model.hidden_size * self.model.intermediate_size

    def _gathered(self) -> int:
        """Bytes of the largest unit of parameters that ranks put together; 0 where nothing is split."""
        mesh = self.mesh
        if mesh.num_ranks == 1:
            return 0
        experts = self.block_expert // mesh.expert if mesh.num_ranks > mesh.expert else 0
        return max(self.block_dense + experts, self.head) * self.width

    # --- sampling ---

    def rollout(self) -> Items:
        """Matrices prepared for sampling, and the largest of: the forward over prompts, attention of what a tool
        appends, sampling from the logits."""
        rollout, model = self.config.rollout, self.model
        slots, context, width = self.num_slots, rollout.max_context_tokens, self.width
        tokens = min(rollout.max_prefill_tokens, slots * context) + slots
        stream = 3 * tokens * model.hidden_size * width
        logits = slots * model.vocab_size * (width + WIDE + 16)  # the cumulative distribution is float64
        prompts = stream + max(self._experts_forward(tokens), self._attention_forward(tokens))
        candidates = {
            "prompts": prompts,
            "attention to the cache": self._attention_to_cache(),
            "logits": logits,
        }
        name = max(candidates, key=lambda kind: candidates[kind])
        items = {name: candidates[name]}
        if prepared := self._prepared():
            items["prepared matrices"] = prepared
        return items

    def _prepared(self) -> int:
        is_cpu = self.config.model.device == "cpu" or not torch.cuda.is_available()
        if not (self.is_embedded and is_cpu):
            return 0
        dtype = torch.bfloat16 if self.config.model.dtype == "bfloat16" else torch.float32
        paying = paying_matrices(self.model, self.num_slots, dtype, torch.device("cpu"))
        return self.width * sum(number * elements for number, elements in paying.values())

    def sampled_ahead(self) -> Items:
        """What the rollout of a later step takes while this one is trained."""
        if not self.is_embedded or not self.config.rollout.max_staleness:
            return {}
        return {"sampling ahead": sum(self.rollout().values())}

    def _appended(self) -> int:
        """Tokens that a slot is fed at once behind a cached prefix, at most."""
        rollout = self.config.rollout
        budget = max(1, rollout.max_prefill_tokens // self.num_slots)
        return min(MAX_CONTINUING_TOKENS, max(40, budget), rollout.max_context_tokens // 2)

    def _attention_to_cache(self) -> int:
        """Scores, masks and copies of queries, keys and values, of slots that a tool's result was appended to.

        A group of slots holds at most ``MAX_SCORES`` scores, and at least one slot's.
        """
        model, context, width = self.model, self.config.rollout.max_context_tokens, self.width
        new = self._appended()
        slots = min(self.num_slots, -(-self.config.rollout.max_prefill_tokens // new))
        longest = context if None in model.windows else min(context, model.sliding_window + new)
        scores = model.num_heads * new * longest  # of one slot
        group = min(slots, max(1, MAX_SCORES // scores))
        masks = sum(new * (longest if w is None else w - 1 + new) for w in set(model.windows))
        stream = slots * new * 2 * (model.hidden_size + self._q + self._kv) * width
        half_copies = 4 if width == 2 else 0
        by_score = WIDE + half_copies + 1 / model.num_kv_heads  # the last: a mask that is repeated per key's queries
        copies = (4 * longest - 2 * new) * self._kv + 4 * new * self._q  # the history, and it with the new tokens
        return stream + slots * masks + int(group * (scores * by_score + copies * width))

    # --- scoring ---

    def scoring(self) -> Items:
        """The forward passes before the update, which keep nothing, and the copy that one of them may need.

        Empty where the training step's own pass is the only one.
        """
        algorithm = self.config.algorithm
        dtype = algorithm.recompute_old_log_probs
        if not (
            algorithm.updates_per_batch > 1
            or dtype != "none"
            or algorithm.kl_weight > 0
            or algorithm.normalize_advantages == "gae"
            or algorithm.rejects
            or algorithm.normalize_correction
        ):
            return {}
        attention = self._attention_forward(self.rows) + self._exchanged_heads()
        forward = max(self._experts_forward(self.rows), attention)
        if algorithm.reference_experts == "mxfp4":
            forward += 2 * self._matrix * (2 + WIDE + self.width)  # gate and up of one expert, unpacked
        items = {"batch": PER_ROW * self.rows, "forward": 3 * self._stream() + max(forward, self._log_prob_tiles())}
        if dtype not in ("none", self.config.model.dtype):
            items["copy of the policy"] = (self.num_expert + self.num_dense) * WIDE
        return items

    # --- training ---

    @property
    def _q(self) -> int:
        return self.model.num_heads * self.model.head_dim

    @property
    def _kv(self) -> int:
        return self.model.num_kv_heads * self.model.head_dim

    @property
    def _repeated_kv(self) -> int:
        """As many heads as ranks that share a sequence need."""
        return self._kv * (self.mesh.sequence // gcd(self.model.num_kv_heads, self.mesh.sequence))

    def _exchanged_heads(self) -> int:
        """Queries, keys and values as they leave the ranks that share a sequence, and as they arrive."""
        return 2 * self.rows * (self._q + 2 * self._repeated_kv) * self.width if self.mesh.sequence > 1 else 0

    def training(self) -> Items:
        """At the end of the forward, in the backward of the log-probs or in that of a block, whichever holds most."""
        candidates = [self._at_log_probs(), *(self._at_block(i) for i in range(self.model.num_layers))]
        return max(candidates, key=lambda items: sum(items.values()))

    def _kept(self, num_layers: int) -> Items:
        """What the forward keeps of the first ``num_layers`` blocks."""
        model, how = self.model, self.config.run.recompute
        total: Items = {}
        for layer in range(num_layers):
            if how == "block":
                kept = {"checkpoints": self._stream() + self._ids()}
            elif how == "around_attention":
                kept = self._kept_result(layer) | {"checkpoints": self._stream() + self._ids()}
            elif how == "experts":
                kept = self._kept_attention(layer) | {"checkpoints": self._stream() + self._ids()}
            else:
                kept = self._kept_attention(layer) | self._kept_experts()
            for name, size in kept.items():
                total[name] = total.get(name, 0) + size
        window = model.sliding_window
        if num_layers and any(w is not None for w in model.windows) and window < self.config.rollout.max_context_tokens:
            block = max(window, MIN_BLOCK)
            masks = 2 if self.accumulates else 1  # those of the micro-batch before are remembered
            rows = self.rows * self.mesh.sequence  # attention sees them all
            total["attention"] = total.get("attention", 0) + masks * rows * (window - 1 + block) * WIDE
        return total

    def _stream(self) -> int:
        """One copy of the residual stream, [T, D]."""
        return self.rows * self.model.hidden_size * self.width

    def _ids(self) -> int:
        return self.rows * self.model.experts_per_token * INDEX

    def _kept_result(self, layer: int) -> Items:
        """What the attention kernel returned: the result and its lse."""
        return {"attention": self.rows * (self._q * self.width + self.model.num_heads * WIDE)}

    def _kept_attention(self, layer: int) -> Items:
        """Input, normalized input, its scaled version; queries, keys, values, result and lse."""
        window = self.model.windows[layer]
        overlap = 1.0
        if window is not None and window < self.config.rollout.max_context_tokens:
            block = max(window, MIN_BLOCK)
            overlap = (window - 1 + block) / block
        # On several ranks the result once more, as it comes back to this rank's rows.
        heads = (2 if self.mesh.sequence == 1 else 3) * self._q + 2 * overlap * self._repeated_kv
        return {
            "attention": 3 * self._stream()
            + int(self.rows * heads * self.width)
            + self.rows * self.model.num_heads * WIDE
        }

    def _kept_experts(self) -> Items:
        """Input, normalized input, its scaled version; gate and up of some rows, order and weights of all of them."""
        model = self.model
        routed, span = self._spans(self.rows)
        wide = 2 * model.intermediate_size
        shape = model.num_experts // self.mesh.expert, model.hidden_size, wide
        room = room_to_keep(shape, routed, self.mesh.sequence, is_packed=False)
        kept = routed if routed * wide <= room else min(routed, room // (span * wide) * span)
        inner = kept * wide * self.width + routed * (2 * INDEX + 2 * WIDE)
        return {"experts": 3 * self._stream() + inner + self._ids() + self._exchanged(1)}

    def _exchanged(self, copies: int) -> int:
        """Copies of the routed rows that travel between ranks that share the experts."""
        rows = self.rows * self.model.experts_per_token if self.mesh.expert > 1 else 0
        return copies * rows * self.model.hidden_size * self.width

    def _spans(self, tokens: int) -> tuple[int, int]:
        """(routed rows, those that exist at once): a span of them in float32, all of them in grouped products."""
        routed = tokens * self.model.experts_per_token
        if self.width == 2:
            return routed, routed
        return routed, min(routed, rows_per_span(self.model.hidden_size, self.model.intermediate_size))

    def _experts_forward(self, tokens: int) -> int:
        """The sum; the order of the rows; rows beside gate and up, or gate and up beside the activation."""
        model = self.model
        routed, span = self._spans(tokens)
        channels, inner = model.hidden_size, model.intermediate_size
        elements = span * (2 * inner + max(channels, inner))
        beside = tokens * channels * WIDE + routed * (3 * INDEX + 2 * WIDE)
        return beside + elements * self.width + self._exchanged(3)

    def _experts_backward(self) -> int:
        """Gradients of the input and of one block's stacks; of a span: rows, gate and up, the activation's gradient."""
        model = self.model
        routed, span = self._spans(self.rows)
        channels, inner = model.hidden_size, model.intermediate_size
        # Several ranks make the gradient of a whole block before they share it.
        is_new = self.accumulates and self.mesh.num_ranks == 1
        stacks = self.block_expert if is_new else 0
        elements = span * (channels + 2 * inner + max(channels, inner)) + stacks
        temporaries = 3 * min(span * 2 * inner, MAX_BLOCK) * WIDE
        beside = self.rows * channels * WIDE + routed * 2 * WIDE + temporaries
        return beside + elements * self.width + self._exchanged(3)

    def _attention_forward(self, tokens: int) -> int:
        return tokens * (3 * self._q + 4 * self._kv) * max(self.width, WIDE)

    def _attention_backward(self) -> int:
        own = int(self.rows * (2.5 * self._q + 2 * self._kv) * max(self.width, WIDE))
        return own + self._exchanged_heads()

    def _log_prob_tiles(self) -> int:
        """Two tiles of logits, in the forward."""
        rows, columns = tile_shape(self.rows, self.model.vocab_size, self.mesh.sequence)
        return 2 * rows * columns * WIDE

    def _log_probs(self) -> int:
        """In the backward the head's new gradient comes beside its sum."""
        tiles = 2 if self.config.algorithm.entropy_weight else 1
        return max(self._log_prob_tiles(), tiles * self._log_prob_tiles() // 2 + self.head * self.width)

    def _at_log_probs(self) -> Items:
        grads = self._gradients(self.model.num_layers)
        return self._kept(self.model.num_layers) | {
            "gradients": grads,
            "log-probs": 5 * self._stream() + self._log_probs(),
            "batch": PER_ROW * self.rows,
        }

    def _at_block(self, layer: int) -> Items:
        """In the backward of block ``layer``: those before it are kept, those behind it are done."""
        kept, how = self._kept(layer + 1), self.config.run.recompute
        again = 0
        if how != "none":
            again += self._kept_experts()["experts"]
        if how in ("block", "around_attention"):
            again += self._kept_attention(layer)["attention"]
        if how == "around_attention":
            again -= self._kept_result(layer)["attention"]  # is there already
        experts = self._kept_experts()["experts"]
        backward = max(self._experts_backward(), self._attention_backward() - experts)
        if again:
            kept["recomputed block"] = again
        if self.mesh.num_ranks > 1:  # as computed, and in float32 to be summed over the ranks
            whole = self.block_dense + self.block_expert // self.mesh.expert
            kept["unshared gradients"] = whole * (self.width + WIDE)
        return kept | {
            "gradients": self._gradients(layer),
            "backward of a block": 2 * self._stream() + backward,
            "batch": PER_ROW * self.rows,
        }

    def _gradients(self, layer: int) -> int:
        """Of blocks from ``layer`` on and of the head; of everything where micro-batches accumulate."""
        ranks, block = self.mesh.num_ranks, self.block_dense + self.block_expert
        done = self.head + (self.model.num_layers - layer) * block
        whole = self.num_dense + self.num_expert
        return -(-(whole if self.accumulates else done) // ranks) * self.stored
