"""Timelines as text, pictures and traces, predicted and measured."""

import json
import time
from itertools import pairwise

import numpy as np
import pytest

from mpiscale.cli.main import main
from mpiscale.comm.trace import gather_trace, write_trace
from mpiscale.errors import InputError
from mpiscale.ops.arithmetic import multiply
from mpiscale.ops.reductions import sum as sum_of
from mpiscale.parallel.pipeline_parallel.actions import Action
from mpiscale.parallel.pipeline_parallel.draw_schedule import (
    Timeline,
    as_slices,
    as_text,
    draw,
)
from mpiscale.parallel.pipeline_parallel.proof_sheet import prove
from mpiscale.parallel.pipeline_parallel.run_schedule import PipelineRunner
from mpiscale.parallel.pipeline_parallel.schedules import NAMES, make_schedule
from mpiscale.parallel.pipeline_parallel.simulate_schedule import Costs, Span, simulate
from mpiscale.tensor import Tensor
from mpiscale.train.pipelined import measured_and_predicted
from tests.communicators import world_communicator

pytest.importorskip("matplotlib")


def timeline(name="1f1b", ranks=2, m=2, costs=None):
    sheet = prove(make_schedule(name, ranks, m), costs)
    return Timeline(name, sheet.schedule, sheet.spans)


def test_text_shows_every_pass_in_its_time():
    assert as_text(timeline()).splitlines() == [
        "1f1b",
        "rank 0 |F0  F1   .   .  BW0      .  BW1",
        "rank 1 | .  F0  BW0     F1  BW1      .   .",
    ]
    assert "W0" in as_text(timeline("zb_h1"))
    assert "F0'" in as_text(timeline("zb_v"))


@pytest.mark.parametrize("name", NAMES)
def test_text_has_all_passes_of_all_schedules(name):
    sheet = timeline(name, 4, 12)
    text = as_text(sheet)
    for actions in sheet.schedule.actions:
        for action in actions:
            if action.kind.value in ("F", "B", "W", "BW"):
                assert f"{action.kind.value}{action.micro_batch}" in text


def test_what_can_not_be_drawn_is_refused(tmp_path):
    with pytest.raises(InputError, match="too wide to read: the shortest pass is 1/"):
        as_text(timeline(costs=Costs(1, 1, 0.001), name="zb_h1"))
    with pytest.raises(InputError, match="all costs are 0"):
        as_text(timeline(costs=Costs(0, 0, 0)))
    with pytest.raises(InputError, match=r"cannot write .*\.nosuch"):
        draw([timeline()], tmp_path / "x.nosuch")


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_pictures_are_written(tmp_path, ending):
    path = tmp_path / "new" / f"pipeline.{ending}"
    draw([timeline("zb_v", 4, 8), timeline("dualpipe", 4, 8)], path)
    begin = path.read_bytes()[:100]
    assert begin.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def check_trace(events):
    """What Perfetto's importer wants of the JSON object form."""
    assert set(events) == {"traceEvents", "displayTimeUnit"}
    names = {}
    for event in events["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            names[event["pid"], event["tid"], event["name"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert (event["pid"], event["tid"], "thread_name") in names
    return names


def test_a_predicted_trace_is_well_formed(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, as_slices(timeline("zb_v", 4, 8), "predicted"))
    events = json.loads(path.read_text())
    names = check_trace(events)
    assert "predicted, rank 3" in names.values()
    passes = [e for e in events["traceEvents"] if e["ph"] == "X"]
    assert len(passes) == 3 * 8 * 8  # F, B and W of 8 stages and micro-batches
    for pid in {e["pid"] for e in passes}:
        mine = sorted((e["ts"], e["dur"]) for e in passes if e["pid"] == pid)
        for (start, length), (after, _) in pairwise(mine):
            assert start + length <= after + 1e-2


def test_the_command_draws_and_proves(capsys, tmp_path):
    out = tmp_path / "x.json"
    main(["draw", "--schedule", "zb_h1", "--costs", "1,1,1,0.5", "--out", str(out)])
    said = capsys.readouterr().out
    assert "zb_h1, 4 ranks, 8 micro-batches: bubble" in said
    assert "passes in flight, at most: rank 0: 4" in said
    assert "0->1: 8" in said and f"wrote {out}" in said
    check_trace(json.loads(out.read_text()))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--costs", "1,1"], "--costs '1,1': expected F,B,W or F,B,W,C"),
        (["--costs", "1,-1,1"], "numbers not below 0"),
        (["--costs", "0,0,0"], "--costs '0,0,0'"),
        (["--chunks", "2"], "has no --chunks, got 2"),
        (["--stages", "0"], "at least 1 for ranks"),
    ],
)
def test_the_command_refuses(args, text, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["draw", *args])
    assert leaving.value.code == 2
    assert text in capsys.readouterr().err


