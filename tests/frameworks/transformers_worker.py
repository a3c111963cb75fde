"""A rank that trains by a Trainer of transformers: `transformers_worker.py plain|ddp|ALGORITHM`.

Rank 0 prints the results as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from ranks import equal_on_all_ranks, flat, report
from transformers import GPT2Config, GPT2LMHeadModel

from sordino.algorithms import Crossover, LocalSGD

KIND = sys.argv[1]
ALGORITHMS: dict[str, Any] = {
    "allreduce": "allreduce",
    "local-sgd": LocalSGD(interval=4),
    "shards": LocalSGD(interval=2, group_size=2, exchange="sharded"),
    "crossover": Crossover(interval=5),
}
if KIND == "plain":
    from transformers import Trainer, TrainingArguments
else:
    from sordino.integrations.transformers import Trainer, TrainingArguments


def model(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def trainer(trained: GPT2LMHeadModel, folder: str, **more: Any) -> Trainer:
    texts = (torch.randint(16, (64, 1), generator=torch.Generator().manual_seed(1)) + torch.arange(8)) % 16
    data = [{"input_ids": text, "labels": text} for text in texts]
    settings: dict[str, Any] = {
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "report_to": [],
        "disable_tqdm": True,
    }
    made: dict[str, Any] = {} if KIND in ("plain", "ddp") else {"algorithm": ALGORITHMS[KIND]}
    args = TrainingArguments(output_dir=folder, **(settings | more))
    return Trainer(trained, args, train_dataset=data, eval_dataset=data[:16], **made)


def losses(made: Trainer) -> list[float]:
    return [line["loss"] for line in made.state.log_history if "loss" in line]


def main() -> None:
    results: dict[str, Any] = {}
    for name, more in {"accumulated": {"gradient_accumulation_steps": 2}, "bf16": {"bf16": True}}.items():
        made = trainer(model(), name, save_strategy="no", **more)
        made.train()
        results[name] = [*losses(made), made.state.log_history[-2]["eval_loss"]]
    whole = trainer(model(), "whole", load_best_model_at_end=True)
    whole.train()
    results["uninterrupted"] = losses(whole)[8:]
    results["evaluated"] = [line["eval_loss"] for line in whole.state.log_history if "eval_loss" in line]
    saved = GPT2LMHeadModel.from_pretrained("whole/checkpoint-16")
    results["saved is final"] = torch.allclose(flat(saved), flat(whole.model), atol=1e-6)
    torch.distributed.barrier()
    resumed = trainer(model(seed=7), "resumed")
    resumed.train(resume_from_checkpoint="whole/checkpoint-8")
    results["resumed"] = losses(resumed)[8:]
    state = torch.load("whole/checkpoint-8/optimizer.pt", weights_only=True)
    results["state"] = state.get("sordino")
    if KIND != "plain":
        assert equal_on_all_ranks(resumed.model), "ranks have other models after the training"
        whole.save_model("final")
        if whole.is_world_process_zero():
            assert Path("final/model.safetensors").is_file()
    report(results, whole.is_world_process_zero())


if __name__ == "__main__":
    main()
