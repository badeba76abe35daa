"""Carries out a schedule: the only pipeline file that communicates.

One loop over this rank's actions. A pass takes its input from the message that brought
it, or from the neighbouring stage on the same rank; what it makes waits for the action
that needs it. Nothing here knows which schedule it is.

    F       x = received or handed over;  y = stage(x)
    SEND_F  y travels; the array is kept alive until it is sent, then freed: the graph
            does not need it
    B, BW   y.backward(gradient received); with B the weights' gradients are put off
    SEND_B  x.grad travels
    W       the products that were put off

Sends do not wait: while this rank sends an activation down, the next one may be sending
a gradient up, and two that wait would wait for each other. All messages in flight are
tested after every action, which frees what has been sent, and by `mover.py` meanwhile.

Shapes may differ between micro-batches, and a receiver must know one before it has it.
Micro-batches of equal `key` have equal shapes; ahead of the first activation of a key
that a stage sends to a rank goes a header (10 integers), and never again. A gradient
has the shape of the activation that its receiver has sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from mpiscale.backend import FLOAT_DTYPES, Array, DType
from mpiscale.comm.communicator import Communicator, Request
from mpiscale.parallel.mover import Mover
from mpiscale.parallel.pipeline_parallel.actions import (
    COMPUTE,
    SENDS,
    Action,
    Kind,
    Schedule,
)
from mpiscale.tensor import Deferred, Tensor

TAGS = 2**15  # MPI promises tags up to 32767
HEADER = 10  # type, number of axes, up to 8 lengths
GRADIENTS = (Kind.B, Kind.W, Kind.BW)
ARRIVES_BY = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.BW: Kind.RECV_B}

Place = tuple[int, int]  # (stage, micro-batch)


class Stage(Protocol):
    """Layers that pass a micro-batch on; the last stage ends with a loss, a scalar."""

    def __call__(self, x: Tensor | None, micro_batch: Any) -> Tensor:
        """x: the stage before's output; None at the first stage."""


class Header(NamedTuple):
    """Shape and type of an activation."""

    shape: tuple[int, ...]
    dtype: DType

    def encode(self) -> Array:
        """[10] int64"""
        if len(self.shape) > HEADER - 2:
            raise ValueError(
                f"an activation between stages has {len(self.shape)} axes, expected at "
                f"most {HEADER - 2}"
            )
        numbers = [FLOAT_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return np.array(numbers + [0] * (HEADER - len(numbers)), np.int64)

    @classmethod
    def decode(cls, numbers: Array) -> Header:
        """The inverse."""
        kind, axes, *shape = numbers.tolist()
        return cls(tuple(shape[:axes]), FLOAT_DTYPES[kind])


# Of activations of `stage`, sent to or received from rank `peer`. With a pipeline in
# both directions two ranks may exchange those of one stage.
HeaderKey = tuple[Literal["sent", "received"], int, int, Hashable]


@dataclass
class PipelineRunner:
    """This rank's part of pipelines over `comm`.

    Attributes:
        stages: stage index -> layers, for all stages of this rank.
        comm: the pipeline's ranks.
        key: micro-batch -> what the shapes of its activations depend on.
        watch: opened around every pass: a phase of the ledger, for instance.
        after: called after every action.
    """

    stages: dict[int, Stage]
    comm: Communicator
    key: Callable[[Any], Hashable]
    watch: Callable[[Action], AbstractContextManager[None]] = lambda _: nullcontext()
    after: Callable[[Action, Run], None] = lambda action, run: None
    headers: dict[HeaderKey, Header] = field(default_factory=dict)

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[Any],
        on_last_gradient: Callable[[int], None] = lambda stage: None,
    ) -> Array:
        """Carry out `schedule`; collective over `comm`.

        Args:
            schedule: verified.
            micro_batches: the same on all ranks; passed to the stages.
            on_last_gradient: called with a stage when this step adds nothing more to
                its weights' gradients.

        Returns:
            the losses [M], float64, on every rank.
        """
        self._check_fits(schedule, micro_batches)
        run = Run(self, schedule, micro_batches)
        actions = schedule.actions[self.comm.rank]
        last = {a.stage: a for a in actions if a.kind in GRADIENTS}
        try:
            for action in actions:
                run.carry_out(action)
                if last.get(action.stage) == action:
                    on_last_gradient(action.stage)
        finally:
            run.mover.stop()
        for stage in self.stages.keys() - last.keys():  # no micro-batch came by
            on_last_gradient(stage)
        return run.finish()

    def _check_fits(self, schedule: Schedule, micro_batches: Sequence[Any]) -> None:
        mine = schedule.stage_map.stages_of(self.comm.rank)
        for what, got, expected in (
            ("ranks", self.comm.size, schedule.ranks),
            ("micro-batches", len(micro_batches), schedule.micro_batches),
            ("stages of this rank", sorted(self.stages), mine),
        ):
            if got != expected:
                raise ValueError(
                    f"schedule {schedule.name!r} is for {expected} {what}, got {got}"
                )


