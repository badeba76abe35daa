"""Schedules as data: proved for every size, and equal to the published formulas."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mpiscale.errors import InputError
from mpiscale.parallel.pipeline_parallel.actions import Action, Kind, Loop, Schedule
from mpiscale.parallel.pipeline_parallel.activations_in_flight import (
    in_flight,
    peak_bytes,
)
from mpiscale.parallel.pipeline_parallel.insert_communication import (
    insert_communication,
)
from mpiscale.parallel.pipeline_parallel.proof_sheet import prove
from mpiscale.parallel.pipeline_parallel.schedules import (
    LOOPED,
    NAMES,
    forward_schedule,
    make_schedule,
)
from mpiscale.parallel.pipeline_parallel.simulate_schedule import Costs
from mpiscale.parallel.pipeline_parallel.verify_schedule import ScheduleError, verify

REFERENCE = Path(__file__).parents[2] / "reference"
RATES = json.loads((REFERENCE / "zero_bubble_rates.json").read_text())["rows"]
FORMULAS = {
    row["schedule"]: row
    for row in json.loads((REFERENCE / "pipeline_schedules.json").read_text())[
        "schedules"
    ]
}
each_row = pytest.mark.parametrize(
    "row", RATES, ids=[f"{row['model']}-{row['micro_batches']}" for row in RATES]
)
COSTS = [(1, 1, 1), (2, 3, 1), (1, 1.5, 0.5), (3, 4, 3)]
F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def chunks_of(name):
    return (1, 2, 3) if name in LOOPED else (1,)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_proved(name):
    """B28: fewer micro-batches than ranks, numbers that divide nothing."""
    sizes = [(ranks, m) for ranks in range(1, 5) for m in range(1, 10)]
    for ranks, m in [*sizes, (5, 7), (6, 3), (6, 13), (7, 16), (8, 5), (8, 17)]:
        for chunks in chunks_of(name):
            schedule = make_schedule(name, ranks, m, chunks)
            forward = [a for acts in schedule.actions for a in acts if a.kind is F]
            assert len(forward) == schedule.stages * m
            forward_schedule(schedule, m)


def test_interleaving_takes_every_group_that_fills_the_pipeline():
    for ranks in range(1, 6):
        for m in range(1, 12):
            for chunks in (1, 2, 3):
                for group in range(min(ranks, m), m + 1):
                    make_schedule("interleaved_1f1b", ranks, m, chunks, group)
                if min(ranks, m) > 1:
                    with pytest.raises(InputError, match="must fill"):
                        make_schedule(
                            "interleaved_1f1b", ranks, m, chunks, min(ranks, m) - 1
                        )


# Closed formulas, evaluated as they are printed


def formula(schedule, key, **letters):
    names = {k.lower(): v for k, v in letters.items()} | letters
    return eval(FORMULAS[schedule][key], {}, names)  # the file is our own


@pytest.mark.parametrize("f, b, w", COSTS)
@pytest.mark.parametrize("p, m", [(1, 1), (2, 4), (3, 7), (4, 8), (4, 4), (8, 24)])
@pytest.mark.parametrize(
    ("name", "row"), [("gpipe", "GPipe (all forward, all backward)"), ("1f1b", "1F1B")]
)
def test_bubbles_of_gpipe_and_1f1b(name, row, p, m, f, b, w):
    sheet = prove(make_schedule(name, p, m), Costs(f, b, w))
    letters = {"TF": f, "TB": b if name == "1f1b" else b + w, "TW": w}
    assert sheet.bubble == pytest.approx(formula(row, "bubble", p=p, m=m, **letters))
    ideal = m * (f + b + w)
    over = formula(row, "bubble_over_ideal", p=p, m=m)
    assert sheet.bubble == pytest.approx(over * ideal)


@pytest.mark.parametrize("f, b, w", COSTS)
@pytest.mark.parametrize("p, m, v", [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 6, 4)])
@pytest.mark.parametrize("name", LOOPED)
def test_bubbles_of_looped_schedules(name, p, m, v, f, b, w):
    sheet = prove(make_schedule(name, p, m, v), Costs(f, b, w))
    letters = {"p": p, "m": m, "v": v, "tf": f, "tb": b + w}
    assert sheet.bubble == pytest.approx(
        formula("interleaved 1F1B", "bubble", **letters)
    )
    over = formula("interleaved 1F1B", "bubble_over_ideal", **letters)
    assert sheet.bubble == pytest.approx(over * m * (f + b + w))


@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (3, 4, 3), (1, 1.5, 0.5)])
@pytest.mark.parametrize("p, m", [(2, 8), (4, 12), (8, 24)])
def test_bubbles_of_zero_bubble_schedules(p, m, f, b, w):
    letters = {"p": p, "m": m, "TF": f, "TB": b, "TW": w}
    h1 = prove(make_schedule("zb_h1", p, m), Costs(f, b, w))
    longest = h1.cost - m * (f + b + w)
    assert longest == pytest.approx(formula("ZB-H1", "bubble", **letters))
    h2 = prove(make_schedule("zb_h2", p, m), Costs(f, b, w))
    longest = h2.cost - m * (f + b + w)
    assert longest == pytest.approx(formula("ZB-H2", "bubble", **letters))


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_zb_v_has_no_bubble_when_all_passes_take_equally_long(p):
    for m in (2 * p, 2 * p + 1, 4 * p):
        assert prove(make_schedule("zb_v", p, m)).bubble == pytest.approx(0)


@pytest.mark.parametrize("f, b, w", COSTS)
@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_bubbles_of_dualpipe(name, p, f, b, w):
    """The published formula: a forward and a backward side by side end together."""
    row, ranks = ("DualPipe", p) if name == "dualpipe" else ("DualPipeV (README)", p)
    stages = ranks if name == "dualpipe" else 2 * ranks
    share = 1 if name == "dualpipe" else 0.5  # a rank's layers in two stages
    for m in (2 * p, 2 * p + 2, 5 * p):
        both = Costs(f, b, w, side_by_side=f + b + w)
        sheet = prove(make_schedule(name, ranks, m), both)
        letters = {"PP": stages, "F_and_B": f + b + w, "B": b + w, "W": w}
        expected = share * formula(row, "bubble", **letters)
        assert sheet.bubble == pytest.approx(expected)
        serial = prove(make_schedule(name, ranks, m), Costs(f, b, w))
        assert serial.bubble <= sheet.bubble + 1e-9


@pytest.mark.parametrize("p", [2, 4, 8])
def test_few_micro_batches_take_the_published_time(p):
    f, b, w = 2.0, 3.0, 1.0
    for m in range(1, p + 1):
        end = max(
            s.end for s in prove(make_schedule("1f1b", p, m), Costs(f, b, w)).spans
        )
        letters = {"m": m, "p": p, "TF": f, "TB": b, "TW": w}
        assert end == pytest.approx(formula("1F1B, m <= p", "total_time", **letters))


@pytest.mark.parametrize(
    "row", RATES, ids=lambda r: f"{r['model']}-{r['micro_batches']}"
)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
def test_published_bubble_rates(name, row):
    times = row["milliseconds"]
    costs = Costs(times["F"], times["B"], times["W"], times["message"])
    p, m = row["ranks"], row["micro_batches"]
    sheet = prove(make_schedule(name, p, m), costs)
    rate = 1 - m * (times["F"] + times["B"] + times["W"]) / sheet.cost
    assert rate == pytest.approx(row["bubble_rates"][name], abs=5e-5)
    assert sheet.bubble_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    "row", RATES, ids=lambda r: f"{r['model']}-{r['micro_batches']}"
)
def test_published_rates_of_interleaving(row):
    times = row["milliseconds"]
    costs = Costs(times["F"], times["B"], times["W"], times["message"])
    p, m, v = row["ranks"], row["micro_batches"], row["interleaved_chunks"]
    rate = prove(make_schedule("interleaved_1f1b", p, m, v), costs).bubble_rate
    published = row["bubble_rates"]["interleaved_1f1b"]
    assert published <= rate + 5e-5
    assert rate <= published + 0.004


# Memory


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_peaks_are_those_of_the_formulas(p):
    m_b, m_w = 34.0, 32.0
    for m in (2 * p, 4 * p):
        for name, row in (("1f1b", "1F1B"), ("zb_h1", "ZB-H1"), ("zb_h2", "ZB-H2")):
            schedule = make_schedule(name, p, m)
            peaks = [peak_bytes(actions, m_b, m_w) for actions in schedule.actions]
            if name == "1f1b":
                assert peaks == [(p - i + 1) * m_b for i in range(1, p + 1)]
                continue
            text = FORMULAS[row]["peak_activation"].partition("worker i: ")[2]
            text = text.replace("(2p", "(2*p").replace("-2i", "-2*i")
            text = text.replace("(2i", "(2*i")
            for i, peak in enumerate(peaks, 1):
                letters = {"p": p, "i": i, "M_B": m_b, "M_W": m_w}
                assert peak == pytest.approx(eval(text, {}, letters)), (name, i)
        zb_v = prove(make_schedule("zb_v", p, m))
        assert max(zb_v.peaks) <= 2 * p  # halves of a rank's layers: p M_B
        gpipe = prove(make_schedule("gpipe", p, m))
        assert gpipe.peaks == [m] * p


@pytest.mark.parametrize("p, v", [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_interleaving_holds_more_by_the_published_factor(p, v):
    first = prove(make_schedule("interleaved_1f1b", p, 4 * p, v)).peaks[0]
    assert first / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_holds_one_more_than_there_are_stages(p):
    assert max(prove(make_schedule("dualpipe", p, 4 * p)).peaks) == p + 1
    assert max(prove(make_schedule("dualpipe_v", p, 4 * p)).peaks) == 2 * p + 1


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_peaks_do_not_grow_with_micro_batches(name):
    """B73: what GPipe's do."""
    peaks = [prove(make_schedule(name, 4, m)).peaks for m in (8, 16, 32)]
    assert peaks[0] == peaks[1] == peaks[2]


