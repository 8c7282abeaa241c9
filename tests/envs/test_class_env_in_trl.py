"""One class, two trainers: TRL's GRPOTrainer and poise offer the tools of the same class and pay the same reward."""

import asyncio

import pytest
from test_class_env import Counter, closeness, episode

from poise.envs.class_env import ClassTask
from poise.harmony.messages import final

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
ROW = {"prompt": [{"role": "user", "content": "Count."}], "goal": 3}


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from trl.chat_template_utils import gptoss_chat_template

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|return|>", pad_token="<|endoftext|>"
    )
    names = ["start", "end", "message", "channel", "constrain", "call"]
    fast.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    fast.chat_template = gptoss_chat_template
    return fast


def test_the_same_class_in_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = byte_tokenizer()
    config = transformers.GptOssConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=transformers.GptOssForCausalLM(config),
        processing_class=tokenizer,
        reward_funcs=[closeness],
        environment_factory=Counter,
        train_dataset=datasets.Dataset.from_list([ROW] * 2),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_completion_length=8,
            max_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    theirs = trainer.state.log_history[0]

    conversation, _, outcome = episode(
        ClassTask(Counter, train_rows=[ROW], reward_functions=[closeness]), ROW, [final("")]
    )
    assert conversation.developer is not None
    assert [tool.__name__ for tool in trainer.tools] == [tool.name for tool in conversation.developer.tools]
    # A random policy calls nothing: the counter stays at 0, three from the goal: 1 / (1 + 3), and no reward of its own.
    assert [(e.goal, e.count) for e in trainer.environments] == [(3, 0)] * 2
    assert theirs["rewards/closeness/mean"] == outcome.metrics["reward/closeness"] == 0.25
    assert theirs["rewards/Counter/mean"] == outcome.metrics["reward/Counter"] == 0.0
    assert theirs["reward"] == outcome.reward == 0.25
    assert asyncio.iscoroutinefunction(Counter.peek)  # TRL took an async tool as well