class Stage:
    """y = x, and the scalar sum of it on the last stage."""

    def __init__(self, stage, stages):
        self.is_first, self.is_last = stage == 0, stage == stages - 1

    def __call__(self, x, micro_batch):
        if self.is_first:
            x = Tensor(micro_batch.copy(), requires_grad=True)
        y = multiply(x, Tensor(np.array(1.0)))
        return sum_of(y) if self.is_last else y


def test_the_bubble_in_a_title_is_that_of_the_spans():
    schedule = make_schedule("1f1b", 4, 8)
    cost, late = Costs(0.02, 0.02, 0.02), 0.033
    spans = simulate(schedule, cost)
    for timeline, bubble, length in zip(
        measured_and_predicted(schedule, spans), (27.3, 27.3), (660, 660), strict=True
    ):
        assert timeline.title.endswith(f"bubble {bubble} % of {length}.0 ms")
    # One late pass: the measured step is longer, the one by median times is not.
    last = max(spans, key=lambda span: span.end)
    spans[spans.index(last)] = last._replace(end=last.end + late)
    measured, expected = measured_and_predicted(schedule, spans)
    idle = 100 * (0.18 + late * 3 / 4) / (0.66 + late)
    assert measured.title.endswith(f"measured: bubble {idle:.1f} % of 693.0 ms")
    assert expected.title.endswith("predicted: bubble 27.3 % of 660.0 ms")


@pytest.mark.mpi(ranks=(4,))
def test_a_trace_of_a_real_run_keeps_the_order_of_cause_and_effect(tmp_path):
    comm = world_communicator()
    schedule = make_schedule("1f1b", 4, 8)
    spans = []

    class Watch:
        def __init__(self, action):
            self.action, self.phase = action, comm.ledger.phase("pass", str(action))

        def __enter__(self):
            self.phase.__enter__()
            self.start = time.perf_counter()

        def __exit__(self, *error):
            spans.append(Span(comm.rank, self.action, self.start, time.perf_counter()))
            self.phase.__exit__(*error)

    stages = {comm.rank: Stage(comm.rank, 4)}
    runner = PipelineRunner(stages, comm, key=lambda m: m.shape, watch=Watch)
    runner.run(schedule, [np.ones(3)] * 8)
    mine = [(r, tuple(a), b, e) for r, a, b, e in spans]
    everyones = [
        Span(r, Action(*a), b, e)
        for of_rank in comm.allgather(mine)
        for r, a, b, e in of_rank
    ]
    assert len(everyones) == 2 * 4 * 8
    for rank in range(4):
        one = [span for span in everyones if span.rank == rank]
        assert all(before.end <= after.start for before, after in pairwise(one))
    when = {str(span.action): span for span in everyones}
    for m in range(8):
        names = [f"F(stage {s}, micro-batch {m})" for s in range(4)]
        names += [f"BW(stage {s}, micro-batch {m})" for s in (3, 2, 1, 0)]
        for before, after in pairwise(names):
            assert when[before].end <= when[after].start
    _, expected = measured_and_predicted(schedule, everyones)
    slices = gather_trace(comm, comm.ledger)
    if comm.rank == 0:
        path = tmp_path / "trace.json"
        write_trace(path, [*slices, *as_slices(expected, "predicted")])
        events = json.loads(path.read_text())
        names = check_trace(events)
        assert {"rank 0", "rank 3", "predicted, rank 2"} <= set(names.values())
        labels = [e["name"] for e in events["traceEvents"] if e["ph"] == "X"]
        assert labels.count("F(stage 3, micro-batch 7)") == 1
        assert "Isend" in labels and "Irecv" in labels
    else:
        assert slices is None
