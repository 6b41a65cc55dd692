"""PSGD in the ``Trainer`` of Hugging Face transformers, for a small GPT-2 made from scratch.

    python examples/integrations/transformers_trainer.py

The ``Trainer`` divides the parameters into those that decay and those that do not, and steps without a closure, so
the probe is ``Whitening``. Nothing is downloaded. The margin: the loss falls below half of that of the untrained
model.
"""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from psgd import PSGD, Whitening

LENGTH, WORDS = 16, 32


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Each word is one or two after the one before, always the same in a sentence."""
    first, by = torch.randint(WORDS, (count, 1)), torch.randint(1, 3, (count, 1))
    words = (first + by * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in words]


def main(lr: float = 0.005) -> None:
    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir="trainer_output",  # nothing is saved
        per_device_train_batch_size=32,
        max_steps=100,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.1,  # for the param groups; learning_rate is not looked at, lr is given below
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=sentences(1000),
        eval_dataset=sentences(200),
        optimizer_cls_and_kwargs=(PSGD, {"lr": lr, "probe": Whitening()}),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        sys.exit("transformers_trainer: the loss was to fall below half of what it was")


if __name__ == "__main__":
    main()
