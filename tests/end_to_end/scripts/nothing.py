"""Imports torch and does nothing with it."""

import torch

if __name__ == "__main__":
    print(torch.ones(3).sum().item())  # noqa: T201 - a program says something
