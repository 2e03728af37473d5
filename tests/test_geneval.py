"""GenEval's rules, one by one, on detections whose verdict follows from the official script."""

import math

import numpy as np
import pytest

from ssd_research.metrics.geneval import (
    TASKS,
    Detection,
    Rules,
    aggregate,
    asked_for_colour,
    judge,
    overlap,
    relations,
)
from ssd_research.metrics.geneval_metadata import check_metadata

ONE = {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
CLOCKS = {
    "tag": "counting",
    "include": [{"class": "clock", "count": 2}],
    "exclude": [{"class": "clock", "count": 3}],
}
# A line of the official evaluation_metadata.jsonl.
DOG = {
    "tag": "position",
    "include": [
        {"class": "teddy bear", "count": 1},
        {"class": "dog", "count": 1, "position": ["right of", 0]},
    ],
    "prompt": "a photo of a dog right of a teddy bear",
}


def at(x: float, y: float, *, size: float = 10) -> tuple[float, float, float, float]:
    """Return a square box by its centre."""
    return x - size / 2, y - size / 2, x + size / 2, y + size / 2


def thing(label: str, score: float = 0.95, *, x: float = 0, y: float = 0, colour=None) -> Detection:
    return Detection(label, score, at(x, y), colour)


def test_include_needs_enough_of_the_class():
    assert judge(ONE, [thing("bench"), thing("dog")]).correct
    verdict = judge(ONE, [thing("dog")])
    assert (verdict.correct, verdict.reason) == (False, "expected bench>=1, found 0")
    # More than asked for is no fault where nothing is excluded.
    assert judge(ONE, [thing("bench"), thing("bench")]).correct


def test_thresholds_are_strict_and_higher_for_counting():
    assert not judge(ONE, [thing("bench", 0.3)]).correct
    assert judge(ONE, [thing("bench", 0.31)]).correct
    assert not judge(CLOCKS, [thing("clock", 0.95), thing("clock", 0.9)]).correct
    assert judge(CLOCKS, [thing("clock", 0.95), thing("clock", 0.91)]).correct
    lenient = Rules(threshold=0.1, counting_threshold=0.5)
    assert judge(CLOCKS, [thing("clock", 0.95), thing("clock", 0.9)], rules=lenient).correct


@pytest.mark.parametrize(("found", "correct"), [(1, False), (2, True), (3, False), (4, False)])
def test_counting_needs_the_exact_number(found, correct):
    verdict = judge(CLOCKS, [thing("clock")] * found)
    assert verdict.correct == correct
    if found > 2:
        assert verdict.reason == f"expected clock<3, found {found}"


def test_at_most_sixteen_objects_of_a_class_are_kept():
    many = {"tag": "two_object", "include": [{"class": "cup", "count": 17}]}
    assert not judge(many, [thing("cup")] * 20).correct
    assert judge(many, [thing("cup")] * 20, rules=Rules(max_objects=20)).correct


def test_colour_is_asked_of_the_most_confident_only():
    need = {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}]}
    red, blue = thing("cup", 0.8, colour="red"), thing("cup", 0.9, colour="blue")
    assert judge(need, [red]).correct
    verdict = judge(need, [red, blue])
    assert not verdict.correct
    assert verdict.reason == "expected red cup>=1, found 0 red; and 1 blue"
    assert not judge(need, [thing("cup")]).correct


def test_exclude_is_asked_of_any_class_and_of_what_counts_only():
    line = {**ONE, "exclude": [{"class": "dog", "count": 1}, {"class": "cup", "count": 2}]}
    assert judge(line, [thing("bench"), thing("cup"), thing("dog", 0.3)]).correct
    bench, dog, cups = thing("bench"), thing("dog", 0.31), [thing("cup")] * 2
    assert judge(line, [bench, dog]).reason == "expected dog<1, found 1"
    # One ban that fails is enough, and all that fail are named, after what is missing.
    reasons = judge(line, [dog, *cups]).reason.splitlines()
    assert reasons == [
        "expected bench>=1, found 0",
        "expected dog<1, found 1",
        "expected cup<2, found 2",
    ]


def test_duplicated_clauses_and_detections_change_nothing_but_counts():
    twice = {"tag": "two_object", "include": [{"class": "cup", "count": 1}] * 2}
    # Clauses are independent: one cup satisfies both.
    assert judge(twice, [thing("cup")]).correct
    # One object detected twice is two objects, as there is no suppression officially ...
    same = [thing("clock", 0.95), thing("clock", 0.93)]
    assert judge(CLOCKS, same).correct
    # ... unless asked for: then the more confident one stands for both.
    strict = Rules(max_overlap=0.5)
    assert judge(CLOCKS, same, rules=strict).reason == "expected clock>=2, found 1"
    apart = [*same, thing("clock", 0.91, x=9)]
    assert judge(CLOCKS, apart, rules=strict).correct
    other = [thing("clock"), thing("cup"), thing("clock", x=30)]
    assert judge(CLOCKS, other, rules=strict).correct


