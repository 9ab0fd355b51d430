"""Muon on PyTorch, with the numbers of MLX's `optim.Muon`.

`torch.optim.Muon` computes in bfloat16, so its losses differ from MLX's by more than 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

MOMENTUM, ROUNDS = 0.95, 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # kellerjordan.github.io/posts/muon


class Muon(torch.optim.Optimizer):
    """Moves each matrix along its averaged gradient with all singular values near 1; Nesterov momentum, no decay."""

    def __init__(self, parameters: Iterable[dict[str, Any]], rate: float) -> None:
        """parameters: groups of matrices, as PyTorch's optimizers take them.

        rate: learning rate; a matrix with more rows than columns has a larger one.
        """
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates all matrices that have a gradient. Those of one shape are computed together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(matrix.shape, []).append(matrix)
            for (rows, columns), matrices in shapes.items():
                update = orthogonalize(torch.stack([self._add_momentum(matrix) for matrix in matrices]))
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                for matrix, one in zip(matrices, update, strict=True):
                    matrix.sub_(one, alpha=rate)

    def _add_momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(state["momentum"], MOMENTUM)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Returns matrices [N, R, C] with the same singular vectors, and singular values near 1.

    By five Newton-Schulz iterations, which bring singular values above 0.01 of the matrix's norm to between 0.68 and
    1.2; smaller ones stay smaller.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
