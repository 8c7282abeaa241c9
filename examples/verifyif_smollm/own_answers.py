"""Answers of the source model in its own chat format, to teach the upcycled one harmony and nothing else.

    python -m examples.verifyif_smollm.own_answers CHECKPOINT examples/verifyif_smollm/answers.jsonl [NUMBER]

SmolLM2 was trained on ChatML. The upcycled checkpoint computes the same function, so it still answers in that format;
what it said there, written down in harmony, is what the warm start imitates. Printed is how often it followed the
instruction: what the warm start can pass on.
"""

import asyncio
import json
import sys

from examples.verifyif_smollm.task import task_config
from poise.engine import EmbeddedEngine
from poise.envs import make_task
from poise.envs.instruction_check import check
from poise.harmony import HarmonyTokenizer
from poise.model import load_model
from poise.seeding import derive_seed

BEGIN, END = 1, 2  # <|im_start|> and <|im_end|>
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
MAX_TOKENS, BATCH, TEMPERATURE = 64, 64, 0.7


def chat_ids(tokenizer: HarmonyTokenizer, text: str) -> list[int]:
    said = [BEGIN, *tokenizer.encode(f"system\n{SYSTEM}"), END, *tokenizer.encode("\n")]
    said += [BEGIN, *tokenizer.encode(f"user\n{text}"), END, *tokenizer.encode("\n")]
    return [*said, BEGIN, *tokenizer.encode("assistant\n")]


async def main(checkpoint: str, out: str, number: int = 256) -> None:
    config = task_config()
    tokenizer, rows = HarmonyTokenizer.load(checkpoint), make_task(config).train_rows
    # Harmony's endings started as copies of the chat's own, and are as probable.
    ends = {END, tokenizer.end, tokenizer.return_, tokenizer.call}
    engine = EmbeddedEngine(
        load_model(checkpoint),
        stop_ids=ends,
        return_id=END,
        num_slots=BATCH,
        max_context_tokens=400,
        temperature=TEMPERATURE,
    )
    num_written = num_followed = 0
    with open(out, "w", encoding="utf-8") as file:
        for first in range(0, number, BATCH):
            # Rows from the end: reinforcement learning draws from all, so few of its problems were imitated.
            batch = [rows[len(rows) - 1 - i] for i in range(first, min(first + BATCH, number))]
            actions = await asyncio.gather(
                *(
                    engine(
                        chat_ids(tokenizer, row["prompt"]),
                        episode_id=f"{first}/{i}",
                        seed=derive_seed(0, first + i),
                        max_tokens=MAX_TOKENS,
                    )
                    for i, row in enumerate(batch)
                )
            )
            for row, action in zip(batch, actions, strict=True):
                # An answer that was cut would teach to stop in the middle.
                if action.is_stopped and tokenizer.special_ids.isdisjoint(action.token_ids[:-1]):
                    text = tokenizer.decode(action.token_ids[:-1]).strip()
                    file.write(json.dumps({"prompt": row["prompt"], "answer": text}) + "\n")
                    result = check(config.checkers, row["prompt"], row["instructions"], row["arguments"], text)
                    num_written += 1
                    num_followed += all(result["strict"])
            file.flush()
            print(f"{first + len(batch)}/{number}: {num_written} answers, {num_followed} follow", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