def test_w_keeps_a_part_of_the_memory():
    actions = [Action(F, 0, 0), Action(B, 0, 0), Action(W, 0, 0)]
    assert list(in_flight(actions)) == [(1, 0), (0, 1), (0, 0)]
    assert peak_bytes(actions, 5.0, 7.0) == 7.0


# Messages


@pytest.mark.parametrize("name", NAMES)
def test_messages_between_ranks(name):
    p, m = 4, 8
    for chunks in chunks_of(name):
        messages = prove(make_schedule(name, p, m, chunks)).messages
        boundaries = {"zb_v": 2 * (p - 1), "dualpipe_v": 2 * (p - 1)}
        crossed = boundaries.get(name, p * chunks - 1)
        assert sum(messages.values()) == 2 * m * crossed


def test_receives_follow_the_order_of_sends_where_two_neighbours_are_one():
    """B29: two ranks, whose messages of both kinds travel between the same pair."""
    for name in NAMES:
        for chunks in chunks_of(name):
            verify(make_schedule(name, 2, 5, chunks))  # rule 3


# Broken schedules


def broken(change, name="1f1b", ranks=3, m=3):
    schedule = make_schedule(name, ranks, m)
    actions = [list(of_rank) for of_rank in schedule.actions]
    change(actions)
    with pytest.raises(ScheduleError) as refusal:
        verify(replace(schedule, actions=tuple(map(tuple, actions))))
    return str(refusal.value)


