"""Hugging Face accelerate, as in its tutorials, with gradient accumulation over two batches."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.randn(96, 32), torch.randint(10, (96,)))
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(net, adam, DataLoader(data, batch_size=4, shuffle=True))
    for _ in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).state_dict()
    torch.save(weights, Path(sys.argv[1], f"weights-{accelerator.process_index}.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