class Run:
    """The state of one step on one rank.

    Attributes:
        outputs: of passes whose backward is still to come.
        put_off: weight gradients that W will compute.
    """

    def __init__(
        self, runner: PipelineRunner, schedule: Schedule, micro_batches: Sequence[Any]
    ) -> None:
        self.runner, self.schedule = runner, schedule
        self.comm, self.micro_batches = runner.comm, micro_batches
        self.inputs: dict[Place, Tensor] = {}  # until their gradients have left
        self.outputs: dict[Place, Tensor] = {}
        self.put_off: dict[Place, Deferred] = {}
        self.losses = np.zeros(schedule.micro_batches)
        self.mover = Mover()
        self._mail: dict[int, Mail] = defaultdict(lambda: Mail(self))
        self._trains = schedule.trains

    def carry_out(self, action: Action) -> None:
        """One action, whatever its kind."""
        if action.kind in COMPUTE:
            arrived = self._wait_for_input(action)
            with self.runner.watch(action):
                self._pass(action, arrived)
        elif action.kind in SENDS:
            self._send(action)
        else:
            source = self.schedule.sender(action)
            assert source is not None
            self._mail[source].expect(action, source)
        self.runner.after(action, self)
        self.mover.move()

    def finish(self) -> Array:
        """Wait for what is still being sent; all ranks get the losses."""
        for request in self.mover.in_flight:
            request.Wait()
        left = [*self.inputs, *self.outputs, *self.put_off]
        assert not left, f"passes {left} are not complete"  # verify() proves it
        everyones = np.empty_like(self.losses)
        self.comm.Allreduce(self.losses, everyones)
        return everyones

    # Passes

    def _pass(self, action: Action, arrived: Array | None) -> None:
        place = (action.stage, action.micro_batch)
        if action.kind is Kind.F:
            self._forward(place, arrived)
        elif action.kind is Kind.W:
            for write in self.put_off.pop(place):
                write()
        elif action.kind is Kind.B:
            self.put_off[place] = []
            self._backward(place, arrived, self.put_off[place])
        else:
            self._backward(place, arrived, None)

    def _forward(self, place: Place, arrived: Array | None) -> None:
        stage, m = place
        x = None
        if stage > 0:
            before = self._take_output((stage - 1, m)) if arrived is None else arrived
            x = Tensor(before, requires_grad=self._trains)
            if self._trains:
                self.inputs[place] = x
        y = self.runner.stages[stage](x, self.micro_batches[m])
        self.outputs[place] = y
        if stage == self.schedule.stages - 1:
            self.losses[m] = y.item()
            self._take_output(place)

    def _backward(
        self, place: Place, arrived: Array | None, deferred: Deferred | None
    ) -> None:
        stage, m = place
        if arrived is None and stage < self.schedule.stages - 1:
            arrived = self.inputs.pop((stage + 1, m)).grad  # of a stage on this rank
        self.outputs.pop(place).backward(arrived, deferred)
        if stage > 0:
            _free_values(self.inputs[place])

    def _take_output(self, place: Place) -> Array:
        """The output's values, which its own backward does not need."""
        y = self.outputs[place]
        values = y.data
        _free_values(y)
        if not self._trains:
            del self.outputs[place]
        return values

    # Messages

    def _wait_for_input(self, action: Action) -> Array | None:
        """What another rank's message brings for this pass, if one does."""
        kind = ARRIVES_BY.get(action.kind)
        if kind is None:
            return None
        receive = Action(kind, action.stage, action.micro_batch)
        source = self.schedule.sender(receive)
        return None if source is None else self._mail[source].wait(receive)

    def _send(self, action: Action) -> None:
        to = self.schedule.receiver(action)
        assert to is not None
        place, tag = (action.stage, action.micro_batch), self.tag(action)
        if action.kind is Kind.SEND_F:
            array = self._take_output(place)
            self._announce(action, array, to)
        else:
            grad = self.inputs.pop(place).grad
            assert grad is not None
            array = grad
        self._start_send(array, to, tag)

    def _announce(self, action: Action, array: Array, to: int) -> None:
        """Send the header of an activation, if it is the first of its key."""
        key: HeaderKey = ("sent", to, action.stage, self.key(action))
        header = Header(array.shape, array.dtype)
        if key not in self.runner.headers:
            self.runner.headers[key] = header
            self._start_send(header.encode(), to, self.tag(action))
        if self.runner.headers[key] != header:
            before = self.runner.headers[key]
            raise ValueError(
                f"stage {action.stage} made {header.dtype} {header.shape}, but "
                f"{before.dtype} {before.shape} of an earlier micro-batch with the "
                f"same key {key[3]!r}: `key` must tell them apart"
            )

    def _start_send(self, array: Array, to: int, tag: int) -> None:
        with self.mover.lock:
            self.mover.in_flight.append(self.comm.Isend(array, to, tag))

    def start_receive(self, array: Array, source: int, tag: int) -> Request:
        """Post a receive, which moves on while passes are computed."""
        with self.mover.lock:
            request = self.comm.Irecv(array, source, tag)
            self.mover.in_flight.append(request)
        return request

    def wait(self, request: Request) -> None:
        """For a receive."""
        with self.mover.lock:
            request.Wait()

    def key(self, message: Action) -> Hashable:
        """What the shape of its micro-batch's activations depends on."""
        return self.runner.key(self.micro_batches[message.micro_batch])

    def tag(self, send: Action) -> int:
        """Tells messages apart; their order does too."""
        backward = send.kind is Kind.SEND_B
        number = send.micro_batch * self.schedule.stages + send.stage
        return (2 * number + backward) % TAGS