def swap(actions, a, b):
    i, j = actions.index(a), actions.index(b)
    actions[i], actions[j] = b, a


def test_a_missing_weight_pass_is_named():
    text = broken(lambda a: a[1].remove(Action(W, 1, 2)), "zb_h1")
    assert text == "schedule 'zb_h1': W(stage 1, micro-batch 2) is missing"


def test_a_pass_that_is_there_twice_is_named():
    text = broken(lambda a: a[1].append(Action(F, 1, 0)))
    assert "F(stage 1, micro-batch 0) is there 2 times, expected once" in text
    text = broken(lambda a: a[1].append(Action(W, 1, 0)))
    assert "BW(stage 1, micro-batch 0) and W(stage 1, micro-batch 0)" in text


def test_a_pass_on_the_wrong_rank_or_of_no_stage_is_named():
    text = broken(lambda a: a[0].append(a[1].pop()))
    assert "rank 0 has" in text and "which belongs to rank 1" in text
    assert "there are 3 stages" in broken(lambda a: a[0].append(Action(F, 3, 0)))
    assert "3 micro-batches" in broken(lambda a: a[0].append(Action(F, 0, 3)))


def test_a_backward_before_its_forward_is_named():
    text = broken(lambda a: swap(a[2], Action(F, 2, 0), Action(BW, 2, 0)))
    assert "rank 2: BW(stage 2, micro-batch 0) comes before F(stage 2, mic" in text


