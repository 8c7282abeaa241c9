"""Which parameters a server kept: its log-probs against those of the trainer with older parameters put back."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from poise.model import GptOss
from poise.parallel import ALONE, Mesh, fill_part, full_tensor, local_part, put_away

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
    mesh: Mesh = ALONE,
) -> Diagnosis:
    """Puts older values into ``model``, group after group, and sees with which ``score()`` comes nearest to ``theirs``.

    First what is known to happen: all experts, all sinks, both (vLLM's ``reload_weights``), everything, the first or
    the last layers (an update that broke off), gate and up swapped; then any set of groups, the one that helps most
    first. The model is as before afterwards, to the bit. Takes a few forward passes per layer. On a mesh all ranks call
    it, and ``score()`` gives all of them the same numbers.
    """

    def distance(hypotheses: Iterable[_Hypothesis]) -> float:
        with put_back(model, hypotheses, mesh):
            mine = score()
        differences = torch.cat([(a - b).abs() for a, b in zip(theirs, mine, strict=True)])
        return float(differences.mean())

    def is_arithmetic(value: float) -> bool:
        return value <= tolerance

    before = distance([])
    known = [(distance([h]), index, h) for index, h in enumerate(_known(model, older, mesh))]
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


def _known(model: GptOss, older: Mapping[str, Older], mesh: Mesh) -> Iterator[_Hypothesis]:
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
    current = _whole_parameters(model, mesh)
    gate_up = {layer: [n for n in groups[f"experts of layer {layer}"] if "gate_up" in n] for layer in layers}
    swaps = {"every layer": list(itertools.chain(*gate_up.values()))} | {f"layer {i}": n for i, n in gate_up.items()}
    for which, names in swaps.items():
        label = f"the experts of {which}"
        yield _Hypothesis(label, f"with {_SWAPPED}", frozenset(names), lambda name: swapped(current(name)))


def swapped(gate_up: Tensor) -> Tensor:
    """Gate and up, which alternate in the last dimension, in each other's place."""
    return gate_up.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def replacement(model: GptOss, change: Callable[[str, Tensor], Tensor], mesh: Mesh = ALONE) -> _Hypothesis:
    """For ``put_back``: every parameter as ``change(name, parameter)``, which is given it whole."""
    current = _whole_parameters(model, mesh)
    names = frozenset(name for name, _ in model.named_parameters())
    return _Hypothesis("", "", names, lambda name: change(name, current(name)))


def _whole_parameters(model: GptOss, mesh: Mesh) -> Older:
    """Each parameter as it is now, by its name; ranks that hold parts of it gather it, when it is asked for."""
    put_away(model)
    parameters = dict(model.named_parameters())
    return lambda name: full_tensor(name, parameters[name].detach(), mesh, parameters[name].dtype)


@contextmanager
def put_back(model: GptOss, hypotheses: Iterable[_Hypothesis], mesh: Mesh = ALONE) -> Iterator[None]:
    """The model with the older values; afterwards it is as it was, to the bit. A rank holds its own parts of both."""
    put_away(model)
    parameters = dict(model.named_parameters())
    kept: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for hypothesis in hypotheses:
                for name in sorted(hypothesis.names):  # on all ranks in the same order
                    kept.setdefault(name, local_part(parameters[name].detach()).clone())
                    fill_part(name, parameters[name], hypothesis.value(name), mesh)
        yield
    finally:
        put_away(model)
        with torch.no_grad():
            for name, value in kept.items():
                local_part(parameters[name]).copy_(value)


def _result(chosen: Sequence[_Hypothesis], before: float, after: float, *, explained: bool) -> Diagnosis:
    return Diagnosis(
        groups=tuple(h.label for h in chosen),
        source=chosen[0].source if chosen else "",
        before=before,
        after=after,
        explained=explained,
    )
