"""Module: a tree of layers whose parameters have full names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpiscale.backend import Array
from mpiscale.nn.parameter import Parameter


class Module:
    """A layer or model: its parts are attributes that are parameters, modules, or lists
    of modules; other containers that hold some are refused, not overlooked.

    A parameter's full name is its path from the root, as in
    `blocks.0.attention.qkv.weight`. One that is reached by several paths (tied
    weights) has the first path as its name and is listed once.
    """

    training = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as `forward`."""
        return self.forward(*args, **kwargs)  # type: ignore[attr-defined]

    def children(self) -> Iterator[tuple[str, Module]]:
        """The parts one level down, with their names; of a list, `name.index`."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item
                    elif isinstance(item, Parameter):
                        raise TypeError(_hidden(name, "a list of parameters"))
            elif isinstance(value, (tuple, dict, set)):
                items = value.values() if isinstance(value, dict) else value
                if any(isinstance(item, (Module, Parameter)) for item in items):
                    raise TypeError(_hidden(name, f"a {type(value).__name__}"))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, with full names."""
        yield prefix, self
        for name, child in self.children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters, each once, with full names."""
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Parameter) and id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{path}.{name}" if path else name), value

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def replace(self, path: str, module: Module) -> None:
        """Put `module` where the part with this full name stands."""
        *parents, last = path.split(".")
        owner: Any = self
        for name in parents:
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
        if last.isdigit():
            owner[int(last)] = module
        else:
            setattr(owner, last, module)

    def train(self, mode: bool = True) -> None:
        """Switch dropout on (training) or off (evaluation) in all parts."""
        for _, module in self.named_modules():
            module.training = mode

    def eval(self) -> None:
        """Switch dropout off."""
        self.train(False)

    def zero_grad(self) -> None:
        """Forget all gradients; the next backward writes instead of adding."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Array]:
        """Full name -> this rank's values (a copy)."""
        return {name: p.data.copy() for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take over values by full name.

        Raises:
            KeyError: if names are missing or unknown; lists them.
            ValueError: if a shape differs.
        """
        own = dict(self.named_parameters())
        missing, unknown = sorted(own.keys() - state), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise KeyError(f"missing {missing}, unknown {unknown}")
        for name, parameter in own.items():
            values = np.asarray(state[name])
            if values.shape != parameter.shape:
                raise ValueError(
                    f"{name} has shape {parameter.shape}, got values of {values.shape}"
                )
        for name, parameter in own.items():
            parameter.data[...] = state[name]


def _hidden(name: str, container: str) -> str:
    return (
        f"attribute {name!r} holds parts in {container}, where they have no names: use "
        "a list of modules, or an attribute for each"
    )


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards the mode in which the model was."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
