"""What a preference study found, as scores, Markdown and the paper's Table 10 in LaTeX."""

from collections.abc import Mapping, Sequence
from typing import Any

from ssd_research import paper
from ssd_research.metrics import preference
from ssd_research.reporting.study_responses import Key, Responses
from ssd_research.reporting.tables import BLANK, Column, latex, markdown

METHODS = (
    Column("method", "Method"),
    Column("win_rate", "Win rate (mean ± sd over evaluators)"),
    Column("wins", "Answers won"),
)
EVALUATORS = (
    Column("evaluator", "Evaluator"),
    Column("answered", "Answered"),
    Column("win_rate_a", "{a} preferred (%)", digits=1),
    Column("left_share", "Left chosen (%)", digits=1),
    Column("median_seconds", "Median seconds", digits=1),
)
NOTES = (
    "The t test and its interval ask what other evaluators would say, the redrawn prompts what "
    "other prompts would show.",
    "The binomial test takes all answers for independent; those of one evaluator, or to one pair, "
    "are not, so its p tends to be too small.",
    "A difference that is not significant does not show that two methods are alike.",
    "Each method stands left in half of the pairs; which half, and the order, differ between "
    "evaluators. A share of left choices far from 50 % means that people chose a side rather than "
    "a picture.",
)


def scores(key: Key, answers: Sequence[Responses], *, samples: int, seed: int) -> dict[str, Any]:
    """Return `scores.json`: the result over all answers, and over complete evaluators alone.

    Raises:
        ValueError: if nobody has answered anything.
    """
    incomplete = {one.evaluator: one.missing for one in answers if one.missing}
    votes = [vote for one in answers for vote in one.votes]
    if not votes:
        raise ValueError(f"the responses to study {key.study} hold no answer")
    whole = [vote for vote in votes if vote.evaluator not in incomplete]
    expected = len(answers) * len(key.pairs)
    people = len({vote.evaluator for vote in votes})
    return {
        "benchmark": "preference",
        "version": preference.VERSION,
        "judge": f"{people} human evaluator{'s' * (people > 1)}",
        "study": key.study,
        "methods": dict(key.labels),
        "generate": dict(key.runs),
        "n_expected": expected,
        "n_scored": len(votes),
        "coverage": len(votes) / expected,
        "missing": incomplete,
        "higher_is_better": True,
        "seed": seed,
        "bootstrap": samples,
        **preference.aggregate(votes, samples=samples, seed=seed),
        "complete_only": preference.aggregate(whole, samples=samples, seed=seed)
        if incomplete and whole
        else None,
    }


def evaluator_rows(key: Key, answers: Sequence[Responses]) -> list[dict[str, Any]]:
    """Return one row per evaluator, also of those who answered nothing."""
    found = preference.per_evaluator([vote for one in answers for vote in one.votes])
    nothing = {"answered": 0}
    return [
        {
            "evaluator": one.evaluator,
            "pairs": len(key.pairs),
            "complete": not one.missing,
            **found.get(one.evaluator, nothing),
        }
        for one in answers
    ]


