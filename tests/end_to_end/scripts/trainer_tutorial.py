"""Lightning's Trainer, as in its tutorials, with gradient accumulation over two batches; it starts the other rank."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: list[torch.Tensor], _number: int) -> None:
        inputs, labels = batch
        self.log("loss", nn.functional.cross_entropy(self.net(inputs), labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(96, 32), torch.randint(10, (96,)))
    training, validation = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Classifier()
    trainer.fit(model, training, validation)
    torch.save(model.state_dict(), Path(sys.argv[1], f"weights-{trainer.global_rank}.pt"))


if __name__ == "__main__":
    main()
