"""Hugging Face checkpoint folders: sharded safetensors with an index, in bf16, fp32 or MXFP4."""

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from poise.model.config import GptOssConfig
from poise.model.gpt_oss import GptOss
from poise.model.packed import empty_packed_model, pack_into, packed_stacks, put
from poise.ops import mxfp4

Format = Literal["bf16", "fp32", "mxfp4"]
ExpertStorage = Literal["plain", "mxfp4"]
# A folder to copy the tokenizer's files from, or a function that writes them into the folder it is given.
Tokenizer = str | Path | Callable[[Path], object]

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
STOP_TOKENS = ("<|return|>", "<|call|>")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
_PACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NOT_PACKED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


class CheckpointError(ValueError):
    """A folder that is no complete gpt-oss checkpoint. The message names the file, field or tensor."""


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    experts: ExpertStorage = "plain",
) -> GptOss:
    """The model in a Hugging Face checkpoint folder, every parameter as ``dtype`` on ``device``.

    Expert matrices may be plain or MXFP4 (``*_blocks``, ``*_scales``) in the folder, and, by ``experts``, in the model:
    with "mxfp4" they are frozen buffers that every use unpacks expert by expert, as the folder holds them, or packed
    to the nearest values where it holds plain ones. Tensors are read one by one into their place, so the peak is the
    model and one tensor (of MXFP4, one expert). Names and shapes are checked before anything is read; raises
    CheckpointError naming each tensor that is missing, unexpected or misshaped, and each field of config.json that
    cannot be honoured, and ValueError for an unknown ``experts`` or sizes that MXFP4 cannot hold.
    """
    if experts not in ("plain", "mxfp4"):
        raise ValueError(f"experts must be 'plain' or 'mxfp4', got {experts!r}")
    folder = Path(path)
    config = _read_config(folder)
    with torch.device("meta"):
        model = GptOss(config)
    with _Shards(folder) as shards:
        _check_tensors(model, shards, folder)
        if experts == "mxfp4":
            model = empty_packed_model(config)
        for name, parameter in list(model.named_parameters()):
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            _read_into(value, name, tuple(slice(0, size) for size in value.shape), shards)
            put(model, name, nn.Parameter(value))
        for name, stack in list(packed_stacks(model)):
            blocks, scales = (torch.empty_like(x, device=device) for x in (stack.blocks, stack.scales))
            _read_packed_into(blocks, scales, name, shards)
            for packed_name, buffer in zip(_packed_names(name), (blocks, scales), strict=True):
                put(model, packed_name, buffer)
    return model


def read_config(path: str | Path) -> GptOssConfig:
    """The configuration in a checkpoint folder. Raises CheckpointError for one that is missing or unknown."""
    return _read_config(Path(path))


def read_parts(path: str | Path, parts: Iterable[tuple[str, tuple[slice, ...], Tensor]]) -> None:
    """Fills each ``out`` of (name, slices, out) with that part of the parameter ``name``, and reads nothing else.

    Of MXFP4 one expert's part is unpacked at a time. Checks and raises as ``load_model`` does.
    """
    folder = Path(path)
    with torch.device("meta"):
        model = GptOss(_read_config(folder))
    with _Shards(folder) as shards:
        _check_tensors(model, shards, folder)
        for name, slices, out in parts:
            _read_into(out, name, slices, shards)