def test_a_send_before_its_pass_is_named():
    text = broken(lambda a: swap(a[0], Action(F, 0, 0), Action(Kind.SEND_F, 0, 0)))
    assert "SEND_F(stage 0, micro-batch 0) comes before F(stage 0" in text


def test_swapped_receives_are_named():
    first, second = Action(Kind.RECV_F, 1, 0), Action(Kind.RECV_F, 1, 1)

    def change(actions):
        mine = actions[1]
        mine.remove(second)
        mine.insert(mine.index(first), second)

    text = broken(change)
    assert "message 0 from rank 0 to rank 1" in text
    assert "SEND_F(stage 0, micro-batch 0), but received by RECV_F(stage 1, mi" in text


def test_a_lost_message_is_named():
    lost = Action(Kind.SEND_B, 1, 2)
    text = broken(lambda a: a[1].remove(lost))
    assert "RECV_B(stage 0, micro-batch 2) is never sent by rank 1" in text
    text = broken(lambda a: a[1].remove(Action(Kind.RECV_F, 1, 2)))
    assert "F(stage 1, micro-batch 2) needs RECV_F(stage 1, micro-batch 2)" in text
    text = broken(lambda a: a[2].append(Action(Kind.SEND_F, 2, 0)))
    assert "rank 2: SEND_F(stage 2, micro-batch 0) has no receiver" in text
    text = broken(lambda a: a[0].append(Action(Kind.RECV_F, 0, 0)))
    assert "rank 0: RECV_F(stage 0, micro-batch 0) has no sender" in text


def test_ranks_that_wait_in_a_circle_are_named():
    """The first wants a gradient before its second forward, the last one after it."""
    first = [Action(F, 0, 0), Action(BW, 0, 0), Action(F, 0, 1), Action(BW, 0, 1)]
    last = [Action(F, 1, 0), Action(F, 1, 1), Action(BW, 1, 0), Action(BW, 1, 1)]
    passes = Schedule("own", Loop(2), 2, (tuple(first), tuple(last)))
    with pytest.raises(ScheduleError) as refusal:
        verify(insert_communication(passes))
    text = str(refusal.value)
    assert (
        "ranks wait for each other: rank 0 waits at BW(stage 0, micro-batch 0)" in text
    )
    assert "rank 1 waits at F(stage 1, micro-batch 1) for SEND_F(stage 0, mic" in text
    assert text.endswith("of rank 0")


def test_too_many_activations_are_named():
    with pytest.raises(ScheduleError, match=r"rank 0 holds 5 .* after F\(stage 0, mi"):
        verify(make_schedule("gpipe", 4, 8), most_activations=4)
    verify(make_schedule("1f1b", 4, 8), most_activations=4)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("1f2b", 2, 2), "there is no schedule '1f2b'"),
        (("1f1b", 0, 2), "at least 1 for ranks, got 0"),
        (("1f1b", 2, 0), "at least 1 for micro-batches, got 0"),
        (("1f1b", 2, 2, 2), "has no --chunks, got 2: use 1, or one of interleaved"),
        (("gpipe", 2, 2, 1, 2), "has no --group"),
        (("interleaved_1f1b", 2, 4, 0), "at least 1 for chunks, got 0"),
    ],
)
def test_what_is_no_schedule_is_refused(args, text):
    with pytest.raises(InputError, match=text):
        make_schedule(*args)
