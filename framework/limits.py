"""The Trainer's limits, schedules and switches, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import choices
from .choices import batches, one_of, positive, switch, whole
from .errors import ConfigError
from .schedule import check_interval


class Limits:
    """How long a Trainer trains, how much of the data it reads, and what it does how often."""

    def _take(self, given: Mapping[str, Any]) -> None:
        """Take over the arguments ``given`` to the Trainer.

        Raises:
            ConfigError: One is out of its range.
        """

        def asked(check: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
            return check(name, given[name], *arguments, **options)

        dev = given["fast_dev_run"]
        dev = int(dev) if isinstance(dev, bool) else dev
        self.fast_dev_run = whole("fast_dev_run", dev, 0, none=0)
        self.max_epochs = asked(whole, "max_epochs", 0, unlimited=True)
        self.min_epochs = asked(whole, "min_epochs", 0, none=0)
        self.max_steps = asked(whole, "max_steps", 0, unlimited=True)
        self.min_steps = asked(whole, "min_steps", 0, none=0)
        if given["max_epochs"] is None and self.max_steps is None and given["max_time"] is None:
            self.max_epochs = 1000
        self.limit_train_batches = asked(batches, "limit_train_batches")
        self.limit_val_batches = asked(batches, "limit_val_batches")
        self.limit_test_batches = asked(batches, "limit_test_batches")
        self.limit_predict_batches = asked(batches, "limit_predict_batches")
        self.overfit_batches = batches("overfit_batches", given["overfit_batches"] or 0)
        if self.overfit_batches:
            self.limit_train_batches = self.limit_val_batches = self.overfit_batches
        interval = given["val_check_interval"]
        self.val_check_interval = 1.0 if interval is None else interval
        self.check_val_every_n_epoch = asked(whole, "check_val_every_n_epoch", 1)
        check_interval(self.val_check_interval, self.check_val_every_n_epoch)
        moments = choices.listed(given["validate_at"])
        self.validate_at = frozenset(one_of("validate_at", m, ("start", "end")) for m in moments)
        sanity = asked(whole, "num_sanity_val_steps", 0, none=2, unlimited=True)
        self.num_sanity_val_steps = 2**31 if sanity is None else sanity
        self.log_every_n_steps = asked(whole, "log_every_n_steps", 1, none=50)

        self.accumulate_grad_batches = asked(whole, "accumulate_grad_batches", 1, none=1)
        self.gradient_clip_val = asked(positive, "gradient_clip_val")
        self.gradient_clip_algorithm = one_of(
            "gradient_clip_algorithm", given["gradient_clip_algorithm"] or "norm", ("norm", "value")
        )
        self.deterministic = asked(one_of, "deterministic", (None, False, True, "warn"))
        is_chosen = given["benchmark"] is not None
        self.benchmark = asked(switch, "benchmark") if is_chosen else None
        self.inference_mode = asked(switch, "inference_mode", True)
        self.detect_anomaly = asked(switch, "detect_anomaly")
        self.nonfinite_loss = asked(one_of, "nonfinite_loss", ("continue", "skip", "stop"))
        self.seed_samples = asked(one_of, "seed_samples", ("batch", "sample", False))
        self.reload_dataloaders_every_n_epochs = asked(
            whole, "reload_dataloaders_every_n_epochs", 0
        )
        self.use_distributed_sampler = asked(switch, "use_distributed_sampler", True)
        self.sync_batchnorm = asked(switch, "sync_batchnorm")
        self._take_memory(given)
        if self.fast_dev_run:
            self._try_everything_briefly()

    def _take_memory(self, given: Mapping[str, Any]) -> None:
        """Take over what is recomputed, kept elsewhere, compiled and stepped early."""
        self.activation_checkpointing = choices.recomputation(given["activation_checkpointing"])
        self.activation_offload = switch("activation_offload", given["activation_offload"])
        self.optimizer_in_backward = switch("optimizer_in_backward", given["optimizer_in_backward"])
        self.compiles, self.compile_options = choices.compilation(given["compile"])
        backend = str(self.compile_options.get("backend", ""))
        if self.activation_checkpointing is not None and backend.startswith("eager"):
            # torch draws dropout anew where it computes again, so that gradients are wrong.
            raise ConfigError(
                f"compile={given['compile']!r} with activation_checkpointing: backend {backend!r} "
                "draws other random numbers when it computes again. Pass 'aot_eager', which "
                "generates no code either, or another backend."
            )
        self.block_choice = choices.block_choice(given["blocks"])

    def _try_everything_briefly(self) -> None:
        """Go by the ``fast_dev_run`` batches of each stage."""
        n = self.fast_dev_run
        self.limit_train_batches = self.limit_val_batches = n
        self.limit_test_batches = self.limit_predict_batches = n
        self.max_epochs, self.max_steps = 1, n
        self.num_sanity_val_steps, self.val_check_interval = 0, 1.0
        self.check_val_every_n_epoch, self.log_every_n_steps = 1, 1
