"""TRL's GRPOTrainer on a tiny GPT-OSS, with eager attention and with attn_implementation="poise"."""

import pytest
import torch
from tiny import assert_same_grads, twins

from poise.integrations.transformers import register

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
SHORTEST, LONGEST = 100, 150  # sampled tokens


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(38)} | {"<unk>": 38, "<end>": 39}
    words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="w0")


def reward(completion_ids, **_):
    return [sum(ids) / len(ids) for ids in completion_ids]


class Watched(trl.GRPOTrainer):
    """Keeps the loss, the completions and the bytes that the forward pass leaves for the backward pass."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        storages = {}

        def keep(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
        self.saved_bytes = sum(size for pointer, size in storages.items() if pointer not in weights)
        self.loss, self.completions = loss.item(), inputs["completion_ids"].clone()
        return loss


class Gradients(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.grads = {name: p.grad.clone() for name, p in model.named_parameters()}


def one_step(folder, implementation, out):
    transformers.set_seed(3)
    watch = Gradients()
    trainer = Watched(
        model=str(folder),
        processing_class=tokenizer(),
        reward_funcs=[reward],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w10 w11"]}),
        callbacks=[watch],
        args=trl.GRPOConfig(
            output_dir=str(out), per_device_train_batch_size=4, num_generations=2, max_completion_length=LONGEST,
            generation_kwargs={"min_new_tokens": SHORTEST},
            max_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, seed=3,
            gradient_checkpointing=False, beta=0.0, shuffle_dataset=False, router_aux_loss_coef=0.0,
            model_init_kwargs={"attn_implementation": implementation, "dtype": "float32"},
        ),
    )  # fmt: skip
    assert trainer.model.config._attn_implementation == implementation
    trainer.train()
    return trainer, watch.grads


def test_same_loss_and_gradients_less_memory(tmp_path):
    register()
    # The prompts differ in length and the completions end where the policy says so: padding on both sides.
    eager, _ = twins(torch.float32, sliding_window=16)
    eager.save_pretrained(tmp_path / "policy")
    expected, expected_grads = one_step(tmp_path / "policy", "eager", tmp_path / "eager")
    actual, actual_grads = one_step(tmp_path / "policy", "poise", tmp_path / "poise")
    assert torch.equal(actual.completions, expected.completions)  # sampled with the cache, from equal logits
    lengths = {[*row.tolist(), 39].index(39) for row in actual.completions}
    assert SHORTEST <= min(lengths) < max(lengths) <= LONGEST
    assert actual.loss == pytest.approx(expected.loss, rel=1e-4)
    assert_same_grads(actual_grads, expected_grads, 1e-3)
    print(f"bytes kept for the backward pass: eager {expected.saved_bytes}, poise {actual.saved_bytes}")
    assert actual.saved_bytes < expected.saved_bytes / 2  # already at these 160 tokens
