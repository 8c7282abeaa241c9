"""A dense Llama-type checkpoint as a GPT-OSS one: the same function, in the architecture that poise trains.

out = down((up + 1) * gate * sigmoid(alpha * gate)) is Llama's MLP with alpha 1, no limit and an up-bias of -1; equal
experts make the router irrelevant; a sink far below every score takes no attention ("Sparse Upcycling", Komatsuzaki et
al. 2022, arXiv 2212.05055, section 3, on which experts start as copies).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from poise.config import ConfigError
from poise.harmony import HarmonyTokenizer
from poise.harmony.tokens import SPECIAL_TOKENS
from poise.model import GptOss, GptOssConfig, RopeConfig, save_model
from poise.model.checkpoint import Format
from poise.model.config import FULL

# exp(-30) is below float32's resolution beside any score that counts, and unlike minus infinity it survives JSON,
# bfloat16 and an optimizer that wants to move it.
SINK = -30.0
# Beyond every activation: `min(x, limit)` never acts.
NO_LIMIT = 1e6
_ROUTER_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """How a dense model becomes a mixture.

    ``noise``: standard deviation of what is added to each expert's matrices, as a share of that matrix's own; it comes
    in pairs of opposite sign, so that the mean expert is the dense one. ``specials``: harmony's special tokens are
    new ids at the end ("add"), which start as copies of the tokens that played their part, or take over the ids of
    special tokens that the source reserves ("reserved"), whose numbers stay.
    """

    num_experts: int
    experts_per_token: int
    noise: float = 0.0
    specials: Literal["add", "reserved"] = "add"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ConfigError(f"--experts must be at least 1, got {self.num_experts}")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(f"--active must be 1..{self.num_experts} (--experts), got {self.experts_per_token}")
        if not 0 <= self.noise < 1:
            raise ConfigError(f"--noise must be in [0, 1), got {self.noise}")
        if self.noise > 0 and (self.num_experts == self.experts_per_token or self.num_experts % 2):
            raise ConfigError("--noise needs an even number of --experts, and more of them than --active")
        if self.specials not in ("add", "reserved"):
            raise ConfigError(f'--specials must be "add" or "reserved", got {self.specials!r}')


def upcycle(source: Path, out: Path, how: Upcycling, *, format: Format = "fp32") -> GptOss:
    """Reads a Llama-type Hugging Face folder or GGUF file with Transformers, and writes the GPT-OSS checkpoint ``out``.

    Without noise the logits over the source's vocabulary are the source's to rounding. Raises ConfigError for what
    cannot be read or is no Llama, and FileExistsError where ``out`` exists.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: a checkpoint never overwrites another")
    dense, tokenizer = _read(source)
    config = dense.config.to_dict()
    weights = {name: value.float() for name, value in dense.state_dict().items()}
    harmony, origins = with_harmony(tokenizer, config, weights["model.embed_tokens.weight"].shape[0], how.specials)
    model = to_gpt_oss(config, weights, how, origins, stop_ids=tuple(sorted(harmony.stop_ids)), pad_id=harmony.pad)
    save_model(model, out, format, tokenizer=harmony.save)
    return model


def _read(source: Path) -> tuple[Any, Tokenizer]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        if source.suffix == ".gguf":
            import gguf  # noqa: F401  (what Transformers reads such a file with)
    except ImportError as error:
        raise ConfigError(f"poise upcycle needs the extra poise[upcycle]: {error}") from error
    is_file = source.suffix == ".gguf"
    if not (source.is_file() if is_file else (source / "config.json").is_file()):
        raise ConfigError(f"{source} must be a .gguf file or a Hugging Face checkpoint folder with a config.json")
    folder, options = (source.parent, {"gguf_file": source.name}) if is_file else (source, {})
    config = AutoConfig.from_pretrained(folder, **options)
    if config.model_type != "llama":
        raise ConfigError(f"{source} holds a model of type {config.model_type}; poise upcycles type llama")
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return dense, AutoTokenizer.from_pretrained(folder, **options).backend_tokenizer


def with_harmony(
    tokenizer: Tokenizer, config: Mapping[str, Any], num_rows: int, specials: Literal["add", "reserved"]
) -> tuple[HarmonyTokenizer, list[tuple[int, int | None]]]:
    """The tokenizer with harmony's special tokens; and, for each new id, the old id whose rows it starts from.

    Raises ConfigError where too few special tokens are reserved.
    """
    known = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    missing = [name for name in SPECIAL_TOKENS if name not in known]
    if specials == "reserved":
        return HarmonyTokenizer(_renamed(tokenizer, config, known, missing)), []
    begin, end, newline = config["bos_token_id"], _first(config["eos_token_id"]), tokenizer.token_to_id("Ċ")
    # The chat formats of such models end a role with a line break, where harmony goes on with a channel or the message.
    parts = {"<|start|>": begin, "<|channel|>": newline, "<|message|>": newline}
    parts |= {"<|end|>": end, "<|return|>": end, "<|call|>": end}
    # A table may have more rows than the tokenizer has names: new ids begin behind both.
    fillers = [f"<|reserved_{i}|>" for i in range(tokenizer.get_vocab_size(), num_rows)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*fillers, *missing)])
    ids = tokenizer.get_vocab()
    return HarmonyTokenizer(tokenizer), [(ids[name], parts.get(name)) for name in missing]