@pytest.mark.parametrize(
    ("x", "iou"),
    [(0, 1.0), (20, 0.0), (11, 0.0), (10, 1 / 21), (5, 6 / 16)],  # edge pixels included: 11 wide
)
def test_overlap_counts_edge_pixels(x, iou):
    assert overlap(at(0, 0), at(x, 0)) == pytest.approx(iou)
    assert overlap(at(x, 0), at(0, 0)) == pytest.approx(iou)


def test_suppression_is_by_confidence_and_an_iou_of_the_limit_is_too_much():
    line = {"tag": "single_object", "include": [{"class": "cup", "count": 2}]}
    chain = [thing("cup", 0.5, x=10), thing("cup", 0.9, x=5), thing("cup", 0.7)]
    # The middle one overlaps both others, which do not overlap each other by so much.
    assert not judge(line, chain, rules=Rules(max_overlap=6 / 16)).correct
    assert judge(line, chain, rules=Rules(max_overlap=6 / 16 + 1e-9)).correct
    keep_ends = [thing("cup", 0.9, x=10), thing("cup", 0.5, x=5), thing("cup", 0.7)]
    assert judge(line, keep_ends, rules=Rules(max_overlap=6 / 16)).correct


def test_colours_asked_for_are_those_of_the_most_confident_whatever_the_threshold():
    need = {
        "tag": "color_attr",
        "include": [
            {"class": "cup", "count": 1, "color": "red"},
            {"class": "dog", "count": 2, "color": "black"},
            {"class": "cat", "count": 1},
        ],
    }
    cups = [thing("cup", 0.1), thing("cup", 0.2)]
    dogs = [thing("dog", score) for score in (0.9, 0.05, 0.4)]
    found = [*cups, *dogs, thing("cat"), thing("bus")]
    assert asked_for_colour(need, found) == [cups[1], dogs[0], dogs[2]]
    assert asked_for_colour(need, []) == []
    assert asked_for_colour(ONE, [thing("bench")]) == []
    # What suppression would take away is not asked, but the next one is.
    near = [thing("dog", 0.9), thing("dog", 0.8), thing("dog", 0.7, x=30)]
    assert asked_for_colour(need, near, rules=Rules(max_overlap=0.5)) == [near[0], near[2]]


def test_a_colour_must_be_that_of_as_many_as_counted():
    need = {"tag": "colors", "include": [{"class": "cup", "count": 2, "color": "red"}]}
    red, blue = thing("cup", 0.8, colour="red"), thing("cup", 0.9, colour="blue")
    assert judge(need, [red, red]).correct
    assert judge(need, [red, blue]).reason == "expected red cup>=2, found 1 red; and 1 blue, 1 red"
    assert judge(need, [red]).reason == "expected cup>=2, found 1"


def test_colour_attribution_needs_both():
    need = {
        "tag": "color_attr",
        "include": [
            {"class": "cup", "count": 1, "color": "red"},
            {"class": "dog", "count": 1, "color": "black"},
        ],
    }
    cup, dog = thing("cup", colour="red"), thing("dog", colour="black")
    assert judge(need, [cup, dog]).correct
    swapped = [thing("cup", colour="black"), thing("dog", colour="red")]
    assert len(judge(need, swapped).reason.splitlines()) == 2


def test_official_position_line():
    bear = thing("teddy bear")
    assert judge(DOG, [bear, thing("dog", x=40)]).correct
    verdict = judge(DOG, [bear, thing("dog", x=-40)])
    assert verdict.reason == "expected dog right of target, found left of target"
    both = judge(DOG, [bear, thing("dog", x=-40, y=40)])
    assert both.reason == "expected dog right of target, found below and left of target"
    lost = judge(DOG, [thing("dog", x=40)])
    assert lost.reason.splitlines()[1] == "no target for dog to be right of"
    # Only the most confident dog is asked for its place.
    assert not judge(DOG, [bear, thing("dog", 0.9, x=-40), thing("dog", 0.5, x=40)]).correct


def test_position_must_hold_for_every_pair():
    need = {
        "tag": "position",
        "include": [
            {"class": "cup", "count": 2},
            {"class": "dog", "count": 1, "position": ["below", 0]},
        ],
    }
    cups = [thing("cup"), thing("cup", x=20)]
    assert judge(need, [*cups, thing("dog", x=10, y=40)]).correct
    assert not judge(need, [*cups, thing("dog", x=90, y=40)]).correct


