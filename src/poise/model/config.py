"""The shape of a GPT-OSS model, and its reading from and writing to a Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from poise.model.rope import RopeConfig

SLIDING, FULL = "sliding_attention", "full_attention"

# Fields that can only have the value that GPT-OSS implements: anything else would be a different model.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt_oss",),
    "architectures": (["GptOssForCausalLM"], None),
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "tie_word_embeddings": (False,),
    "output_router_logits": (False,),
    "is_encoder_decoder": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "chunk_size_feed_forward": (0,),
}
# Fields that describe a file, a program or another library's habits, and not the function that the model computes.
_WITHOUT_EFFECT = {
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict", "id2label",
    "label2id", "problem_type", "_attn_implementation", "attn_implementation", "quantization_config",
    "_attn_implementation_autoset",
}  # fmt: skip
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
    "truncate", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GptOssConfig:
    """Shape and constants of a model. The defaults are gpt-oss-20b's; sizes are counts of channels, heads, experts.

    ``layer_types``: "sliding_attention" or "full_attention" per layer; empty: even layers slide, odd ones are full.
    ``eos_token_ids``: stop ids, for the generation config of a saved checkpoint. ``router_aux_loss_coef`` only travels
    along: poise adds no balancing loss. ``initializer_range``: standard deviation of new head and router weights.
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_layers: int = 24
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    num_experts: int = 32
    experts_per_token: int = 4
    sliding_window: int = 128
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_context: int = 131072
    rms_norm_eps: float = 1e-5
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True
    initializer_range: float = 0.02
    router_aux_loss_coef: float = 0.9
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "num_experts", "experts_per_token", "sliding_window", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"GptOssConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"GptOssConfig.num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"GptOssConfig.head_dim must be even, got {self.head_dim}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"GptOssConfig.experts_per_token ({self.experts_per_token}) exceeds num_experts ({self.num_experts})"
            )
        if not self.layer_types:
            alternating = tuple(FULL if i % 2 else SLIDING for i in range(self.num_layers))
            object.__setattr__(self, "layer_types", alternating)
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"GptOssConfig.layer_types has {len(self.layer_types)} entries for {self.num_layers} layers"
            )
        for kind in self.layer_types:
            if kind not in (SLIDING, FULL):
                raise ValueError(f"GptOssConfig.layer_types must hold '{SLIDING}' or '{FULL}', got {kind!r}")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None where it sees the whole sequence."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @classmethod
    def from_hf_dict(cls, raw: Mapping[str, Any]) -> "GptOssConfig":
        """Reads a gpt-oss ``config.json``. Raises ValueError naming each field it does not know or cannot honour."""
        fields = dict(raw)
        _refuse_other_models(fields)
        renamed = {name: fields.pop(hf_name) for name, hf_name in _HF_NAMES.items() if hf_name in fields}
        active = fields.pop("experts_per_token", None)
        if active is not None and renamed.setdefault("experts_per_token", active) != active:
            raise ValueError(f"config: experts_per_token ({active}) and num_experts_per_tok differ")
        rope = _read_rope(fields)
        if (context := fields.pop("initial_context_length", None)) not in (None, rope.original_context):
            raise ValueError(
                f"config: initial_context_length ({context}) and rope's original_max_position_embeddings "
                f"({rope.original_context}) differ"
            )
        eos = fields.pop("eos_token_id", None)
        eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        if fields:
            raise ValueError(f"config: poise does not know the fields {', '.join(sorted(fields))}")
        return cls(rope=rope, eos_token_ids=eos_token_ids, **_fill_in_defaults(renamed))

    def to_hf_dict(self) -> dict[str, Any]:
        """The ``config.json`` of this model, readable by Transformers 4.55 and later."""
        rope: dict[str, Any] = {"rope_type": self.rope.kind}
        if self.rope.kind == "yarn":
            rope |= {
                "factor": self.rope.factor,
                "beta_fast": self.rope.beta_fast,
                "beta_slow": self.rope.beta_slow,
                "original_max_position_embeddings": self.rope.original_context,
                "truncate": self.rope.truncate,
            }
        if self.rope.attention_factor is not None:
            rope["attention_factor"] = self.rope.attention_factor
        own = {hf_name: getattr(self, name) for name, hf_name in _HF_NAMES.items()}
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **own,
            "layer_types": list(self.layer_types),
            "experts_per_token": self.experts_per_token,
            "initial_context_length": self.rope.original_context,
            "rope_theta": self.rope.theta,
            "rope_scaling": rope,
            "eos_token_id": list(self.eos_token_ids) or None,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "output_router_logits": False,
            "use_cache": True,
        }