def save_model(
    model: GptOss,
    path: str | Path,
    format: Format = "bf16",
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Writes a new folder ``path`` that Transformers loads: weights, config, generation config, tokenizer files.

    ``format``: type of the stored tensors; "mxfp4" packs the expert matrices (to the nearest value, see
    ``poise.ops.mxfp4.pack``) and keeps the rest in bf16. ``tokenizer``: a folder whose tokenizer files are copied, or a
    function that writes them. Stop ids of the generation config: ``config.eos_token_ids`` and the ids of
    ``<|return|>`` and ``<|call|>`` in tokenizer.json. The folder is written aside and renamed when whole.
    ``tensors``: (name, whole tensor) of each parameter, drawn one at a time, where ``model`` holds only parts of them.
    Raises FileExistsError where ``path`` exists, ValueError for an unknown format or sizes that MXFP4 cannot hold.
    """
    target = Path(path)
    if format not in ("bf16", "fp32", "mxfp4"):
        raise ValueError(f"format must be 'bf16', 'fp32' or 'mxfp4', got {format!r}")
    if target.exists():
        raise FileExistsError(f"{target} exists: a checkpoint never overwrites another")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    aside.mkdir()
    try:
        _write_tokenizer(tokenizer, aside)
        write_configs(model.config, format, aside)
        _write_shards(_stored_tensors(model, format, tensors), max_shard_bytes, aside)
        aside.rename(target)
    finally:
        if aside.exists():
            shutil.rmtree(aside)


# --- reading ---


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object")
    return value


def _read_config(folder: Path) -> GptOssConfig:
    try:
        config = GptOssConfig.from_hf_dict(_read_json(folder / "config.json"))
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{folder}: {error}") from error
    if (folder / "generation_config.json").is_file():
        stop_ids = _read_json(folder / "generation_config.json").get("eos_token_id")
        if stop_ids is not None:
            config = replace(config, eos_token_ids=(stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids))
    return config


class _Shards:
    """The open safetensors files of a folder: which file holds which tensor."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._handles: dict[str, Any] = {}
        if (folder / INDEX_FILE).is_file():
            weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map")
            files = sorted(set(weight_map.values()))
        else:
            weight_map, files = None, [SINGLE_FILE]
        for file in files:
            self._open(folder / file)
        if weight_map is not None and (absent := sorted(set(weight_map) - set(self._handles))):
            raise CheckpointError(f"{folder}: the index promises {_some(absent)}, which no shard holds")

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except Exception as error:  # safetensors raises its own type for a file that is cut or garbled
            raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
        for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
            if name in self._handles:
                raise CheckpointError(f"{path}: {name} is also in another shard")
            self._handles[name] = handle

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._handles)

    def slice(self, name: str) -> Any:
        """A lazy tensor: indexing reads."""
        return self._handles[name].get_slice(name)


def _packed_names(name: str) -> tuple[str, str]:
    return f"{name}_blocks", f"{name}_scales"