def test_position_needs_the_target_to_have_its_colour():
    need = {
        "tag": "position",
        "include": [
            {"class": "cup", "count": 1, "color": "red"},
            {"class": "dog", "count": 1, "position": ["below", 0]},
            {"class": "cat", "count": 1, "position": ["left of", 1]},
        ],
    }
    dog, cat = thing("dog", y=40), thing("cat", x=-40, y=40)
    assert judge(need, [thing("cup", colour="red"), dog, cat]).correct
    # A clause that failed is no target: the failure goes on to what refers to it.
    assert judge(need, [thing("cup", colour="blue"), dog, cat]).reason.splitlines()[1:] == [
        "no target for dog to be below",
        "no target for cat to be left of",
    ]


def test_one_subject_in_the_wrong_place_names_the_first_pair_only():
    need = {
        "tag": "position",
        "include": [
            {"class": "cup", "count": 1},
            {"class": "dog", "count": 2, "position": ["above", 0]},
        ],
    }
    dogs = [thing("dog", 0.9, y=40), thing("dog", 0.8, x=40)]
    reason = judge(need, [thing("cup"), *dogs]).reason
    assert reason == "expected dog above target, found below target"
    # At the same place there is no relation at all.
    here = judge(need, [thing("cup"), thing("dog", 0.9), thing("dog", 0.8, y=-40)])
    assert here.reason == "expected dog above target, found  target"


def test_position_margin_grows_with_both_sizes():
    small, large = at(0, 0, size=10), at(30, 0, size=10)
    assert relations(large, small) == {"right of"}
    # (30 - 0.1 * (10 + 60)) / 30 = 0.77, (30 - 0.1 * (60 + 100)) / 30 = 0.47
    assert relations(at(30, 0, size=60), small) == {"right of"}
    assert relations(at(30, 0, size=60), at(0, 0, size=100)) == set()
    # Each axis has the margin of its own sizes: wide boxes, little height.
    wide = (-50.0, -2.0, 50.0, 2.0)
    assert relations((-50.0, 6.0, 50.0, 10.0), wide) == {"below"}
    assert relations((-42.0, -2.0, 58.0, 2.0), wide) == set()


def test_position_is_not_asked_of_a_wrong_colour():
    need = {
        "tag": "position",
        "include": [
            {"class": "cup", "count": 1},
            {"class": "dog", "count": 1, "color": "red", "position": ["below", 0]},
        ],
    }
    reason = judge(need, [thing("cup"), thing("dog", y=-40, colour="blue")]).reason
    assert reason == "expected red dog>=1, found 0 red; and 1 blue"


@pytest.mark.parametrize(
    ("x", "y", "holds"),
    [
        (-40, 0, {"left of"}),
        (40, 0, {"right of"}),
        (0, -40, {"above"}),
        (0, 40, {"below"}),
        (40, 40, {"right of", "below"}),
        (-40, -40, {"left of", "above"}),
        (0, 0, set()),
        (2, 0, set()),  # the margin 0.1 * (10 + 10) swallows an offset of 2
        (3.9, 0, set()),  # (3.9 - 2) / 3.9 = 0.487
        (4.1, 0, {"right of"}),  # (4.1 - 2) / 4.1 = 0.512
        (40, 20, {"right of"}),  # (20 - 2) / 44.7 = 0.40
        (40, 30, {"right of", "below"}),  # (30 - 2) / 50 = 0.56
    ],
)
def test_relations(x, y, holds):
    assert relations(at(x, y), at(0, 0)) == holds
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert relations(at(0, 0), at(x, y)) == {opposite[name] for name in holds}


def test_relations_margin_is_an_option():
    assert relations(at(3, 0), at(0, 0)) == set()
    assert relations(at(3, 0), at(0, 0), threshold=0.0) == {"right of"}


def test_other_metadata_is_refused():
    with pytest.raises(ValueError, match="no GenEval metadata"):
        judge({"prompt": "a cat"}, [])
    with pytest.raises(ValueError, match=r"eval\.rules\.threshold=1\.5"):
        Rules(threshold=1.5)
    with pytest.raises(ValueError, match=r"eval\.rules\.max_objects=0"):
        Rules(max_objects=0)
    with pytest.raises(ValueError, match=r"eval\.rules\.max_overlap=0\.0 must be in \(0, 1\]"):
        Rules(max_overlap=0.0)
    with pytest.raises(ValueError, match=r"eval\.rules\.position_threshold=-0\.1"):
        Rules(position_threshold=-0.1)


