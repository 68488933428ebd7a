"""What every strategy and every precision must do, whoever wrote it.

Each check raises an AssertionError that says what was broken. Call them from your plugin's tests
with the name you registered, or with an object.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from ..dtensors import is_split
from .small import Regression, batches, quiet_trainer


def by_hand(dtype: torch.dtype, steps: int, clip: float | None = None) -> Regression:
    """Return the small Module as a hand-written loop trains it, on the CPU."""
    module = Regression().to(dtype)
    optimizer = module.configure_optimizers()
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs.to(dtype)), targets.to(dtype)).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module


def check_strategy(strategy: Any, **choices: Any) -> None:
    """Check that training under ``strategy`` is training: the weights of a hand-written loop.

    Args:
        strategy: A registered name, or a strategy.
        **choices: Further arguments of the Trainer, such as ``devices``.
    """
    for clip in (None, 0.5):
        module = Regression()
        trainer = quiet_trainer(
            strategy=strategy, precision="64-true", gradient_clip_val=clip, **choices
        )
        result = trainer.fit(module, batches(6), batches(2))
        expected = by_hand(torch.float64, 6, clip)
        assert result.steps == 6, f"6 batches gave {result.steps} steps"
        weight: Any = module.layer.weight
        whole = weight.full_tensor() if is_split(weight) else weight
        close = torch.allclose(whole.cpu(), expected.layer.weight, atol=1e-12)
        assert close, f"gradient_clip_val={clip}: the weights are not those of a hand-written loop"
        assert "val/loss" in result.metrics, "a validation logged nothing"
    strategy = trainer.strategy
    strategy.connect(trainer.accelerator, trainer.devices, trainer.num_nodes)
    _check_collectives(strategy)
    strategy.close()


def _check_collectives(strategy: Any) -> None:
    size = strategy.world_size
    assert 0 <= strategy.rank < size, f"rank {strategy.rank} of {size}"
    value = torch.tensor([1.0, 2.0], device=strategy.device)
    gathered: Tensor = strategy.all_gather(value)
    assert gathered.shape == (size, 2), f"all_gather gave {tuple(gathered.shape)}, not ({size}, 2)"
    assert torch.equal(strategy.reduce(value, "sum"), value * size), "reduce(value, 'sum')"
    for op in ("mean", "min", "max"):
        assert torch.equal(strategy.reduce(value, op), value), f"reduce(value, {op!r})"
    assert strategy.broadcast({"a": 1}) == {"a": 1}, "broadcast changed what it was given"


def check_precision(precision: Any, **choices: Any) -> None:
    """Check that ``precision`` trains, counts its updates, and can be saved and restored.

    Args:
        precision: A registered name, or a precision.
        **choices: Further arguments of the Trainer.
    """
    module, data = Regression(), batches(20)
    trainer = quiet_trainer(precision=precision, max_epochs=3, **choices)
    before = _loss(Regression(), data)
    result = trainer.fit(module, data, data[:2])
    state = trainer.state
    assert result.steps + state.skipped == 60, f"{result.steps} steps and {state.skipped} skipped"
    after = _loss(module, data)
    assert after < before / 10, f"the loss went from {before} to {after} in 60 steps"
    part = trainer.precision_plugin
    assert part.scale(torch.tensor(1.0)).ndim == 0, "scale(loss) changed the loss's shape"
    file = io.BytesIO()
    torch.save(part.state_dict(), file)
    file.seek(0)
    part.load_state_dict(torch.load(file, weights_only=True))


def _loss(module: Regression, data: list[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        weights = module.layer.float().cpu()
        errors = [nn.functional.mse_loss(weights(x), y) for x, y in data]
    return float(torch.stack(errors).mean())
