"""The states of optimizers, schedules and precision, as a checkpoint holds them and back again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .errors import CheckpointError, LeydenError
from .rank_zero import rank_zero_warn
from .shards import kept

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .run import Run

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch puts into names where a part is compiled or recomputed; never in a file."""


def optimizer_state(run: Run, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer`` by the names of its parameters, with its kind."""
    saved, names = optimizer.state_dict(), names_in(run, optimizer)
    states = saved["state"]
    flat = [name for group in names for name in group]
    return {
        "state": {flat[k] if type(k) is int else k: state for k, state in states.items()},
        "param_groups": [
            {**group, "params": own}
            for group, own in zip(saved["param_groups"], names, strict=True)
        ],
        "leyden": {"kind": type(optimizer).__name__},
    }


def names_in(run: Run, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group; of those not in the Module, a number."""
    names = {id(p): clean(name) for name, p in run.module.named_parameters()}
    groups = optimizer.param_groups
    return [
        [names.get(id(p), f"{index}.{at}") for at, p in enumerate(group["params"])]
        for index, group in enumerate(groups)
    ]


def check_same(optimizer: Optimizer, own: list[list[str]], state: Mapping[str, Any]) -> None:
    """Refuse a state of another optimizer, or of the same over other parameters.

    Raises:
        CheckpointError: It is one.
    """
    identity = state.get("leyden", {})
    kind = type(optimizer).__name__
    # Format 1 has positions where there are names now, and the names here.
    saved = identity.get("parameters") or [group["params"] for group in state["param_groups"]]
    is_named = all(isinstance(name, str) for group in saved for name in group)
    pairs: list[tuple[str, Any, Any]] = [("kind", identity.get("kind", kind), kind)]
    if is_named and [sorted(group) for group in saved] != [sorted(group) for group in own]:
        pairs.append(("parameters", saved, own))
    for which, then, now in pairs:
        if then != now:
            raise CheckpointError(
                f"The checkpoint's optimizer and that of configure_optimizers() differ in {which}: "
                f"{then!s:.200} was saved, and {now!s:.200} is there. Return the same optimizer "
                "over the same parameters, or begin anew from the weights alone with "
                "load_from_checkpoint."
            )


def restore_optimizers(
    run: Run,
    states: Sequence[dict[str, Any]] | None,
    schedules: Sequence[dict[str, Any]] | None,
    precision: dict[str, Any] | None,
) -> None:
    """Take over the states of optimizers, schedules and precision; None leaves them as made.

    Without schedules, the options of optimizers are this run's too, and its own schedules are
    brought to where the counters are.

    Raises:
        CheckpointError: There are more or fewer of them than this run has.
    """
    if states is not None:
        _require_as_many("optimizers", states, run.optimizers)
        for optimizer, state in zip(run.optimizers, states, strict=True):
            _restore_optimizer(run, optimizer, state, keep_options=schedules is None)
    if schedules is not None:
        _require_as_many("schedulers", schedules, run.schedulers)
        for config, state in zip(run.schedulers, schedules, strict=True):
            with taking_over(f"state of {type(config.scheduler).__name__}"):
                config.scheduler.load_state_dict(state)
                if states is None:
                    _set_rates(config.scheduler)
    else:
        advance_schedules(run)
    if precision is not None:
        with taking_over("state of the precision"):
            run.precision.load_state_dict(precision)


def _require_as_many(kind: str, saved: Sequence[Any], own: Sequence[Any]) -> None:
    if len(saved) != len(own):
        part = {"optimizers": "optimizer", "schedulers": "schedule"}[kind]
        raise CheckpointError(
            f"The checkpoint holds {len(saved)} {kind} and configure_optimizers() returned "
            f"{len(own)}. Return as many, or leave {part!r} out of fit(restore=…)."
        )


def _restore_optimizer(
    run: Run, optimizer: Optimizer, state: Mapping[str, Any], keep_options: bool
) -> None:
    names = names_in(run, optimizer)
    check_same(optimizer, names, state)
    own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    with taking_over(f"state of {type(optimizer).__name__}"):
        optimizer.load_state_dict(_by_position(optimizer, names, state))
    if keep_options:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(options)


def _by_position(
    optimizer: Optimizer, names: list[list[str]], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``state`` as torch takes it, laid out as the parameters are on the ranks."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved = state.get("leyden", {}).get("parameters") or [
        g["params"] for g in state["param_groups"]
    ]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    flat = [name for group in names for name in group]
    places = {name: position for position, name in enumerate(flat)}
    order = [name for group in saved for name in group]
    # Files of others know positions alone.
    at = {key: places.get(name, i) for i, (key, name) in enumerate(zip(keys, order, strict=True))}
    found = {
        at.get(key, key): {name: kept(value, params[at[key]]) for name, value in values.items()}
        if at.get(key, len(params)) < len(params)
        else values
        for key, values in state["state"].items()
    }
    positions = iter(range(len(params)))
    groups = [
        {**group, "params": [next(positions) for _ in own]}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    return {"state": found, "param_groups": groups}


def _set_rates(scheduler: Any) -> None:
    """Give an optimizer that is new the rates at which its restored schedule stands."""
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


def advance_schedules(run: Run) -> None:
    """Bring schedules that were not restored to where the counters are."""
    for config in run.schedulers:
        done = run.state.step if config.interval == "step" else run.state.epoch
        if config.monitor is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch misses the optimizer's steps
                for _ in range(done // config.frequency):
                    config.scheduler.step()


def replaced_options(run: Run, states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the optimizers' rates and other options that the checkpoint's are to replace."""
    replaced: dict[str, str] = {}
    for optimizer, state in zip(run.optimizers, states, strict=False):
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
            # A schedule such as OneCycleLR moves the momentum too.
            moved = {"params", "initial_lr", *(["momentum"] if "initial_lr" in saved else [])}
            for name in group.keys() & saved.keys() - moved:
                now, then = group[name], saved[name]
                if name == "lr" and "initial_lr" in group and "initial_lr" in saved:
                    # A schedule moves the rate away from where it began, which is what was chosen.
                    now, then = group["initial_lr"], saved["initial_lr"]
                if _is_number(now) and _is_number(then) and float(now) != float(then):
                    replaced[name] = f"{name}={float(then):g} rather than {float(now):g}"
    return [replaced[name] for name in sorted(replaced)]


def tell_replaced(options: list[str]) -> None:
    """Warn that the checkpoint's ``options`` have replaced those of ``configure_optimizers``."""
    if options:
        rank_zero_warn(
            f"The optimizer goes on with the checkpoint's {', '.join(options)} of "
            "configure_optimizers(). To begin with the new values, leave 'schedule' out: "
            "fit(…, restore=('weights', 'optimizer', 'counters', 'callbacks', 'data', 'random'))."
        )


def _is_number(value: Any) -> bool:
    scalar = isinstance(value, Tensor) and value.numel() == 1
    return scalar or (isinstance(value, (int, float)) and not isinstance(value, bool))


@contextmanager
def taking_over(what: str) -> Iterator[None]:
    """Raise whatever goes wrong inside as what it is: a checkpoint that does not fit."""
    try:
        yield
    except LeydenError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint's {what} does not fit this run, or is damaged: "
            f"{type(error).__name__}: {error}. Resume with the code and the settings it was saved "
            "with, or begin anew from the weights alone with load_from_checkpoint."
        ) from error


def clean(name: str) -> str:
    """Return a parameter's name without what torch adds to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
