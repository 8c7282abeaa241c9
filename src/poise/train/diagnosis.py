"""Which parameters a server kept: its log-probs against those of the trainer with older parameters put back."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from poise.model import GptOss

# The older value of a parameter, by its name, in any type and on any device.
Older = Callable[[str], Tensor]
Scores = Sequence[Tensor]

MAX_GROUPS = 8
# A further group is only believed where it takes away this share of the difference that is left.
MIN_GAIN = 0.2
_SWAPPED = "gate and up swapped"
_PARTS = {
    "self_attn.sinks": "sinks",
    "self_attn.": "attention",
    "mlp.router.": "router",
    "mlp.experts.": "experts",
    "input_layernorm.": "norms",
    "post_attention_layernorm.": "norms",
}
_ENDS = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final norm", "lm_head.weight": "head"}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """``groups``: what looks stale, as "experts of layer 3"; empty where nothing explains the difference.

    ``source``: where the older values come from. ``before`` and ``after``: the mean difference of log-probs, nats, from
    the trainer, and from the trainer with those groups put back; ``explained``: ``after`` is arithmetic.
    """

    groups: tuple[str, ...]
    source: str
    before: float
    after: float
    explained: bool

    def sentence(self) -> str:
        if not self.groups:
            return "no older parameters explain it: another model, other settings, or another temperature"
        what = f"{' and '.join(self.groups)}, {self.source}"
        numbers = f"the mean difference falls from {self.before:.3g} to {self.after:.3g} nats"
        return f"it has {what}: {numbers}" if self.explained else f"most like {what}: {numbers}, which is not all"


@dataclass(frozen=True)
class _Hypothesis:
    label: str
    source: str
    names: frozenset[str]
    value: Older


def parameter_groups(model: GptOss) -> dict[str, list[str]]:
    """The names of the parameters, by "embedding", "experts of layer 0", ... in the order of the model."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if name in _ENDS:
            label = _ENDS[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            label = f"{next(part for start, part in _PARTS.items() if rest.startswith(start))} of layer {layer}"
        groups.setdefault(label, []).append(name)
    return groups


def diagnose(
    model: GptOss,
    score: Callable[[], Scores],
    theirs: Scores,
    *,
    older: Mapping[str, Older],
    tolerance: float,
) -> Diagnosis:
    """Puts older values into ``model``, group after group, and sees with which ``score()`` comes nearest to ``theirs``.

    First what is known to happen: all experts, all sinks, both (vLLM's ``reload_weights``), everything, the first or
    the last layers (an update that broke off), gate and up swapped; then any set of groups, the one that helps most
    first. The model is as before afterwards, to the bit. Takes a few forward passes per layer.
    """

    def distance(hypotheses: Iterable[_Hypothesis]) -> float:
        with put_back(model, hypotheses):
            mine = score()
        differences = torch.cat([(a - b).abs() for a, b in zip(theirs, mine, strict=True)])
        return float(differences.mean())

    def is_arithmetic(value: float) -> bool:
        return value <= tolerance

    before = distance([])
    known = [(distance([h]), index, h) for index, h in enumerate(_known(model, older))]
    best = min(known, default=None)
    if best is not None and is_arithmetic(best[0]) and best[0] <= (1 - MIN_GAIN) * before:
        return _result([best[2]], before, best[0], explained=True)
    chosen, after = _greedy(model, distance, older, before, is_arithmetic)
    if best is not None and best[0] <= after:
        chosen, after = [best[2]], best[0]
    if after > (1 - MIN_GAIN) * before:
        chosen, after = [], before
    return _result(chosen, before, after, explained=is_arithmetic(after))


def _greedy(
    model: GptOss,
    distance: Callable[[Iterable[_Hypothesis]], float],
    older: Mapping[str, Older],
    before: float,
    is_arithmetic: Callable[[float], bool],
) -> tuple[list[_Hypothesis], float]:
    best: tuple[list[_Hypothesis], float] = ([], before)
    for source, value in older.items():
        chosen, after = list[_Hypothesis](), before
        groups = parameter_groups(model)
        left = {label: _Hypothesis(f"the {label}", source, frozenset(g), value) for label, g in groups.items()}
        while left and len(chosen) < MAX_GROUPS and not is_arithmetic(after):
            distances = {label: distance([*chosen, hypothesis]) for label, hypothesis in left.items()}
            label = min(distances, key=lambda name: distances[name])
            if distances[label] > (1 - MIN_GAIN) * after:
                break
            after = distances[label]
            chosen.append(left.pop(label))
        if after < best[1]:
            best = (chosen, after)
    return best


def _known(model: GptOss, older: Mapping[str, Older]) -> Iterator[_Hypothesis]:
    """Simple explanations before those that contain them: of two that explain the same, the first is taken."""
    groups = parameter_groups(model)
    layers = range(model.config.num_layers)

    def every(*parts: str) -> frozenset[str]:
        return frozenset(name for part in parts for layer in layers for name in groups[f"{part} of layer {layer}"])

    for source, value in older.items():
        for label, names in groups.items():
            yield _Hypothesis(f"the {label}", source, frozenset(names), value)
        yield _Hypothesis("the sinks of every layer", source, every("sinks"), value)
        yield _Hypothesis("the experts of every layer", source, every("experts"), value)
        yield _Hypothesis("the experts and the sinks of every layer", source, every("experts", "sinks"), value)
        order = [name for names in groups.values() for name in names]
        for layer in layers[1:]:
            border = next(i for i, name in enumerate(order) if name.startswith(f"model.layers.{layer}."))
            yield _Hypothesis(f"everything from layer {layer} on", source, frozenset(order[border:]), value)
            yield _Hypothesis(f"everything before layer {layer}", source, frozenset(order[:border]), value)
        yield _Hypothesis("every parameter", source, frozenset(order), value)
    current = dict(model.named_parameters())
    gate_up = {layer: [n for n in groups[f"experts of layer {layer}"] if "gate_up" in n] for layer in layers}
    swaps = {"every layer": list(itertools.chain(*gate_up.values()))} | {f"layer {i}": n for i, n in gate_up.items()}
    for which, names in swaps.items():
        label = f"the experts of {which}"
        yield _Hypothesis(label, f"with {_SWAPPED}", frozenset(names), lambda name: swapped(current[name].detach()))


def swapped(gate_up: Tensor) -> Tensor:
    """Gate and up, which alternate in the last dimension, in each other's place."""
    return gate_up.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def replacement(model: GptOss, change: Callable[[str, Tensor], Tensor]) -> _Hypothesis:
    """For ``put_back``: every parameter as ``change(name, parameter)``."""
    current = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return _Hypothesis("", "", frozenset(current), lambda name: change(name, current[name]))


@contextmanager
def put_back(model: GptOss, hypotheses: Iterable[_Hypothesis]) -> Iterator[None]:
    """The model with the older values; afterwards it is as it was, to the bit."""
    parameters = dict(model.named_parameters())
    kept: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for hypothesis in hypotheses:
                for name in hypothesis.names:
                    kept.setdefault(name, parameters[name].detach().clone())
                    parameters[name].copy_(hypothesis.value(name))
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                parameters[name].copy_(value)


def _result(chosen: Sequence[_Hypothesis], before: float, after: float, *, explained: bool) -> Diagnosis:
    return Diagnosis(
        groups=tuple(h.label for h in chosen),
        source=chosen[0].source if chosen else "",
        before=before,
        after=after,
        explained=explained,
    )
