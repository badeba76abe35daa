"""An array that remembers the op that made it, so that it can be differentiated.

The graph consists of `Node`s, not of tensors: an intermediate result lives only as
long as an op's `backward` has captured its array. The walk is iterative (a graph of
100,000 nodes needs no recursion) and takes a node when all uses of its output have
added their part, so every gradient is complete when it is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiscale.backend import Array, DType, is_float

_recording: ContextVar[bool] = ContextVar("recording", default=True)


@contextmanager
def no_grad() -> Iterator[None]:
    """Ops inside build no graph: evaluation and generation need none."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


class LazyGradient:
    """A gradient that is computed straight into its place, now or later.

    `write(out, accumulate)` puts the value into `out`, or adds it. A weight's product
    x^T dy goes into the flat gradient buffer without a temporary, and can be put off
    (zero-bubble pipelines) by handing `backward` a list that collects it.
    """

    def __init__(
        self,
        write: Callable[[Array, bool], None],
        shape: tuple[int, ...],
        dtype: DType,
    ) -> None:
        self.write, self.shape, self.dtype = write, shape, dtype

    def array(self) -> Array:
        """The value in memory of its own."""
        out: Array = np.empty(self.shape, self.dtype)
        self.write(out, False)
        return out


Gradient = Array | LazyGradient | None
Backward = Callable[[Array], tuple[Gradient, ...]]
MultiBackward = Callable[[tuple[Array | None, ...]], tuple[Gradient, ...]]
Deferred = list[Callable[[], None]]


class Node:
    """An op in the graph: turns the gradients of its outputs into those of its inputs.

    `inputs` holds, for each input, where its gradient goes: (node, which output of
    it), a leaf tensor, or None where no gradient is wanted.
    """

    __slots__ = ("backward", "grads", "inputs", "shapes", "summed")

    def __init__(
        self,
        inputs: tuple[tuple[Node, int] | Tensor | None, ...],
        backward: MultiBackward,
        shapes: list[tuple[int, ...]],
    ) -> None:
        self.inputs, self.backward, self.shapes = inputs, backward, shapes
        self.grads: list[Array | None] = [None] * len(shapes)
        self.summed = [False] * len(shapes)  # whether grads[i] is memory of our own

    def add_grad(self, output: int, grad: Array) -> None:
        """Add one use's part to the gradient of `output`."""
        _check_shape(grad.shape, self.shapes[output])
        so_far = self.grads[output]
        if so_far is None:
            self.grads[output] = grad  # may be shared with another input: not ours
        elif self.summed[output]:
            so_far += grad
        else:  # asarray: a sum of 0-d arrays is a number, to which += would not add
            self.grads[output] = np.asarray(so_far + grad)
            self.summed[output] = True


