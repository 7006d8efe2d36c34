"""The training loop shared by all stages: one captured step, a time budget, an average of the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class TrainingLoop:
    """Runs a training step until its time is up, as one CUDA graph where there is CUDA.

    The step draws its own data on the device and returns a dict of scalar losses, of which ``total`` is minimised.
    A step whose gradient is not finite changes nothing. The exponential average of the weights is what is kept.

    Args:
        step: makes one batch and returns the losses.
        groups: ``(module, learning rate)`` pairs to train.
        seconds: time budget, capture included.
        decay: of the average.
    """

    def __init__(
        self,
        step: Callable[[], dict[str, Tensor]],
        groups: Iterable[tuple[nn.Module, float]],
        seconds: float,
        device: torch.device,
        decay: float = 0.998,
        warm_up: int = 100,
    ):
        self.step, self.seconds, self.device, self.warm_up = step, seconds, device, warm_up
        groups = list(groups)
        self.peaks = [lr for _, lr in groups]
        self.rates = [torch.zeros((), device=device) for _ in groups]
        self.parameters = [p for m, _ in groups for p in m.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(
            [
                {"params": [p for p in m.parameters() if p.requires_grad], "lr": rate}
                for (m, _), rate in zip(groups, self.rates, strict=True)
            ],
            betas=(0.9, 0.99),
            capturable=device.type == "cuda",
        )
        self.average = [p.detach().clone() for p in self.parameters]
        self.decay = decay
        self.count = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)

    def _train_step(self) -> dict[str, Tensor]:
        self.optimizer.zero_grad(set_to_none=False)
        losses = self.step()
        losses["total"].backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        finite = norm.isfinite()
        self.skipped += ~finite
        factor = torch.where(finite, (1.0 / (norm + 1e-6)).clamp(max=1.0), 0.0)
        for g in gradients:
            torch.nan_to_num_(g, 0.0, 0.0, 0.0)
        torch._foreach_mul_(gradients, factor)
        self.optimizer.step()
        self.count += 1
        keep = ((1 + self.count) / (10 + self.count)).clamp(max=self.decay)
        torch._foreach_mul_(self.average, keep)
        torch._foreach_add_(self.average, torch._foreach_mul([p.detach() for p in self.parameters], 1 - keep))
        return {k: v.detach() for k, v in losses.items()} | {"norm": norm.detach()}

    def _set_rates(self, iteration: int, progress: float) -> None:
        shape = min(1.0, (iteration + 1) / self.warm_up) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        )
        for rate, peak in zip(self.rates, self.peaks, strict=True):
            rate.fill_(peak * shape)

    def _capture(self) -> Callable[[], dict[str, Tensor]]:
        if self.device.type != "cuda":
            return self._train_step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._train_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = self._train_step()

        def replay() -> dict[str, Tensor]:
            graph.replay()
            return losses

        return replay

    def run(self, name: str, log: Callable[[str], None] = print, every: float = 20.0) -> None:
        """Trains, then puts the averaged weights into the modules."""
        begin = time.monotonic()
        self._set_rates(0, 0.0)
        step = self._capture()
        iteration, told = 0, time.monotonic()
        while True:
            now = time.monotonic()
            if now - begin >= self.seconds:
                break
            self._set_rates(iteration, (now - begin) / self.seconds)
            losses = step()
            iteration += 1
            if iteration % 20 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()
            if now - told > every:
                told = now
                text = " ".join(f"{k} {v.item():.4f}" for k, v in losses.items())
                log(f"{name} {now - begin:5.0f}s step {iteration} skipped {int(self.skipped)} {text}")
        log(
            f"{name} done: {iteration} steps, {int(self.skipped)} skipped, "
            + " ".join(f"{k} {v.item():.4f}" for k, v in losses.items())
        )
        for p, a in zip(self.parameters, self.average, strict=True):
            p.data.copy_(a)
