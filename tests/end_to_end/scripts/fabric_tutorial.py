"""Lightning Fabric, as in its tutorials, with gradient accumulation over two batches; it starts the other rank."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(96, 32), torch.randint(10, (96,)))
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    for _ in range(2):
        for number, (inputs, labels) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(nn.functional.cross_entropy(model(inputs), labels))
            if not accumulates:
                optimizer.step()
                optimizer.zero_grad()
    torch.save(net.state_dict(), Path(sys.argv[1], f"weights-{fabric.global_rank}.pt"))


if __name__ == "__main__":
    main()
