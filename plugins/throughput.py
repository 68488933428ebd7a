"""Throughput: what is trained on in a second, and how much of the device that takes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from leyden.callback import Callback
from leyden.errors import ConfigError

if TYPE_CHECKING:
    from leyden.module import Module
    from leyden.trainer import Trainer

    from .flops import StepFlops


class Throughput(Callback):
    """Logs what is trained on in a second, over all ranks, every so many optimizer steps.

    To the loggers go ``throughput/batches_per_s``; ``samples_per_s``, where the Module's
    ``count_samples`` knows; ``tokens_per_s``, where they are counted; ``device_flops_per_s``, the
    model's operations on each device; and ``mfu``, their share of what the device can do.
    ``values`` keeps the latest.

    Time in validation is left out, and so are the first two batches: the second is the one whose
    operations are counted, uncompiled. The device is not waited for.

    Args:
        every_n_steps: Optimizer steps between records; None for the Trainer's.
        count_tokens: Returns how many tokens a batch holds, as an int that no device must be
            asked for.
        flops_per_sample: Operations of forward and backward for a sample; None counts them once,
            and False leaves them out.
        peak_flops: Operations a second that one device can do; None for those known of GPUs in
            bfloat16.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        count_tokens: Callable[[Any], int] | None = None,
        flops_per_sample: float | bool | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if every_n_steps is not None and (type(every_n_steps) is not int or every_n_steps < 1):
            raise ConfigError(
                f"every_n_steps={every_n_steps!r} must be a whole number, at least 1, or None for "
                "the Trainer's log_every_n_steps."
            )
        self.every_n_steps, self.count_tokens = every_n_steps, count_tokens
        self.flops_per_sample, self.peak_flops = flops_per_sample, peak_flops
        self.values: dict[str, float] = {}
        self.flops_per_batch: int | None = None
        """Operations of the batch in which they were counted, on this rank."""
        self._counter: StepFlops | None = None

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self.values, self.flops_per_batch, self._counter = {}, None, None
        self._every = self.every_n_steps or trainer.log_every_n_steps
        self._seen, self._logged_step = 0, trainer.global_step
        self._per_sample = float(self.flops_per_sample or 0)
        if self.peak_flops is None:
            from .flops import peak_of

            self.peak_flops = peak_of(trainer.strategy.device)
        self._begin()

    def _begin(self) -> None:
        self._batches = self._samples = self._tokens = 0
        self._began = perf_counter()
        self._paused = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == 1 and self.flops_per_sample is None:
            from .flops import StepFlops

            self._counter = StepFlops().__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        samples = module.count_samples(batch) or 0
        if self._counter is not None:
            self.flops_per_batch = self._counter.get_total_flops()
            self._stop_counting()
            self._per_sample = self.flops_per_batch / samples if samples else 0.0
        step = trainer.global_step
        if self._seen <= 2:
            self._logged_step = step
            self._begin()
            return
        self._batches += 1
        self._samples += samples
        if self.count_tokens is not None:
            self._tokens += self.count_tokens(batch)
        if step % self._every == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(trainer)
            self._begin()

    def _log(self, trainer: Trainer) -> None:
        seconds = perf_counter() - self._began - self._paused
        flops = self._samples * self._per_sample or self._batches * (self.flops_per_batch or 0)
        strategy = trainer.strategy
        own = strategy.data_rank, self._batches, self._samples, self._tokens, seconds, flops
        ranks = strategy.gather(own)
        # Ranks that share one part of the data see the same of it.
        apart = list({numbers[0]: numbers for numbers in ranks}.values())
        batches, samples, tokens = (sum(numbers[at] for numbers in apart) for at in (1, 2, 3))
        seconds = max(numbers[4] for numbers in ranks)
        found: dict[str, float] = {"batches_per_s": batches / seconds}
        if samples:
            found["samples_per_s"] = samples / seconds
        if tokens:
            found["tokens_per_s"] = tokens / seconds
        per_device = sum(numbers[5] for numbers in ranks) / len(ranks) / seconds
        if per_device:
            found["device_flops_per_s"] = per_device
            if self.peak_flops:
                found["mfu"] = per_device / self.peak_flops
        self.values = {f"throughput/{name}": value for name, value in found.items()}
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self.values, trainer.global_step)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._halted = perf_counter()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if trainer.stage == "fit" and not trainer.sanity_checking:
            self._paused += perf_counter() - self._halted

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._stop_counting()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._stop_counting()

    def _stop_counting(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None
