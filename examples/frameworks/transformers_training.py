"""Training with the Trainer of transformers: a tiny GPT-2 with random weights learns to count.

  torchrun --nproc-per-node 2 examples/frameworks/transformers_training.py
  sordino run -np 2 -- python examples/frameworks/transformers_training.py --algorithm local-sgd

With --plain it uses the classes of transformers over gloo instead, under torchrun only, and prints the same loss.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", help="an algorithm of Sordino; without one, DDP over its process group")
parser.add_argument("--plain", action="store_true", help="use the classes of transformers")
options = parser.parse_args()

if options.plain:
    from transformers import Trainer, TrainingArguments
else:
    from sordino.integrations.transformers import Trainer, TrainingArguments

torch.manual_seed(0)
texts = (torch.randint(64, (256, 1)) + torch.arange(16)) % 64
data = [{"input_ids": text, "labels": text} for text in texts]
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        args,
        train_dataset=data,
        eval_dataset=data,
        **({} if options.plain else {"algorithm": options.algorithm}),
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.7f}")