@pytest.mark.parametrize(
    "option",
    [
        *({"threshold": value} for value in (-0.1, 1.0, math.nan)),
        *({"counting_threshold": value} for value in (-0.1, 1.0, math.nan)),
        *({"position_threshold": value} for value in (-0.1, math.nan, math.inf)),
        *({"max_objects": value} for value in (0, -1)),
        *({"max_overlap": value} for value in (0.0, 1.01, math.nan)),
    ],
)
def test_rules_are_in_their_range(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"^eval\.rules\.{name}=.* must be (in|at least) ."):
        Rules(**option)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tag": "dense"}, r"tag='dense' is none of single_object, two_object"),
        ({"include": []}, r"include=\[\] is not a list of objects"),
        ({"include": {"class": "cup"}}, r"include={.*} is not a list of objects"),
        ({"include": ["cup"]}, r"include\[0\]='cup' has no class"),
        ({"include": [{"count": 1}]}, r"include\[0\]={'count': 1} has no class"),
        ({"include": [{"class": "cup"}]}, r"include\[0\]\.count=None must be a whole number"),
        ({"include": [{"class": "cup", "count": "2"}]}, r"include\[0\]\.count='2' must be"),
        ({"include": [{"class": "cup", "count": 0}]}, r"include\[0\]\.count=0 must be"),
        ({"include": [{"class": "cup", "count": True}]}, r"include\[0\]\.count=True must be"),
        ({"include": [{"class": "cup", "count": 1, "color": None}]}, r"color=None is no colour"),
        ({"exclude": None}, r"exclude=None is not a list"),
        ({"exclude": [{"class": "cup"}]}, r"exclude\[0\]\.count=None"),
        (
            {"exclude": [{"class": "cup", "count": 1, "position": ["above", 0]}]},
            r"exclude\[0\]\.pos",
        ),
    ],
)
def test_metadata_that_no_image_can_satisfy_is_refused(change, reason):
    check_metadata(DOG)
    check_metadata(CLOCKS)
    with pytest.raises(ValueError, match=reason):
        check_metadata({**DOG, **change})


@pytest.mark.parametrize(
    "position", [["near", 0], ["above", 1], ["above", 2], ["above", -1], ["above"], "above", None]
)
def test_a_position_is_a_relation_to_an_earlier_object(position):
    dog = {"class": "dog", "count": 1, "position": position}
    with pytest.raises(ValueError, match=r"include\[1\]\.position=.* left of, right of, above, b"):
        check_metadata({**DOG, "include": [DOG["include"][0], dog]})


def test_overall_is_the_unweighted_mean_of_six_tasks():
    # Four images of one prompt each, but forty single objects over ten prompts.
    tags = ["single_object"] * 40 + [t for t in TASKS[1:] for _ in range(4)]
    prompts = [f"{t}{i // 4}" for i, t in enumerate(tags)]
    correct = [True] * 40 + [k < n for n in range(5) for k in range(4)]
    scores = aggregate(correct, tags, prompts)
    expected = [1, 0, 0.25, 0.5, 0.75, 1]
    assert [scores["tasks"][t]["score"] for t in TASKS] == expected
    assert scores["overall"] == pytest.approx(sum(expected) / 6)
    assert scores["images_correct"] == pytest.approx(50 / 60)
    assert scores["prompts_correct"] == pytest.approx(14 / 15)
    assert scores["tasks"]["single_object"]["images"] == 40
    assert scores["tasks"]["single_object"]["prompts"] == 10
    assert scores["missing_tasks"] == []


def test_interval_is_seeded_and_covers_the_score():
    rng = np.random.default_rng(0)
    tags = [t for t in TASKS for _ in range(50)]
    correct = [bool(v) for v in rng.random(300) < 0.6]
    prompts = [str(i) for i in range(300)]
    scores = aggregate(correct, tags, prompts, seed=1)
    assert scores == aggregate(correct, tags, prompts, seed=1)
    low, high = scores["overall_ci95"]
    assert low < scores["overall"] < high
    # The width of a binomial interval of 300 images.
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.24 / 300), rel=0.2)


def test_images_of_one_prompt_widen_the_interval():
    tags = [t for t in TASKS for _ in range(40)]
    correct = [i // 4 % 2 == 0 for i in range(240)]
    together = aggregate(correct, tags, [str(i // 4) for i in range(240)])["overall_ci95"]
    apart = aggregate(correct, tags, [str(i) for i in range(240)])["overall_ci95"]
    assert together[1] - together[0] > 1.5 * (apart[1] - apart[0])


def test_no_overall_without_all_six_tasks():
    scores = aggregate([True, False], ["colors", "counting"], ["a", "b"])
    assert scores["overall"] is None
    assert scores["overall_ci95"] is None
    assert scores["missing_tasks"] == ["single_object", "two_object", "position", "color_attr"]
    with pytest.raises(ValueError, match="got none"):
        aggregate([], [], [])
    with pytest.raises(ValueError, match="dense"):
        aggregate([True], ["dense"], ["a"])
