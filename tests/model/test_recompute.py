"""Recomputing in the backward pass: the same gradients, fewer bytes kept, and never another route."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poise.model import GptOss, GptOssConfig, packed_attend
from poise.ops.remembered import _Replaying

HOW = ("none", "experts", "around_attention", "block")
T, D, H, K, C, E, A, F = 48, 24, 4, 2, 8, 6, 2, 20


def make_model(num_layers=3, **changes):
    config = GptOssConfig(
        **{
            "vocab_size": 40,
            "hidden_size": D,
            "intermediate_size": F,
            "num_layers": num_layers,
            "num_heads": H,
            "num_kv_heads": K,
            "head_dim": C,
            "num_experts": E,
            "experts_per_token": A,
            "sliding_window": 7,
            **changes,
        }
    )
    model = GptOss(config).init_weights(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
    return model


def forward(model, recompute, route=None, kernel="auto"):
    input_ids = torch.randint(0, 40, (T,), generator=torch.Generator().manual_seed(3))
    position_ids = torch.cat((torch.arange(30), torch.arange(18)))
    attend = packed_attend(torch.tensor([0, 30, 48], dtype=torch.int32), kernel)
    return model(input_ids, position_ids, attend, route, recompute=recompute)


def loss_of(hidden):
    """Not the sum of squares: the final norm makes that a constant."""
    return (hidden * torch.linspace(-1, 1, D, dtype=hidden.dtype)).sum()


def gradients(model, recompute, kernel="auto"):
    model.zero_grad()
    loss_of(forward(model, recompute, kernel=kernel)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", HOW[1:])
def test_gradients_are_the_same_to_the_bit(recompute):
    model = make_model()
    expected, actual = gradients(model, "none"), gradients(model, recompute)
    assert expected.keys() == actual.keys() == {n for n, _ in model.named_parameters()} - {"lm_head.weight"}
    for name, gradient in expected.items():
        assert gradient.equal(actual[name]), name


def test_hidden_states_are_the_same_and_nothing_is_kept_without_a_gradient():
    model = make_model()
    expected = forward(model, "none")
    for recompute in HOW[1:]:
        assert forward(model, recompute).equal(expected)
        with torch.no_grad():
            assert forward(model, recompute).equal(expected)


def bytes_kept(model, recompute):
    """By the storages that the graph saves and that kernels are to be handed again, parameters not counted."""
    gc.collect()  # what other passes have left
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x.detach()  # x itself would hold the graph that is to hold it

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = forward(model, recompute)
    for replaying in (x for x in gc.get_objects() if type(x) is _Replaying):
        for results in replaying._results:
            for x in results:
                keep(x)
    return sum(kept.values()), hidden


def test_fewer_bytes_are_kept():
    two, three = make_model(2), make_model(3)
    per_block = {how: bytes_kept(three, how)[0] - bytes_kept(two, how)[0] for how in HOW}
    # A recomputed block keeps its input [T, D] alone. What is kept outside of every block is the same in all three.
    assert per_block["block"] == 4 * T * D
    # "around_attention" keeps, besides, the attention's result [T, H, C] and its lse [H, T]; the third layer slides, in
    # blocks of 32 rows, so that T is 64 there.
    assert per_block["around_attention"] == 4 * (T * D + 64 * (H * C + H))
    # "experts" keeps in its place what attention needs, at least: the block's input, q and the attention's result
    # [T, H, C], k and v [T, K, C], and the input of the experts' half, [T, D].
    assert per_block["experts"] >= 4 * T * (2 * D + 2 * H * C + 2 * K * C)
    # Without recomputation the experts keep, besides, their own input and what follows from it.
    assert per_block["none"] >= per_block["experts"] + 4 * T * D
    assert per_block["block"] < per_block["around_attention"] < per_block["experts"] < per_block["none"]


class KernelRuns(TorchDispatchMode):
    """Counts the forward passes of torch's CPU attention kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("experts", 1), ("around_attention", 1), ("block", 2)])
def test_how_often_the_attention_kernel_runs(recompute, runs):
    """Of two layers, one sliding and one full."""
    model = make_model(2)
    with KernelRuns() as kernel:
        loss_of(forward(model, recompute)).backward()
    assert kernel.count == 2 * runs


@pytest.mark.parametrize("recompute", HOW)
def test_backward_twice(recompute):
    """What is kept for a recomputed pass is not used up by it."""
    model = make_model(2)
    loss = loss_of(forward(model, recompute))
    once = torch.autograd.grad(loss, model.model.embed_tokens.weight, retain_graph=True)
    again = torch.autograd.grad(loss, model.model.embed_tokens.weight)
    assert once[0].equal(again[0])


def test_the_reference_attention_remembers_nothing_and_gives_the_same():
    model = make_model()
    expected = gradients(model, "none", "reference")
    for name, gradient in gradients(model, "around_attention", "reference").items():
        assert gradient.equal(expected[name]), name


@pytest.mark.parametrize("recompute", HOW[1:])
def test_the_recomputed_forward_takes_the_route_of_the_first(recompute):
    """The router moves between forward and backward so far that every token would choose other experts."""
    model = make_model(num_layers=1, num_experts=4)
    mlp = model.model.layers[0].mlp
    chosen = []
    mlp.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1].clone()))

    def favour(*experts):
        with torch.no_grad():
            mlp.router.bias.zero_()
            mlp.router.bias[list(experts)] = 100.0

    favour(0, 1)
    hidden = forward(model, recompute)
    favour(2, 3)
    loss_of(hidden).backward()
    first, again = chosen
    assert set(first.flatten().tolist()) == {0, 1}
    assert again.equal(first)
    gradient = mlp.experts.gate_up_proj.grad
    assert gradient[0].any()
    assert gradient[1].any()
    assert not gradient[2:].any()
    # Asked anew, the router does choose the others: the test could fail.
    forward(model, "none")
    assert set(chosen[-1].flatten().tolist()) == {2, 3}


@pytest.mark.parametrize("recompute", HOW[1:])
def test_the_router_learns_through_the_recomputed_weights(recompute):
    """d loss / d router in float64 against a difference quotient, through the replayed route."""
    model = make_model(num_layers=1).double()
    bias = model.model.layers[0].mlp.router.bias
    gradients(model, recompute)
    analytic = bias.grad.clone()
    numeric = torch.zeros_like(bias)
    for e in range(E):
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                bias[e] += sign * 1e-6
                values.append(loss_of(forward(model, "none")))
                bias[e] -= sign * 1e-6
            numeric[e] = (values[0] - values[1]) / 2e-6
    assert numeric.abs().max() > 1e-3
    torch.testing.assert_close(analytic, numeric, rtol=1e-5, atol=1e-6)