_HF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "sliding_window": "sliding_window",
    "layer_types": "layer_types",
    "max_context": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "swiglu_alpha": "swiglu_alpha",
    "swiglu_limit": "swiglu_limit",
    "attention_bias": "attention_bias",
    "initializer_range": "initializer_range",
    "router_aux_loss_coef": "router_aux_loss_coef",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
}
_NULLABLE = {"layer_types", "sliding_window", "pad_token_id", "bos_token_id"}


def _refuse_other_models(fields: dict[str, Any]) -> None:
    """Takes the fields without effect and those with one possible value out of ``fields``."""
    method = (fields.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ValueError(f"config: quantization_config.quant_method must be 'mxfp4', got {method!r}")
    for name, allowed in _FIXED.items():
        if name in fields and (value := fields.pop(name)) not in allowed:
            raise ValueError(f"config: {name} must be {allowed[0]!r}, got {value!r}")
    for name in _WITHOUT_EFFECT:
        fields.pop(name, None)


def _fill_in_defaults(renamed: dict[str, Any]) -> dict[str, Any]:
    """What a field that is absent or null means to Hugging Face, where that is not this class's default."""
    result = {"num_layers": 36, "num_experts": 128, "router_aux_loss_coef": 0.001, **renamed}
    for name, value in renamed.items():
        if value is None and name not in _NULLABLE:
            raise ValueError(f"config: {_HF_NAMES[name]} must not be null")
    result["layer_types"] = tuple(result.get("layer_types") or ())
    if result.get("sliding_window", 128) is None:
        if not result["layer_types"] or SLIDING in result["layer_types"]:
            raise ValueError("config: sliding_window is null, but layer_types has sliding layers")
        del result["sliding_window"]
    return result


def _read_rope(fields: dict[str, Any]) -> RopeConfig:
    spellings = {name: dict(value) for name in ("rope_scaling", "rope_parameters") if (value := fields.pop(name, None))}
    if len(spellings) == 2 and spellings["rope_scaling"] != spellings["rope_parameters"]:
        raise ValueError("config: rope_scaling and rope_parameters are both given and differ")
    theta = fields.pop("rope_theta", None)
    name, rope = next(iter(spellings.items()), ("rope_parameters", {}))
    if unknown := sorted(set(rope) - _ROPE_KEYS):
        raise ValueError(f"config: poise does not know {', '.join(f'{name}.{key}' for key in unknown)}")
    for key, allowed in (("mscale", None), ("mscale_all_dim", None), ("partial_rotary_factor", 1.0)):
        if rope.get(key, allowed) not in (allowed, None):
            raise ValueError(f"config: {name}.{key} must be {allowed}, got {rope[key]!r}")
    if theta is not None and rope.get("rope_theta", theta) != theta:
        raise ValueError(f"config: rope_theta ({theta}) and {name}.rope_theta ({rope['rope_theta']}) differ")
    theta = rope.get("rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "yarn" if not rope else "default"))
    if kind not in ("yarn", "default"):
        raise ValueError(f"config: {name}.rope_type must be 'yarn' or 'default', got {kind!r}")
    if kind == "yarn" and rope and not {"factor", "original_max_position_embeddings"} <= rope.keys():
        raise ValueError(f"config: {name} of type yarn needs factor and original_max_position_embeddings")
    names = {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "original_max_position_embeddings": "original_context",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    }
    given = {own: rope[key] for key, own in names.items() if rope.get(key) is not None}
    if kind == "yarn" and rope:
        given.setdefault("truncate", True)  # what a missing key means to Transformers
    return RopeConfig(kind=kind, theta=150000.0 if theta is None else theta, **given)
