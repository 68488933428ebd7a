"""What ``trainer.explain()`` says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .parts import with_module_callbacks
from .wiring import hooks_of

if TYPE_CHECKING:
    from .trainer import Trainer


def explanation(trainer: Trainer, module: Any) -> str:
    """Return who is called at each hook, in order, and where they come from.

    Args:
        trainer: Whose plugins, parts and callbacks.
        module: A Module whose own hooks are to be among them, or None.
    """
    chosen = {
        "strategy": trainer.strategy_choice,
        "precision": trainer.precision_choice,
        "checkpointer": trainer.checkpointer_choice,
    }
    parts = [trainer.registry.resolved(kind, choice) for kind, choice in chosen.items()]
    parts += trainer.logger_choices
    callbacks = trainer.callbacks
    if module is not None:
        callbacks = with_module_callbacks(trainer._callbacks, module)
    lines = []
    for hook, found in hooks_of(trainer, callbacks, parts, module).order.items():
        for number, impl in enumerate(found, start=1):
            wrapper = ", wraps the others" if impl.wrapper else ""
            label = hook if number == 1 else ""
            lines.append(f"{label:<28}{number}. {impl.owner} ({impl.origin}{wrapper})")
    return "\n".join(lines) or "No hook is implemented."