def _renamed(
    tokenizer: Tokenizer, config: Mapping[str, Any], known: Mapping[str, int], missing: list[str]
) -> Tokenizer:
    used = {config["bos_token_id"], _first(config["eos_token_id"]), config.get("pad_token_id")}
    free = sorted((i, name) for name, i in known.items() if i not in used and name not in SPECIAL_TOKENS)
    if len(free) < len(missing):
        raise ConfigError(
            f"--specials reserved needs {len(missing)} special tokens that nothing uses, the source has {len(free)}: "
            "use --specials add"
        )
    names = {old: new for (_, old), new in zip(free, missing, strict=False)}
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    raw["model"]["vocab"] = {names.get(token, token): i for token, i in raw["model"]["vocab"].items()}
    return Tokenizer.from_str(json.dumps(raw))


def to_gpt_oss(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    how: Upcycling,
    origins: Sequence[tuple[int, int | None]] = (),
    *,
    stop_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
) -> GptOss:
    """The GPT-OSS model that computes what the Llama with this ``config.json`` and this state dict does.

    ``origins``: (new id, id whose rows it copies, or None for the mean row). Raises ConfigError for a rotary scaling
    or an activation that GPT-OSS lacks.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f'the source scales its rotary positions ({rope}); poise upcycles rope_type "default"')
    if config["hidden_act"] != "silu":
        raise ConfigError(f"the source's activation is {config['hidden_act']}; poise upcycles silu")
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    model = GptOss(
        GptOssConfig(
            vocab_size=max([len(embedding), *(new + 1 for new, _ in origins)]),
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            num_experts=how.num_experts,
            experts_per_token=how.experts_per_token,
            layer_types=(FULL,) * config["num_hidden_layers"],
            rope=RopeConfig(kind="default", theta=rope.get("rope_theta") or config["rope_theta"]),
            max_context=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            swiglu_alpha=1.0,
            swiglu_limit=NO_LIMIT,
            eos_token_ids=stop_ids,
            pad_token_id=pad_id,
        )
    )
    generator = torch.Generator().manual_seed(how.seed)
    with torch.no_grad():
        for target, rows in ((model.model.embed_tokens.weight, embedding), (model.lm_head.weight, head)):
            target[:] = rows.mean(dim=0)
            target[: len(rows)] = rows
            for new, old in origins:
                target[new] = rows.mean(dim=0) if old is None else rows[old]
        model.model.norm.weight.copy_(weights["model.norm.weight"])
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            _fill_block(model.model.layers[layer], own, how, generator)
    return model


def _fill_block(block: Any, weights: Mapping[str, Tensor], how: Upcycling, generator: torch.Generator) -> None:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        getattr(block, norm).weight.copy_(weights[f"{norm}.weight"])
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear = getattr(block.self_attn, name)
        linear.weight.copy_(weights[f"self_attn.{name}.weight"])
        linear.bias.copy_(weights.get(f"self_attn.{name}.bias", torch.zeros(())))
    block.self_attn.sinks.fill_(SINK)
    # Equal experts need no router, but a router of zeros would send every token to the same ones for good.
    block.mlp.router.weight.normal_(0, _ROUTER_STD, generator=generator)
    block.mlp.router.bias.zero_()
    experts = block.mlp.experts
    # Linear layers are [out, in], expert stacks [E, in, out], with gate in the even channels and up in the odd ones.
    gate_up = torch.stack([weights["mlp.gate_proj.weight"].T, weights["mlp.up_proj.weight"].T], dim=-1).flatten(-2)
    down = weights["mlp.down_proj.weight"].T
    for stack, matrix in ((experts.gate_up_proj, gate_up), (experts.down_proj, down)):
        stack[:] = matrix
        if how.noise > 0:
            half = torch.empty(how.num_experts // 2, *matrix.shape)
            half.normal_(0, how.noise * matrix.std().item(), generator=generator)
            stack += torch.cat([half, -half])
    none = torch.zeros(down.shape[0])
    gate_bias, up_bias = (weights.get(f"mlp.{name}_proj.bias", none) for name in ("gate", "up"))
    experts.gate_up_proj_bias[:] = torch.stack([gate_bias, up_bias - 1], dim=-1).flatten()
    experts.down_proj_bias[:] = weights.get("mlp.down_proj.bias", torch.zeros(()))


def _first(ids: int | list[int]) -> int:
    return ids if isinstance(ids, int) else ids[0]