class Mail:
    """Messages from one rank, which come in the order in which they are expected.

    A receive can be posted only when its shape is known; behind one that still waits
    for a header the others wait too.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: deque[tuple[Action, int]] = deque()  # not posted yet
        self._header: tuple[Array, Request] | None = None  # of the first that waits
        self._posted: dict[Action, tuple[Array, Request]] = {}

    def expect(self, receive: Action, source: int) -> None:
        """Post the receive now, or as soon as its shape is known."""
        self._waiting.append((receive, source))
        self._post_known()

    def wait(self, receive: Action) -> Array:
        """The message, as soon as it is here."""
        while receive not in self._posted:
            if self._header is not None:
                self._wait_for_header()
            self._post_known()
        array, request = self._posted.pop(receive)
        self._run.wait(request)
        return array

    def _post_known(self) -> None:
        run = self._run
        while self._waiting and self._header is None:
            receive, source = self._waiting[0]
            send = _matching_send(receive)
            header = run.runner.headers.get(self._key(receive, source))
            if header is None and receive.kind is Kind.RECV_B:
                return  # the activation has not left yet, from which the shape is known
            if header is None:
                numbers = np.empty(HEADER, np.int64)
                request = run.start_receive(numbers, source, run.tag(send))
                self._header = (numbers, request)
                return
            array = np.empty(header.shape, header.dtype)
            request = run.start_receive(array, source, run.tag(send))
            self._posted[receive] = (array, request)
            self._waiting.popleft()

    def _wait_for_header(self) -> None:
        assert self._header is not None
        numbers, request = self._header
        self._run.wait(request)
        self._run.runner.headers[self._key(*self._waiting[0])] = Header.decode(numbers)
        self._header = None

    def _key(self, receive: Action, source: int) -> HeaderKey:
        """Of an activation received, or of the one whose gradient is received."""
        key = self._run.key(receive)
        if receive.kind is Kind.RECV_F:
            return "received", source, receive.stage - 1, key
        return "sent", source, receive.stage, key


def _matching_send(receive: Action) -> Action:
    if receive.kind is Kind.RECV_F:
        return Action(Kind.SEND_F, receive.stage - 1, receive.micro_batch)
    return Action(Kind.SEND_B, receive.stage + 1, receive.micro_batch)


def _free_values(tensor: Tensor) -> None:
    """Keep the shape, which backward checks, and let the memory go."""
    tensor.data = np.broadcast_to(np.zeros((), tensor.dtype), tensor.shape)