def _check_tensors(model: GptOss, shards: _Shards, folder: Path) -> None:
    expected: dict[str, tuple[tuple[int, ...], set[str]]] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith(_PACKED) and shards.names & set(_packed_names(name)):
            experts, rows, columns = shape
            if rows % mxfp4.BLOCK:
                raise CheckpointError(f"{folder}: {name} has {rows} rows, MXFP4 needs a multiple of {mxfp4.BLOCK}")
            blocks, scales = _packed_names(name)
            groups = (experts, columns, rows // mxfp4.BLOCK)
            expected[blocks] = ((*groups, mxfp4.BLOCK // 2), {"U8"})
            expected[scales] = (groups, {"U8"})
        else:
            expected[name] = (shape, _FLOATS)
    problems = []
    if missing := sorted(set(expected) - shards.names):
        problems.append(f"missing {_some(missing)}")
    if unexpected := sorted(shards.names - set(expected)):
        problems.append(f"unexpected {_some(unexpected)}")
    for name in sorted(shards.names & set(expected)):
        stored, (shape, dtypes) = shards.slice(name), expected[name]
        if tuple(stored.get_shape()) != shape:
            problems.append(f"{name} is {list(stored.get_shape())}, config.json asks for {list(shape)}")
        if stored.get_dtype() not in dtypes:
            problems.append(f"{name} is {stored.get_dtype()}, expected {' or '.join(sorted(dtypes))}")
    if problems:
        raise CheckpointError(f"{folder}: {_some(problems, '; ')}")


def _read_into(out: Tensor, name: str, slices: tuple[slice, ...], shards: _Shards) -> None:
    if out.numel() == 0:  # of a parameter with fewer rows than ranks
        return
    blocks_name, scales_name = _packed_names(name)
    if blocks_name not in shards.names:
        out.copy_(shards.slice(name)[slices])
        return
    blocks, scales = shards.slice(blocks_name), shards.slice(scales_name)
    experts, rows, columns = slices
    groups = slice(rows.start // mxfp4.BLOCK, -(-rows.stop // mxfp4.BLOCK))
    inside = slice(rows.start - groups.start * mxfp4.BLOCK, rows.stop - groups.start * mxfp4.BLOCK)
    for place, expert in enumerate(range(experts.start, experts.stop)):
        block, scale = (part[expert, columns, groups].to(out.device) for part in (blocks, scales))
        out[place].copy_(mxfp4.unpack(block, scale, out.dtype)[:, inside].transpose(0, 1))


def _read_packed_into(blocks: Tensor, scales: Tensor, name: str, shards: _Shards) -> None:
    is_packed = _packed_names(name)[0] in shards.names
    stored = [shards.slice(n) for n in (_packed_names(name) if is_packed else (name,))]
    for expert in range(len(blocks)):
        if is_packed:
            blocks[expert].copy_(stored[0][expert])
            scales[expert].copy_(stored[1][expert])
        else:
            pack_into(blocks[expert], scales[expert], stored[0][expert].to(blocks.device))


def _some(items: list[str], separator: str = ", ") -> str:
    shown = separator.join(items[:5])
    return shown if len(items) <= 5 else f"{shown}{separator}and {len(items) - 5} more"


# --- writing ---


def _stored_tensors(
    model: GptOss, format: Format, tensors: Iterable[tuple[str, Tensor]] | None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors as they are stored, on the CPU, one parameter at a time."""
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    for name, parameter in model.named_parameters() if tensors is None else tensors:
        value = parameter.detach()
        if format == "mxfp4" and name.endswith(_PACKED):
            if value.shape[1] % mxfp4.BLOCK:
                rows = f"{name} has {value.shape[1]} rows"
                raise ValueError(f"format 'mxfp4' needs a multiple of {mxfp4.BLOCK} rows per expert; {rows}")
            packed = [mxfp4.pack(expert.transpose(0, 1)) for expert in value]
            for packed_name, parts in zip(_packed_names(name), zip(*packed, strict=True), strict=True):
                yield packed_name, torch.stack(parts).cpu()
        else:
            yield name, value.to("cpu", dtype).contiguous()
        del parameter, value  # not kept while the next is gathered
    for name, stack in packed_stacks(model):
        if format == "mxfp4":
            yield from zip(_packed_names(name), (stack.blocks.cpu(), stack.scales.cpu()), strict=True)
        else:
            yield name, torch.stack([stack.matrix(expert, dtype).cpu() for expert in range(len(stack.blocks))])


def _write_shards(tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int, folder: Path) -> None:
    weight_map: dict[str, str] = {}
    total, num_shards = 0, 0
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        nonlocal num_shards, shard
        num_shards += 1
        file = f"model-{num_shards:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard = {}

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        shard[name] = tensor
        total += tensor.nbytes
        del tensor  # what is written is gone before the next is drawn, which may mean that ranks gather it
        if sum(t.nbytes for t in shard.values()) >= max_shard_bytes:
            flush()
    if shard or not num_shards:
        flush()
    if num_shards == 1:
        (folder / "model-00001.safetensors").rename(folder / SINGLE_FILE)
        return
    # The usual names tell the number of shards, which is known only now.
    for number in range(1, num_shards + 1):
        (folder / f"model-{number:05d}.safetensors").rename(folder / _shard_file(number, num_shards))
    named = {name: _shard_file(int(file[6:11]), num_shards) for name, file in weight_map.items()}
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": dict(sorted(named.items()))})


def _shard_file(number: int, num_shards: int) -> str:
    return f"model-{number:05d}-of-{num_shards:05d}.safetensors"


def write_configs(config: GptOssConfig, format: Format, folder: Path) -> None:
    stop_ids = tuple(dict.fromkeys((*config.eos_token_ids, *_harmony_stop_ids(folder))))
    fields = replace(config, eos_token_ids=stop_ids).to_hf_dict()
    fields["dtype"] = "float32" if format == "fp32" else "bfloat16"
    if format == "mxfp4":
        fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_PACKED}
    _write_json(folder / "config.json", fields)
    generation = {
        "do_sample": True,
        "eos_token_id": list(stop_ids) or None,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
    }
    _write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})


def _harmony_stop_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end an assistant's action, as the tokenizer.json in ``folder`` numbers them; none without one."""
    if not (folder / "tokenizer.json").is_file():
        return ()
    added = _read_json(folder / "tokenizer.json").get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in added}
    if absent := [token for token in STOP_TOKENS if token not in ids]:
        raise CheckpointError(f"tokenizer.json has no {_some(absent)}: the policy could not end an action")
    return tuple(ids[token] for token in STOP_TOKENS)


def _write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    if tokenizer is None:
        return
    if callable(tokenizer):
        tokenizer(folder)
        return
    source = Path(tokenizer)
    if not (source / "tokenizer.json").is_file():
        raise CheckpointError(f"{source / 'tokenizer.json'} is missing")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
