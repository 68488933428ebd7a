"""Checks of the Trainer's arguments, each made once, when the Trainer is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .errors import ConfigError, did_you_mean

ACCELERATORS = {"auto": "auto", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
PRECISIONS = {
    "64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed",
    "fp16": "16-mixed", "fp32": "32-true", "fp64": "64-true",
    "double": "64-true", "float": "32-true",
}  # fmt: skip
"""Lightning's other names for precisions."""
RECOMPUTATIONS = ("full", "selective")
COMPILE_OPTIONS = ("backend", "mode", "options", "dynamic", "fullgraph", "disable")
"""Arguments of torch.compile."""
REMOVED = {
    "epochs": "max_epochs",
    "steps": "max_steps",
    "gpus": "accelerator='gpu', devices=…",
    "tpu_cores": "accelerator",
    "auto_select_gpus": "devices",
    "progress_bar_refresh_rate": "callbacks=[RichProgress(…)]",
    "checkpoint_callback": "enable_checkpointing",
    "weights_summary": "enable_model_summary",
    "resume_from_checkpoint": "fit(ckpt_path=…)",
    "distributed_backend": "strategy",
    "amp_level": "precision",
    "amp_backend": "precision",
    "use_amp": "precision='16-mixed'",
    "max_nb_epochs": "max_epochs",
    "stochastic_weight_avg": "a callback",
    "replace_sampler_ddp": "use_distributed_sampler",
    "track_grad_norm": "on_before_optimizer_step",
    "auto_lr_find": "a rate of your own: tuning comes with a later release",
    "auto_scale_batch_size": "a size of your own: tuning comes with a later release",
    "flush_logs_every_n_steps": "the logger's own argument",
    "weights_save_path": "ModelCheckpoint(dirpath=…)",
    "barebones": "logger=False, enable_checkpointing=False, enable_progress_bar=False",
}
"""Arguments that Lightning's Trainer once had, and what to use instead."""
GONE = {
    "fit_loop": "trainer.state for the progress, and max_epochs and max_steps of the Trainer",
    "validate_loop": "what trainer.validate returns, or trainer.callback_metrics",
    "predict_loop": "what trainer.predict returns",
    "progress_bar_dict": "trainer.progress_bar_metrics",
    "root_gpu": "trainer.strategy.device",
    "gpus": "trainer.num_devices",
    "init_module": "torch.device as a context, or configure_model",
    "evaluating": "trainer.validating or trainer.testing",
}
"""What Lightning's Trainer has or had, and where it is here."""


def unexpected(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse arguments that a Trainer does not have.

    Raises:
        ConfigError: There is one; the message names what replaces it or comes close.
    """
    for name in given:
        if name in REMOVED:
            raise ConfigError(f"Trainer has no argument {name!r}. Use {REMOVED[name]}.")
        raise ConfigError(
            f"Trainer has no argument {name!r}.{did_you_mean(name, allowed)} See help(Trainer)."
        )


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """Return ``value`` if it is among ``allowed``."""
    allowed = list(allowed)
    if value not in allowed:
        hint = (
            did_you_mean(value, [a for a in allowed if isinstance(a, str)])
            if isinstance(value, str)
            else ""
        )
        raise ConfigError(
            f"{name}={value!r} is not known.{hint} Allowed: {', '.join(map(repr, allowed))}."
        )
    return value


def whole(name: str, value: Any, least: int, *, none: Any = None, unlimited: bool = False) -> Any:
    """Return ``value`` if it is a whole number from ``least`` on; ``none`` for None.

    Args:
        name: The argument, for the message.
        value: What was given.
        least: The smallest number allowed.
        none: What None stands for.
        unlimited: Whether -1 stands for no limit, which is returned as None.
    """
    if value is None:
        return none
    if unlimited and value == -1 and not isinstance(value, bool):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        also = ", or -1 for no limit" if unlimited else ""
        raise ConfigError(
            f"{name}={value!r} must be a whole number, at least {least}{also}. "
            "Pass such a number, or leave it out."
        )
    return value


def batches(name: str, value: Any) -> int | float:
    """Return ``value`` if it is a number of batches, or a share of them from 0.0 to 1.0."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(
            f"{name}={value!r} is no number of batches. Pass a whole number (10), or a share of "
            "all batches from 0.0 to 1.0 (0.25)."
        )
    if isinstance(value, float) and value > 1.0:
        raise ConfigError(
            f"{name}={value!r} is a share of all batches and must be at most 1.0. Pass "
            f"{value // 1:.0f} for that many batches, or None for all."
        )
    return value


