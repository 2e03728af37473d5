"""The schedule's passes, their closed form, and the geometry they stand on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_research.grid import TokenGrid
from ssd_research.schedule import SpatialSchedule


@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 14),
    v=st.integers(1, 5),
    b=st.integers(0, 4),
    i=st.integers(0, 4),
    k_h=st.integers(1, 7),
    rounds=st.integers(0, 2),
    final=st.booleans(),
)
def test_closed_form_counts_the_passes(rows, cols, v, b, i, k_h, rounds, final):
    if v == 1:
        i = 0
    schedule = SpatialSchedule(rows, cols, v, b, i, k_h, rounds, final)
    assert schedule.nfe() == len(schedule.passes())


@given(rows=st.integers(1, 9), cols=st.integers(1, 9), v=st.integers(1, 4), k_h=st.integers(1, 6))
def test_every_position_is_committed_once(rows, cols, v, k_h):
    schedule = SpatialSchedule(rows, cols, v=v, b=1, i=v - 1, k_h=k_h)
    commits = [p for p in schedule.passes() if p.phase == "commit"]
    covered = [position for p in commits for position in range(p.start, p.stop)]
    assert covered == list(range(1, rows * cols))


def test_joint_schedule_commits_rows_separately():
    assert SpatialSchedule(48, 48, v=2, b=9, i=0).nfe() == 284
    assert SpatialSchedule(48, 48, v=2, b=5, i=4).nfe() == 280


@pytest.mark.parametrize("bad", [{"v": 0}, {"b": -1}, {"i": -1, "v": 2}, {"k_h": 0}])
def test_out_of_range_names_the_option(bad):
    with pytest.raises(ValueError, match="decoder\\."):
        SpatialSchedule(4, 4, **bad)


def test_incremental_rounds_need_a_second_row():
    with pytest.raises(ValueError, match=r"decoder\.i=1 does nothing"):
        SpatialSchedule(4, 4, v=1, i=1)


def test_slots_count_end_of_row_tokens():
    grid = TokenGrid(3, 4, end_of_row=True)
    assert [grid.slot(p) for p in range(12)] == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert (grid.size, grid.slots, list(grid.row(1))) == (12, 15, [4, 5, 6, 7])
    assert TokenGrid(3, 4).slot(7) == 7
