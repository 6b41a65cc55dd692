"""PSGD under the ``Trainer`` of transformers and in loops of accelerate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from psgd import PSGD, FiniteDifference, HessianVector, Whitening

from ..cases import batch, small_model, train
from .packages import needs

accelerate = needs("accelerate")
transformers = needs("transformers")

STEPS = 8


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


# -- accelerate -------------------------------------------------------------------------------------------------------


def prepared(optimizer_of, **options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = small_model()
    return accelerator, *accelerator.prepare(model, optimizer_of(model))


def whitening(model: nn.Module) -> PSGD:
    return PSGD(model.parameters(), lr=0.01, probe=Whitening())


def finite_difference(model: nn.Module) -> PSGD:
    return PSGD(model.parameters(), lr=0.05, max_norm=1.0)


def hessian_vector(model: nn.Module) -> PSGD:
    return PSGD(model.parameters(), lr=0.05, max_norm=1.0, probe=HessianVector())


def loop(accelerator, model, optimizer, first: int, last: int, clip: float | None = None) -> None:
    for step in range(first, last):
        x, y = batch(step)
        with accelerator.accumulate(model):
            accelerator.backward(((model(x).float() - y) ** 2).mean())
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def test_prepared_it_takes_the_steps_of_an_ordinary_loop():
    accelerator, model, optimizer = prepared(whitening)
    loop(accelerator, model, optimizer, 0, STEPS)
    plain = small_model()
    train(plain, whitening(plain), 0, STEPS)
    assert same(accelerator.unwrap_model(model), plain)


def test_accumulation_and_clipping_are_those_of_an_ordinary_loop():
    accelerator, model, optimizer = prepared(whitening, gradient_accumulation_steps=4)
    loop(accelerator, model, optimizer, 0, STEPS, clip=0.5)
    plain = small_model()
    plain_optimizer = whitening(plain)
    for step in range(STEPS):
        x, y = batch(step)
        (((plain(x) - y) ** 2).mean() / 4).backward()
        if step % 4 == 3:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    assert same(accelerator.unwrap_model(model), plain)


def test_mixed_precision_keeps_parameters_and_state_in_float32():
    accelerator, model, optimizer = prepared(whitening, mixed_precision="bf16")
    x, y = batch(99)
    before = ((model(x) - y) ** 2).mean().item()
    loop(accelerator, model, optimizer, 0, 80)
    assert ((model(x) - y) ** 2).mean().item() < 0.5 * before
    assert all(p.dtype == torch.float32 for p in model.parameters())
    state = optimizer.state[next(iter(model.parameters()))]
    assert {v.dtype for v in state.values() if v.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("make", [whitening, finite_difference, hessian_vector])
def test_a_closure_goes_through_to_the_optimizer(make):
    accelerator, model, optimizer = prepared(make)
    for step in range(STEPS):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            if make is not hessian_vector:
                accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    plain = small_model()
    train(plain, make(plain), 0, STEPS)
    assert same(accelerator.unwrap_model(model), plain)


@pytest.mark.parametrize("safe", [True, False])
def test_a_state_that_was_saved_goes_on_to_the_bit(tmp_path, safe: bool):
    accelerator, model, optimizer = prepared(whitening)
    loop(accelerator, model, optimizer, 0, 5)
    accelerator.save_state(tmp_path / "half", safe_serialization=safe)
    loop(accelerator, model, optimizer, 5, STEPS)
    straight = [p.detach().clone() for p in model.parameters()]
    Qs = [optimizer.state[p]["Q0_root"].clone() for p in model.parameters()]

    accelerator, model, optimizer = prepared(whitening)
    accelerator.load_state(tmp_path / "half")
    loop(accelerator, model, optimizer, 5, STEPS)
    for p, expected, Q in zip(model.parameters(), straight, Qs, strict=True):
        assert torch.equal(p, expected)
        assert torch.equal(optimizer.state[p]["Q0_root"], Q)


# -- transformers -----------------------------------------------------------------------------------------------------


def sentences(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    words = (torch.randint(12, (count, 1), generator=generator) + torch.arange(8)) % 12
    return [{"input_ids": row, "labels": row} for row in words]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    size = {"vocab_size": 12, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    torch.manual_seed(0)
    size = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(**size, intermediate_size=32))


def arguments(tmp_path, **options):
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    numbers = {"per_device_train_batch_size": 16, "max_steps": 30, "logging_steps": 1000}
    return transformers.TrainingArguments(output_dir=str(tmp_path), **{**quiet, **numbers, **options})


def loss_of(model: nn.Module) -> float:
    model.eval()
    rows = torch.stack([row["input_ids"] for row in sentences(64)])
    with torch.no_grad():
        return model(input_ids=rows, labels=rows).loss.item()


CHOICE = (PSGD, {"lr": 0.01, "probe": Whitening()})


@pytest.mark.parametrize("make", [gpt2, bert])
def test_the_trainer_makes_the_optimizer_and_trains(tmp_path, make):
    model = make()
    before = loss_of(model)
    trainer = transformers.Trainer(
        model, arguments(tmp_path, weight_decay=0.1), train_dataset=sentences(200), optimizer_cls_and_kwargs=CHOICE
    )
    trainer.train()
    assert loss_of(model) < 0.5 * before
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    assert trainer.optimizer.optimizer.__class__ is PSGD
    assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]


def test_an_optimizer_and_a_schedule_of_ones_own(tmp_path):
    model = gpt2()
    before = loss_of(model)
    optimizer = PSGD(model.parameters(), lr=0.01, probe=Whitening())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=31)
    settings = arguments(tmp_path, gradient_accumulation_steps=2, bf16=True)
    transformers.Trainer(model, settings, train_dataset=sentences(200), optimizers=(optimizer, schedule)).train()
    assert loss_of(model) < 0.5 * before
    assert int(optimizer.state[model.lm_head.weight]["step"]) == 30


def test_a_probe_that_wants_a_closure_says_so(tmp_path):
    model = gpt2()
    with pytest.raises(ValueError, match=r"closure=None: FiniteDifference wants step\(closure\); Whitening works"):
        transformers.Trainer(
            model,
            arguments(tmp_path),
            train_dataset=sentences(200),
            optimizer_cls_and_kwargs=(PSGD, {"lr": 0.1, "probe": FiniteDifference()}),
        ).train()


def test_a_run_resumed_from_a_checkpoint_is_the_same_run(tmp_path):
    def trainer(folder: str):
        settings = arguments(tmp_path / folder, max_steps=12, save_strategy="steps", save_steps=6)
        return transformers.Trainer(gpt2(), settings, train_dataset=sentences(200), optimizer_cls_and_kwargs=CHOICE)

    straight, resumed = trainer("straight"), trainer("resumed")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-6"))
    assert same(straight.model, resumed.model)
