"""The parts by themselves: attention of every head count, experts without tokens, slices of checkpoints."""

import pytest
import torch
from ranks import VOCABULARY, on_ranks, shape, split_model, whole_model

from poise.config import ParallelConfig
from poise.model import GptOss, load_model, packed_attend, save_model
from poise.model.gpt_oss import Experts
from poise.ops.attention import reference_attention
from poise.parallel import (
    ShardedExperts,
    clip_gradient,
    empty_model,
    export_model,
    frozen_copy,
    full_tensors,
    held_part,
    init_parts,
    load_parts,
    local_part,
    make_mesh,
    padded_borders,
    rows_of_rank,
    ulysses,
    whole_rows,
)

CPU = torch.device("cpu")


def operands(num_heads, num_kv_heads, num_rows):
    generator = torch.Generator().manual_seed(num_heads * 100 + num_kv_heads)
    q, k, v, grad = (
        torch.randn(num_rows, heads, 4, generator=generator, dtype=torch.float64)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    return q, k, v, torch.linspace(-2, 3, num_heads, dtype=torch.float64), grad


ATTENTIONS = [(4, 4, 57), (4, 2, 57), (8, 1, 57), (12, 3, 60), (4, 2, 3), (4, 4, 1)]


def attention_on_ranks():
    """Outputs and gradients, whole; the sinks' summed over the ranks."""
    mesh = make_mesh(ParallelConfig(sequence_degree=4), CPU)
    results = []
    for num_heads, num_kv_heads, num_rows in ATTENTIONS:
        q, k, v, sinks, grad = operands(num_heads, num_kv_heads, num_rows)
        borders = padded_borders(torch.tensor([0, num_rows // 3, num_rows], dtype=torch.int32), num_rows, mesh)
        attend = ulysses(packed_attend(borders, "reference"), mesh)
        mine = [rows_of_rank(x, mesh).requires_grad_() for x in (q, k, v)]
        sinks = sinks.requires_grad_()
        out = attend(0, *mine, sinks, 7)
        grads = torch.autograd.grad(out, (*mine, sinks), rows_of_rank(grad, mesh))
        torch.distributed.all_reduce(grads[3])
        whole = [whole_rows(x, num_rows, mesh) for x in (out, *grads[:3])]
        results.append([*whole, grads[3]])
    return results


def test_attention_is_that_of_one_process():
    results = on_ranks(4, attention_on_ranks)
    for number, (num_heads, num_kv_heads, num_rows) in enumerate(ATTENTIONS):
        q, k, v, sinks, grad = operands(num_heads, num_kv_heads, num_rows)
        leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
        out = reference_attention(*leaves, (0, num_rows // 3, num_rows), 7, 0.5)
        expected = [out, *torch.autograd.grad(out, leaves, grad)]
        for rank in range(4):
            for ours, theirs in zip(results[rank][number], expected, strict=True):
                torch.testing.assert_close(torch.as_tensor(ours), theirs.detach(), rtol=1e-10, atol=1e-12)


# Experts of each token of each rank: uneven; all of rank 0's on one rank; rank 1 has one token, ranks 2 and 3 share
# expert 6, and nobody asks for experts 4 and 5, all that rank 2 owns.
ROUTES = [[[0, 1], [1, 0], [0, 1]], [[7, 2]], [[6, 0], [6, 3]], [[6, 1], [3, 6], [2, 7], [1, 6], [0, 6]]]


def expert_operands(rank):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.tensor(ROUTES[rank])
    x, grad = (torch.randn(len(ids), 24, generator=generator) for _ in range(2))
    return x, ids, torch.rand(ids.shape, generator=generator), grad


def filled_experts(experts, first, last):
    generator = torch.Generator().manual_seed(9)
    for parameter in experts.parameters():
        whole = torch.randn((8, *parameter.shape[1:]), generator=generator) * 0.3
        parameter.data.copy_(whole[first:last])
    return experts


def experts_on_ranks():
    mesh = make_mesh(ParallelConfig(expert_degree=4), CPU)
    experts = filled_experts(ShardedExperts(shape(num_experts=8), mesh), 2 * mesh.rank, 2 * mesh.rank + 2)
    x, ids, weights, grad = expert_operands(mesh.rank)
    leaves = [x.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    out = experts(x, ids, weights)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def test_experts_of_ranks_serve_every_token():
    results = on_ranks(4, experts_on_ranks)
    experts = filled_experts(Experts(shape(num_experts=8)), 0, 8)
    parts = [expert_operands(rank) for rank in range(4)]
    x, ids, weights, grad = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    leaves = [x.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    out = experts(x, ids, weights)
    expected = [out, *torch.autograd.grad(out, leaves, grad)]
    for number, value in enumerate(expected):
        ours = torch.cat([torch.as_tensor(result[number]) for result in results])
        torch.testing.assert_close(ours, value.detach(), rtol=1e-5, atol=1e-6)


def weights_on_ranks(degrees, plain, packed, changes):
    """Initialized, loaded plain and packed, copied; the norm of a gradient that is known."""
    mesh = make_mesh(ParallelConfig(**{f"{name}_degree": value for name, value in degrees.items()}), CPU)
    model = empty_model(shape(**changes), mesh)
    found = {}
    init_parts(model, 5, mesh)
    found["init"] = dict(full_tensors(model, mesh, torch.float32))
    load_parts(model, plain, mesh)
    found["plain"] = dict(full_tensors(model, mesh, torch.float32))
    for format in ("fp32", "mxfp4"):
        export_model(model, plain.parent / f"exported_{format}", mesh, format)
    found["copy"] = dict(full_tensors(frozen_copy(model, mesh), mesh, torch.bfloat16))
    found["copy"] = {name: value.float() for name, value in found["copy"].items()}
    load_parts(model, packed, mesh)
    found["packed"] = dict(full_tensors(model, mesh, torch.float32))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    found["norm"] = clip_gradient(model, 0.5, mesh)
    found["clipped"] = [local_part(p.grad).unique().tolist() for p in model.parameters()]
    found["held"] = sum(local_part(p).numel() for p in model.parameters())
    found["slices"] = {n: held_part(n, p, mesh).slices for n, p in model.named_parameters()}
    return found


CHANGES = {"hidden_size": 64, "intermediate_size": 32}  # MXFP4 packs 32 rows together


@pytest.mark.parametrize(
    ("degrees", "num_ranks", "num_experts"),
    [({}, 3, 4), ({"expert": 2}, 4, 4), ({"expert": 2, "sequence": 2}, 4, 2), ({"data": 4}, 4, 2)],
    ids=["data 3", "data 2 x expert 2", "slices of an expert", "slices of experts"],
)
def test_each_rank_fills_its_part(tmp_path, degrees, num_ranks, num_experts):
    changes = CHANGES | {"num_experts": num_experts}
    model = whole_model(**changes)
    save_model(model, tmp_path / "plain", format="fp32")
    save_model(model, tmp_path / "packed", format="mxfp4")
    expected = {
        "init": GptOss(shape(**changes)).init_weights(5),
        "plain": model,
        "packed": load_model(tmp_path / "packed"),
        "copy": load_model(tmp_path / "plain", dtype=torch.bfloat16),
    }
    num_parameters = sum(p.numel() for p in model.parameters())
    results = on_ranks(num_ranks, weights_on_ranks, degrees, tmp_path / "plain", tmp_path / "packed", changes)
    for found in results:
        for name, whole in expected.items():
            for key, value in whole.named_parameters():
                assert (torch.as_tensor(found[name][key]) == value.detach().float()).all(), f"{name}: {key}"
        # A gradient of ones has the norm sqrt(n), and is scaled by 0.5 / (norm + 1e-6).
        assert found["norm"] == pytest.approx(num_parameters**0.5, rel=1e-6)
        for values in found["clipped"]:
            assert values == pytest.approx([0.5 / num_parameters**0.5] * len(values))
    for exported, original in (("exported_fp32", "plain"), ("exported_mxfp4", "packed")):
        ours, theirs = load_model(tmp_path / exported), load_model(tmp_path / original)
        for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(value, other), f"{exported}: {name}"
    held = [found["held"] for found in results]
    assert sum(held) == num_parameters, "each number lives on one rank"
    assert max(held) < 1.5 * num_parameters / num_ranks
    assert results[0]["slices"]["lm_head.weight"][0] == slice(0, -(-VOCABULARY // num_ranks))


def test_a_copy_takes_no_gradient():
    assert on_ranks(2, copy_is_frozen) == [True, True]


def copy_is_frozen():
    mesh = make_mesh(ParallelConfig(), CPU)
    return not any(p.requires_grad for p in frozen_copy(split_model(mesh), mesh).parameters())