def method_rows(key: Key, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the two rows of Table 10."""
    answers = found["answers"]
    won = {"a": answers["hits"], "b": answers["total"] - answers["hits"]}
    return [
        {
            "method": key.labels[side],
            "win_rate": spread(found["win_rate"][side], found["sd"]),
            "wins": f"{won[side]} of {answers['total']}",
        }
        for side in "ab"
    ]


def to_latex(key: Key, found: Mapping[str, Any]) -> str:
    """Return Table 10 of this study."""
    return latex(METHODS, method_rows(key, found))


def to_markdown(key: Key, found: Mapping[str, Any], *, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the whole report; `rows` are those of the evaluators."""
    parts = [
        f"# Which is preferred: {key.labels['a']} or {key.labels['b']}?\n",
        f"Blind study `{key.study}` ({key.model}): {len(key.pairs)} pairs, "
        f"{found['judge']}, {found['n_scored']} of {found['n_expected']} answers.\n",
        *[f"**Note.** {text}\n" for text in warnings(key, found)],
        markdown(METHODS, method_rows(key, found)),
        "".join(f"- {line}\n" for line in tests(key, found)),
        "## Evaluators\n",
        markdown(_columns(key), [_shown(row) for row in rows]),
        "## How to read it\n",
        "".join(f"- {note}\n" for note in NOTES),
        f"Runs: {key.labels['a']} {key.runs['a']}; {key.labels['b']} {key.runs['b']}.\n",
    ]
    return "\n".join(parts)


def tests(key: Key, found: Mapping[str, Any]) -> list[str]:
    """Return one line per test of the preference of a, and one for the bias to a side."""
    t, answers, left = found["t_test"], found["answers"], found["left"]
    lines = [
        f"{key.labels['a']} over evaluators: 95 % t interval {interval(found['ci95'])}, "
        f"t test against 50 %: {p_value(t['p'])} (df {t['df']})",
        f"over all answers: {percent(answers['share'])} %, exact interval "
        f"{interval(answers['ci95'])}, binomial test {p_value(answers['p'])}",
        f"prompts redrawn {found['bootstrap']} times: {interval(found['prompts_ci95'])}",
        f"the left picture was chosen in {percent(left['share'])} % of answers, interval "
        f"{interval(left['ci95'])}, binomial test {p_value(left['p'])}; "
        f"{key.labels['a']} stood left in {percent(found['a_left'])} %",
    ]
    if key.model == "janus_pro":
        printed = "; ".join(
            f"{str(row['method']).upper()} {row['win_rate_percent_mean']} ± "
            f"{row['win_rate_percent_sd']} %"
            for row in paper.table(10)
        )
        lines.append(f"SSD paper, Table 10 (AR against SSD r=2, 7 evaluators): {printed}")
    return lines


def warnings(key: Key, found: Mapping[str, Any]) -> list[str]:
    """Return what was left out: equal pairs, and answers of whom, with the result without them."""
    equal = f"{key.equal} pairs of equal pictures were passed over when the study was built."
    return ([equal] if key.equal else []) + _incomplete(key, found)


def _incomplete(key: Key, found: Mapping[str, Any]) -> list[str]:
    left_over = {who: len(pairs) for who, pairs in found["missing"].items()}
    if not left_over:
        return []
    names = ", ".join(f"{who} ({count} pairs left)" for who, count in left_over.items())
    alone = found["complete_only"]
    without = "nobody has finished"
    if alone:
        without = (
            f"without them {key.labels['a']} has {spread(alone['win_rate']['a'], alone['sd'])}"
        )
    return [f"Incomplete: {names}. Their answers count; {without}."]


def _columns(key: Key) -> list[Column]:
    return [
        Column(c.key, c.title.format(a=key.labels["a"]), digits=c.digits, suffix=c.suffix)
        for c in EVALUATORS
    ]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluator's row with shares in percent and answers out of all pairs."""
    shares = {k: 100 * row[k] for k in ("win_rate_a", "left_share") if k in row}
    return {**row, **shares, "answered": f"{row['answered']} of {row['pairs']}"}


def percent(value: float) -> str:
    """Return a share in percent with one decimal."""
    return f"{100 * value:.1f}"


def spread(mean: float, sd: float | None) -> str:
    """Return mean ± sd in percent, as in the paper's tables."""
    return f"{percent(mean)} ± {BLANK if sd is None else percent(sd)} %"


def interval(pair: Sequence[float] | None) -> str:
    """Return an interval in percent."""
    return BLANK if pair is None else f"[{', '.join(map(percent, pair))}] %"


def p_value(p: float | None) -> str:
    """Return a p value with three decimals; there is none without spread between evaluators."""
    if p is None:
        return "p undefined"
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".")
