"""The plan of a run's memory: against counts by hand, and against what torch's allocator handed out."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poise.cli import run
from poise.config import AlgorithmConfig, Config, ConfigError, CriticConfig, ModelConfig, RolloutConfig, RunConfig
from poise.model import GptOssConfig
from poise.plan import Mesh, advice, advice_with_gpus, largest_context, largest_microbatch, make_plan, require_memory
from poise.planning import Machine, parse_bytes

# One sliding layer (window 4) and one full layer.
MODEL = GptOssConfig(
    vocab_size=10,
    hidden_size=6,
    intermediate_size=5,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    num_experts=3,
    experts_per_token=1,
    sliding_window=4,
)
# Embedding and head 2 * 60, norm 6; a layer: q 56, k and v 2 * 28, o 54, sinks 2, norms 12, router 21,
# gate and up 3 * (60 + 10), down 3 * (30 + 6).
PARAMETERS = 120 + 6 + 2 * (56 + 56 + 54 + 2 + 12 + 21 + 210 + 108)
GIB = 2**30


def config(*, dtype="float32", recompute="none", num_slots=3, context=100, **algorithm):
    return Config(
        model=ModelConfig(dtype=dtype, sliding_window=4),
        rollout=RolloutConfig(num_slots=num_slots, max_context_tokens=context, max_action_tokens=10),
        algorithm=AlgorithmConfig(**algorithm),
        run=RunConfig(recompute=recompute),
    )


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parent.parent / "benchmarks" / "plan.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_plan", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["tiny, around attention", "tiny, copy for old log-probs", "large vocabulary"])
def test_the_peak_is_what_the_allocator_hands_out(benchmark, name):
    model_config, run_config = benchmark.CASES[name]
    plan = make_plan(model_config, run_config)
    measured = benchmark.measured_peaks(model_config, run_config)
    assert plan.peak == pytest.approx(max(measured.values()), rel=0.1)
    for phase, items in plan.phases.items():
        assert sum(items.values()) == pytest.approx(measured[phase], rel=0.1), phase


def test_what_is_held_by_hand():
    training = make_plan(MODEL, config()).phases["training"]
    assert training["parameters"] == training["gradients"] == 4 * PARAMETERS
    assert training["optimizer"] == 8 * PARAMETERS
    # 3 slots x ((4 + 100) rows x keys and values x 1 head x 4 channels x 4 bytes
    #            + 100 routes x 2 layers x 1 expert x 2 bytes)
    assert training["engine cache"] == 3 * (104 * 2 * 4 * 4 + 400)
    assert "reference" not in training
    assert make_plan(MODEL, config(kl_weight=0.1)).phases["training"]["reference"] == 4 * PARAMETERS
    assert make_plan(MODEL, config(dtype="bfloat16")).phases["training"]["parameters"] == 2 * PARAMETERS
    evaluation = make_plan(MODEL, config(), trains=False).phases
    assert evaluation.keys() == {"rollout"}
    assert not {"gradients", "optimizer"} & evaluation["rollout"].keys()


def test_ranks_share_parameters_experts_and_tokens():
    model = GptOssConfig(num_layers=2, vocab_size=1000)
    long = config(context=400)  # 128 episodes of 400 tokens: more than one micro-batch for each of the 2 x 2 places
    alone = make_plan(model, long).phases["training"]
    split = make_plan(model, long, mesh=Mesh(data=2, sequence=2, expert=2)).phases["training"]
    for name in ("parameters", "optimizer", "gradients"):
        assert split[name] == pytest.approx(alone[name] / 8, abs=16)  # a rank's share is whole numbers
    assert split["batch"] == alone["batch"] / 2
    assert split["engine weights"] == alone["parameters"]  # whole
    assert "gathered blocks" not in alone
    # Two blocks, in float32. A block: 16 of the 32 experts and what every rank needs. An expert: gate and up
    # 2880 x 5760 + 5760, down 2880 x 2880 + 2880. The rest: q 2880 x 4096 + 4096, k and v 2 x (2880 x 512 + 512),
    # o 4096 x 2880 + 2880, sinks 64, norms 2 x 2880, router 2880 x 32 + 32.
    expert = 2880 * 5760 + 5760 + 2880 * 2880 + 2880
    rest = 2880 * 4096 + 4096 + 2 * (2880 * 512 + 512) + 4096 * 2880 + 2880 + 64 + 2 * 2880 + 2880 * 32 + 32
    assert split["gathered blocks"] == 2 * 4 * (16 * expert + rest)
    # A block's gradient before it is shared: as computed and as summed, both float32 here.
    assert split["unshared gradients"] == 8 * (16 * expert + rest)
    half = make_plan(model, config(context=400, dtype="bfloat16"), mesh=Mesh(data=2, sequence=2, expert=2))
    assert half.phases["training"]["parameters"] == split["parameters"]  # float32 shards
    assert half.phases["training"]["gathered blocks"] == split["gathered blocks"] / 2
    assert half.phases["training"]["unshared gradients"] == 6 * (16 * expert + rest)


def test_a_packed_reference_by_hand():
    model = GptOssConfig(num_layers=2, vocab_size=1000, num_experts=4)
    plain, packed = (
        make_plan(model, config(kl_weight=0.1, reference_experts=how)).phases["training"]["reference"]
        for how in ("plain", "mxfp4")
    )
    # 2 layers x 4 experts x 3 x 2880 x 2880 weights in 17 bytes for 32 instead of 4 bytes each.
    weights = 2 * 4 * 3 * 2880 * 2880
    assert plain - packed == 4 * weights - 17 * weights // 32
    with pytest.raises(ConfigError, match="reference_experts does nothing without a positive"):
        config(reference_experts="mxfp4")
    with pytest.raises(ConfigError, match='"mxfp4": MXFP4 needs a hidden_size that is a multiple of 32, got 6'):
        make_plan(MODEL, config(kl_weight=0.1, reference_experts="mxfp4"))
    with pytest.raises(ConfigError, match='"mxfp4" works on one rank only'):
        make_plan(model, config(kl_weight=0.1, reference_experts="mxfp4"), mesh=Mesh(data=2))


def test_the_copy_for_old_log_probs_is_counted_where_one_is_made():
    assert "scoring" not in make_plan(MODEL, config()).phases
    scoring = make_plan(MODEL, config(recompute_old_log_probs="bfloat16")).phases["scoring"]
    assert scoring["copy of the policy"] == 4 * PARAMETERS  # float32 until the last parameter is converted
    assert "copy of the policy" not in make_plan(MODEL, config(recompute_old_log_probs="float32")).phases["scoring"]
    assert "copy of the policy" not in make_plan(MODEL, config(updates_per_batch=2)).phases["scoring"]


def test_sampling_ahead_keeps_a_copy_and_goes_on_beside_the_update():
    def phases(max_staleness, trains=True):
        asked = config()
        asked = replace(asked, rollout=replace(asked.rollout, max_staleness=max_staleness))
        asked = replace(asked, algorithm=replace(asked.algorithm, correction="truncate"))
        return make_plan(MODEL, asked, trains=trains).phases

    now, ahead = phases(0), phases(2)
    sampling = sum(size for name, size in now["rollout"].items() if name not in now["training"])
    assert sampling > 0
    assert ahead["rollout"] == now["rollout"] | {"engine weights": 4 * PARAMETERS}
    extra = {"engine weights": 4 * PARAMETERS, "sampling ahead": sampling}
    assert ahead["training"] == now["training"] | extra
    assert phases(0, trains=False) == phases(2, trains=False)


def test_a_mesh_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"expert degree \(2\) must divide the 3 experts"):
        make_plan(MODEL, config(), mesh=Mesh(expert=2))
    with pytest.raises(ConfigError, match=r"sequence degree \(4\) must divide the 2 heads"):
        make_plan(MODEL, config(), mesh=Mesh(sequence=4))
    with pytest.raises(ConfigError, match=r"--gpus \(6\) must be a multiple"):
        _ = Machine(gpus=6, sequence=4).mesh


def test_a_critic_of_its_own_is_another_policy_without_a_vocabulary():
    shared = Config(algorithm=AlgorithmConfig(normalize_advantages="gae"), critic=CriticConfig(backbone="shared"))
    own = Config(algorithm=AlgorithmConfig(normalize_advantages="gae"))
    for phase in ("rollout", "training"):
        with_own, with_shared = (make_plan(MODEL, c).phases[phase] for c in (own, shared))
        # Weights and two moments in float32, with one number's 6 + 1 instead of the head's 60.
        assert with_own.pop("critic") == 3 * 4 * (PARAMETERS - 60 + 7)
        assert with_own == with_shared
    assert "critic" not in make_plan(MODEL, own, trains=False).phases["rollout"]


def test_what_cannot_fit_is_refused():
    require_memory(MODEL, config(), torch.device("cpu"), trains=True)
    huge = GptOssConfig(vocab_size=10**9, hidden_size=6000, num_layers=1)
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GiB in training \(optimizer"):
        require_memory(huge, config(), torch.device("cpu"), trains=True)


def test_the_largest_that_fit_do_and_one_more_does_not():
    model = GptOssConfig(num_layers=2, vocab_size=1000, num_experts=4)
    limit = make_plan(model, config(context=500)).peak
    tokens = largest_microbatch(model, config(context=400), limit)
    context = largest_context(model, config(), limit)

    def peak(context, tokens):
        rollout = RolloutConfig(num_slots=3, max_context_tokens=context, max_action_tokens=10)
        return make_plan(model, Config(rollout=rollout, run=RunConfig(tokens_per_microbatch=tokens))).peak

    assert peak(400, tokens) <= limit < peak(400, tokens + 1)
    assert peak(context, context) <= limit < peak(context + 1, context + 1)
    assert largest_context(model, config(), 1000) is None


def test_advice_fits():
    model = GptOssConfig(num_layers=8, vocab_size=1000, num_experts=4)
    limit = make_plan(model, config(recompute="block")).peak
    assert limit < make_plan(model, config()).peak
    changes = dict(advice(model, config(), limit))
    assert "run.recompute block" in changes
    assert changes["run.recompute block"] == make_plan(model, config(recompute="block"))
    assert all(plan.peak <= limit for plan in changes.values())
    assert advice(model, config(), 1000) == []
    # What no single change reaches, several do, and no more of them than that takes.
    both = make_plan(model, config(recompute="block", dtype="bfloat16", num_slots=1)).peak
    ((names, plan),) = advice(model, config(), both)
    assert "model.dtype bfloat16" in names
    assert "run.recompute block" in names
    assert plan.peak <= both


def test_more_gpus_with_no_more_changes_than_they_need():
    model = GptOssConfig(num_layers=8, vocab_size=1000, num_experts=4)
    mesh = Mesh(sequence=2)
    four = make_plan(model, config(), mesh=replace(mesh, data=4)).peak
    assert make_plan(model, config(), mesh=replace(mesh, data=2)).peak > four
    assert advice_with_gpus(model, config(), four, mesh=mesh) == (
        "", replace(mesh, data=4), make_plan(model, config(), mesh=replace(mesh, data=4)),
    )  # fmt: skip
    # The engine's float32 copy alone is too large for any number of ranks; its bfloat16 copy is not.
    half = make_plan(model, config(recompute="block", dtype="bfloat16"), mesh=replace(mesh, data=64)).peak
    names, ranks, plan = advice_with_gpus(model, config(), half, mesh=mesh)
    assert "model.dtype bfloat16" in names
    assert plan.peak <= half
    assert ranks.sequence == 2
    assert advice_with_gpus(model, config(), 1000) is None


def test_recomputed_blocks_keep_one_stream_each():
    model = GptOssConfig(num_layers=8, vocab_size=1000, num_experts=4, experts_per_token=4)
    items = make_plan(model, config(recompute="block")).phases["training"]
    # 8 layers x 8192 rows x (2880 channels of 4 bytes + 4 expert ids of 8 bytes).
    assert items["checkpoints"] == 8 * 8192 * (2880 * 4 + 4 * 8)
    assert "experts" not in items
    # Around attention: its result too, 64 heads of 64 channels and an lse each, in float32.
    around = make_plan(model, config(recompute="around_attention")).phases["training"]
    assert around["checkpoints"] == items["checkpoints"]
    assert "attention" not in items
    assert around["attention"] == 8 * 8192 * (64 * 64 * 4 + 64 * 4)


def test_the_command(capsys):
    assert run(["plan", "arithmetic_tiny", "--gpu-memory=8GB"]) == 0
    assert "fits: 0." in capsys.readouterr().out
    big = ["plan", "arithmetic_tiny", "--released", "20b", "--gpu-memory", "80GB", "--context", "24576"]
    assert run(big) == 1
    out = capsys.readouterr().out
    assert "context 24576, micro-batches of 24576 tokens" in out
    assert "DOES NOT FIT" in out
    # 20,914,757,184 parameters (the checkpoint's own count) in float32: 77.914 GiB.
    assert "77.914" in out
    assert "--gpus " in out
    assert run([*big, "--hidden-size=64"]) == 2
    assert "--model.hidden_size does nothing beside --released 20b" in capsys.readouterr().err
    assert run([*big, "--model.path=/nowhere"]) == 2
    assert "--released does nothing beside model.path" in capsys.readouterr().err
    assert run([*big, "--gpus=16", "--expert-degree=3"]) == 2
    assert "--gpus (16) must be a multiple" in capsys.readouterr().err


def test_help_names_the_options_of_the_plan(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(["plan", "arithmetic_tiny", "--help"])
    out = capsys.readouterr().out
    for option in (
        "--gpus N",
        "--gpu-memory 80GB",
        "--context TOKENS",
        "--parallel.expert-degree",
        "--rollout.num-slots",
    ):
        assert option in out


def test_sizes_are_read_with_their_unit():
    assert parse_bytes("80GB") == 80_000_000_000
    assert parse_bytes("1.5 GiB") == 3 * 2**29
    with pytest.raises(ConfigError, match="such as 80GB, got '80'"):
        parse_bytes("80")