def switch(name: str, value: Any, default: bool = False) -> bool:
    """Return ``value`` if it is True or False, and ``default`` for None."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is a switch. Pass True or False.")
    return value


def positive(name: str, value: Any) -> float | None:
    """Return ``value`` if it is None or a finite number above 0; 0 counts as None."""
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r} must be a number above 0, or None to switch it off.")
    return float(value)


def recomputation(value: Any) -> Any:
    """Return what ``activation_checkpointing`` asks for: a name, torch's policy, or None."""
    if value is None or value is False:
        return None
    if callable(value) or isinstance(value, list):
        return value
    if value not in RECOMPUTATIONS:
        hint = did_you_mean(value, RECOMPUTATIONS) if isinstance(value, str) else ""
        raise ConfigError(
            f"activation_checkpointing={value!r} is not known.{hint} Pass 'full' to compute blocks "
            "again in backward, 'selective' to keep their matrix products and attention, a policy "
            "as torch.utils.checkpoint.create_selective_checkpoint_contexts takes it, or None."
        )
    return value


def compilation(value: Any) -> tuple[str | None, dict[str, Any]]:
    """Return what ``compile`` asks for: ``"step"``, ``"blocks"`` or None, and torch's options."""
    if value is None or isinstance(value, bool):
        return "step" if value else None, {}
    if value == "blocks":
        return "blocks", {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"compile={value!r} is not known. Pass True to compile steps, 'blocks' to compile each "
            "block, or a dict of torch.compile's options, with 'blocks': True for blocks."
        )
    for key in value:
        one_of("compile key", key, ("blocks", *COMPILE_OPTIONS))
    options = {key: option for key, option in value.items() if key != "blocks"}
    return "blocks" if switch("compile['blocks']", value.get("blocks")) else "step", options


def block_choice(value: Any) -> Any:
    """Return ``value`` if it says which parts of a module are its blocks."""
    kinds = value if isinstance(value, tuple) else (value,)
    classes = [isinstance(kind, type) for kind in kinds]
    if value is None or (classes and all(classes)) or (callable(value) and not any(classes)):
        return value
    raise ConfigError(
        f"blocks={value!r} names no blocks. Pass their class, a tuple of classes, a function of "
        "name and part that returns whether it is one, or None for the repeated parts."
    )


def device_count(choice: Any) -> int | list[int]:
    """Return how many devices, or which, ``devices`` asks for."""
    value = choice
    if isinstance(value, str):
        if value == "auto":
            return 1
        try:
            parts = [int(part) for part in value.split(",") if part.strip()]
        except ValueError:
            parts = []
        value = parts if "," in value else (parts or [0])[0]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, (list, tuple)) and value and all(type(i) is int and i >= 0 for i in value):
        return list(value)
    raise ConfigError(
        f"devices={choice!r} asks for no device. Pass how many (2), which ones ([0, 1]), or 'auto'."
    )


def precision_name(value: Any) -> Any:
    """Return the registered name that ``value`` stands for, or ``value`` itself."""
    return PRECISIONS.get(str(value), value) if isinstance(value, (int, str)) else value


def listed(given: Any) -> list[Any]:
    """Return ``given`` as a list: None as an empty one, a single thing as a list of it."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