class Tensor:
    """An array and, unless it is a leaf, the op that made it.

    Leaves are parameters and inputs; `backward` leaves their gradients in `.grad`,
    in the memory that `grad_space()` gives if that is set. `on_grad_ready` is called
    with the leaf as soon as its gradient is complete.
    """

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.data: Array = np.asarray(data)
        if requires_grad and not is_float(self.data.dtype):
            raise TypeError(
                f"only floating-point tensors have gradients, got {self.data.dtype}"
            )
        self.requires_grad = requires_grad
        self.grad: Array | None = None
        self.grad_space: Callable[[], Array] | None = None
        self.on_grad_ready: Callable[[Tensor], None] | None = None
        self._source: tuple[Node, int] | None = None

    @classmethod
    def from_op(
        cls, data: Array, inputs: Sequence[Tensor], backward: Backward
    ) -> Tensor:
        """Wrap an op's output; `backward` turns its gradient into the inputs'.

        The arrays that `backward` returns must be new, or the gradient it was given
        or views of that; it must not write to the gradient it was given.
        """

        def only_output(grads: tuple[Array | None, ...]) -> tuple[Gradient, ...]:
            assert grads[0] is not None
            return backward(grads[0])

        return cls.from_multi_op((data,), inputs, only_output)[0]

    @classmethod
    def from_multi_op(
        cls, datas: Sequence[Array], inputs: Sequence[Tensor], backward: MultiBackward
    ) -> list[Tensor]:
        """As `from_op`, for several outputs; an unused one has gradient None."""
        outputs = [Tensor(data) for data in datas]
        if _recording.get() and any(x.requires_grad for x in inputs):
            targets = tuple(x._gradient_target() for x in inputs)
            node = Node(targets, backward, [out.shape for out in outputs])
            for i, out in enumerate(outputs):
                out.requires_grad, out._source = True, (node, i)
        return outputs

    def _gradient_target(self) -> tuple[Node, int] | Tensor | None:
        if not self.requires_grad:
            return None
        return self._source or self

    def backward(
        self, grad: Array | None = None, deferred: Deferred | None = None
    ) -> None:
        """Add d(self)/d(leaf) to the `.grad` of every leaf, and free the graph.

        Args:
            grad: gradient of this tensor; ones if left out.
            deferred: if given, weight gradients are not computed but appended here,
                as calls to be made later in the same order.
        """
        if not self.requires_grad:
            raise ValueError(
                "backward() on a tensor that needs no gradient: none of the tensors "
                "it was computed from has requires_grad, or no_grad() was active"
            )
        grad = np.ones_like(self.data) if grad is None else np.asarray(grad)
        _check_shape(grad.shape, self.shape)
        if self._source is None:
            self._accumulate(grad)
            self._ready()
        else:
            _walk(*self._source, grad, deferred)

    def _accumulate(self, grad: Array | LazyGradient) -> None:
        """Add to `.grad`: the first part is written, later ones are added."""
        _check_shape(grad.shape, self.shape)
        accumulate = self.grad is not None
        if self.grad is None:
            space = self.grad_space
            self.grad = space() if space else np.empty(self.shape, self.dtype)
        if isinstance(grad, LazyGradient):
            grad.write(self.grad, accumulate)
        elif accumulate:
            self.grad += grad
        else:
            self.grad[...] = grad

    def _ready(self) -> None:
        if self.on_grad_ready is not None:
            self.on_grad_ready(self)

    def detach(self) -> Tensor:
        """The same array, cut off from the graph."""
        return Tensor(self.data)

    def item(self) -> float:
        """The value of a tensor of one element."""
        return float(self.data.item())

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.data.size

    @property
    def dtype(self) -> DType:
        """Type of the elements."""
        return self.data.dtype

    def __bool__(self) -> bool:
        return bool(self.data)  # NumPy refuses more than one element

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({self.data!r}{grad})"

    # The operators are bound by ops/operators.py: ops import Tensor, not the reverse.
    __array_ufunc__ = None  # array + tensor is asked of the tensor, not of NumPy
    if TYPE_CHECKING:

        def __add__(self, other: Tensor | Array | float) -> Tensor: ...
        def __radd__(self, other: Array | float) -> Tensor: ...
        def __sub__(self, other: Tensor | Array | float) -> Tensor: ...
        def __rsub__(self, other: Array | float) -> Tensor: ...
        def __mul__(self, other: Tensor | Array | float) -> Tensor: ...
        def __rmul__(self, other: Array | float) -> Tensor: ...
        def __truediv__(self, other: Tensor | Array | float) -> Tensor: ...
        def __rtruediv__(self, other: Array | float) -> Tensor: ...
        def __pow__(self, exponent: float) -> Tensor: ...
        def __matmul__(self, other: Tensor) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __getitem__(self, key: Any) -> Tensor: ...


def _walk(root: Node, output: int, grad: Array, deferred: Deferred | None) -> None:
    """Carry out every node's backward once all uses of its outputs are done."""
    uses = _count_uses(root)
    put_off: set[int] = set()  # leaves with a gradient in `deferred`
    root.add_grad(output, grad)
    ready = [root]
    while ready:
        node = ready.pop()
        grads: tuple[Gradient, ...] = (None,) * len(node.inputs)
        if any(g is not None for g in node.grads):
            grads = node.backward(tuple(node.grads))
        for target, part in zip(node.inputs, grads, strict=True):
            if target is None:
                continue
            owner = target if isinstance(target, Tensor) else target[0]
            uses[id(owner)] -= 1
            last_use = uses[id(owner)] == 0
            if isinstance(target, Tensor):
                _hand_to_leaf(target, part, last_use, deferred, put_off)
                continue
            if part is not None:
                part = part.array() if isinstance(part, LazyGradient) else part
                target[0].add_grad(target[1], part)
            if last_use:
                ready.append(target[0])
        _free(node)


def _hand_to_leaf(
    leaf: Tensor,
    part: Gradient,
    last_use: bool,
    deferred: Deferred | None,
    put_off: set[int],
) -> None:
    if isinstance(part, LazyGradient) and deferred is not None:
        put_off.add(id(leaf))
        deferred.append(lambda: leaf._accumulate(part))
    elif part is not None:
        leaf._accumulate(part)
    if not last_use:
        return
    if deferred is not None and id(leaf) in put_off:
        deferred.append(leaf._ready)
    elif leaf.grad is not None:
        leaf._ready()


def _count_uses(root: Node) -> dict[int, int]:
    """How many times the graph below `root` uses each node and each leaf."""
    uses: dict[int, int] = {}
    stack = [root]
    while stack:
        for target in stack.pop().inputs:
            if target is None:
                continue
            owner = target if isinstance(target, Tensor) else target[0]
            uses[id(owner)] = uses.get(id(owner), 0) + 1
            if isinstance(owner, Node) and uses[id(owner)] == 1:
                stack.append(owner)
    return uses


def _free(node: Node) -> None:
    """Drop what the node captured; a second backward through it says so."""
    node.inputs, node.backward = (), _already_freed
    node.grads = [None] * len(node.shapes)
    node.summed = [False] * len(node.shapes)


def _already_freed(grads: tuple[Array | None, ...]) -> tuple[Gradient, ...]:
    raise RuntimeError(
        "backward() a second time through the same graph: it is freed as backward "
        "goes. Run the forward pass again, or add the losses and call backward once"
    )


def _check_shape(got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise ValueError(f"gradient of shape {got} for a tensor of shape {expected}")
