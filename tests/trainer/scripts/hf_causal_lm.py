"""Hugging Face's Trainer on a tiny causal language model: as a user writes it, with one line for the callback."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tpu_trainer.callbacks.huggingface import TPUJobCallback

VOCABULARY, LENGTH = 32, 16


def rows(count):
    """Sequences that count upwards, so that the next token is known."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(folder):
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, bos_token_id=0)
    )
    arguments = TrainingArguments(
        folder,
        max_steps=int(os.environ.get("MAX_STEPS", "20")),
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(model, arguments, train_dataset=rows(256), eval_dataset=rows(16), callbacks=[TPUJobCallback()])
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    trainer.train(resume_from_checkpoint=last)
    print("trained", trainer.state.global_step, "on", arguments.world_size, "from", last, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ["SCRIPT_FOLDER"])
