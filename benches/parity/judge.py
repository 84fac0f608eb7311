"""Judges the parity study by two one-sided t tests (TOST) after Welch, and draws its picture.

    judge.py RESULTS [--first SEED] [--runs N] [--plot FILE.svg] [--json FILE]

An arm is equivalent to `random` when the 90 % interval of the difference of mean accuracies lies within
the margin. That is the two one-sided tests at 5 % each. Only `--plot` needs a library (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Sequence

MARGIN = 0.5
ALPHA = 0.05
SEEDS = 23


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function (Lentz)."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-14:
            return value
    raise ArithmeticError(f"no convergence at a={a}, b={b}, x={x}")


def t_above(t: float, df: float) -> float:
    """Returns the chance that Student's t with `df` degrees of freedom is above `t`."""
    if t < 0:
        return 1.0 - t_above(-t, df)
    a, b, x = df / 2, 0.5, df / (df + t * t)
    if x >= 1.0:
        return 0.5
    beta = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(beta + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        whole = front * _beta_fraction(a, b, x) / a
    else:
        whole = 1.0 - front * _beta_fraction(b, a, 1 - x) / b
    return whole / 2


def t_quantile(p: float, df: float) -> float:
    """Returns the t that is exceeded with chance `p` < 1/2."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_above(middle, df) > p else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Verdict:
    """An arm compared with `random`, in points of accuracy."""

    n: int
    mean: float
    deviation: float
    difference: float
    interval: tuple[float, float]
    p_below: float
    p_above: float
    equivalent: bool


def tost(
    arm: Sequence[float], random: Sequence[float], margin: float = MARGIN, alpha: float = ALPHA
) -> Verdict:
    """Tests whether the means differ by less than `margin`."""
    n, m = len(arm), len(random)
    difference = fmean(arm) - fmean(random)
    u, v = stdev(arm) ** 2 / n, stdev(random) ** 2 / m
    error = math.sqrt(u + v)
    if error == 0:
        raise ValueError("no deviation in either arm: nothing can be tested")
    df = (u + v) ** 2 / (u * u / (n - 1) + v * v / (m - 1))
    p_below = t_above((difference + margin) / error, df)
    p_above = t_above((margin - difference) / error, df)
    reach = t_quantile(alpha, df) * error
    return Verdict(
        n,
        round(fmean(arm), 3),
        round(stdev(arm), 3),
        round(difference, 3),
        (round(difference - reach, 3), round(difference + reach, 3)),
        p_below,
        p_above,
        max(p_below, p_above) < alpha,
    )


def read(path: Path, first: int = 1, count: int = SEEDS) -> dict[str, list[float]]:
    """Reads accuracies by arm, in the order of seeds from `first` on. Fails unless all are there."""
    arms: dict[str, dict[int, float]] = {}
    for line in path.read_text().splitlines():
        run = json.loads(line)
        if run["seed"] in arms.setdefault(run["arm"], {}):
            raise SystemExit(f"{run['arm']}, seed {run['seed']}: twice")
        arms[run["arm"]][run["seed"]] = run["accuracy"]
    for arm in ("fletch", "random", "sorted"):
        if sorted(arms.get(arm, {})) != list(range(first, first + count)):
            raise SystemExit(f"{arm}: not the seeds {first} to {first + count - 1}")
    return {arm: [runs[seed] for seed in sorted(runs)] for arm, runs in arms.items()}


def plot(arms: dict[str, list[float]], verdict: Verdict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "parity", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), width_ratios=[3, 2])
    for at, arm in enumerate(("random", "fletch")):
        runs = arms[arm]
        spread = [at + 0.16 * ((i * 0.618) % 1 - 0.5) for i in range(len(runs))]
        left.plot(runs, spread, "o", ms=4, alpha=0.7)
        left.plot([fmean(runs)] * 2, [at - 0.25, at + 0.25], "k-", lw=1.5)
    left.set_yticks([0, 1], ["random", "fletch"])
    left.set_ylim(-0.5, 1.5)
    runs, mean = len(arms["random"]), fmean(arms["sorted"])
    left.set_xlabel(f"test accuracy, %; {runs} runs an arm\n(sorted: mean {mean:.1f}, not shown)")
    low, high = verdict.interval
    right.axvspan(-MARGIN, MARGIN, color="0.9")
    right.axvline(0, color="0.5", lw=0.8)
    error = [[verdict.difference - low], [high - verdict.difference]]
    right.errorbar([verdict.difference], [0], xerr=error, fmt="ko", capsize=4)
    right.set_yticks([])
    right.set_xlim(-0.8, 0.8)
    right.set_xlabel("fletch − random, points\n90 % interval; grey: the margin")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("results", type=Path)
    options.add_argument("--first", type=int, default=1, help="the first of the registered seeds")
    options.add_argument("--runs", type=int, default=SEEDS, help="how many were registered")
    options.add_argument("--plot", type=Path)
    options.add_argument("--json", type=Path)
    o = options.parse_args()
    arms = read(o.results, o.first, o.runs)
    verdicts = {arm: tost(arms[arm], arms["random"]) for arm in ("fletch", "sorted")}
    random = arms["random"]
    print("| arm | n | mean accuracy | s | difference | 90 % interval | p (TOST) | equivalent |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| random | {len(random)} | {fmean(random):.2f} | {stdev(random):.3f} | – | – | – | – |")
    for arm, v in verdicts.items():
        p = max(v.p_below, v.p_above)
        low, high = v.interval
        print(
            f"| {arm} | {v.n} | {v.mean:.2f} | {v.deviation:.3f} | {v.difference:+.3f} "
            f"| {low:+.3f} to {high:+.3f} "
            f"| {p:.2g} | {'yes' if v.equivalent else 'no'} |"
        )
    within = 60 <= fmean(random) <= 95
    print(f"\nmean accuracy within 60 and 95 %: {'yes' if within else 'no'}")
    passed = within and verdicts["fletch"].equivalent and not verdicts["sorted"].equivalent
    print(f"verdict: {'parity' if passed else 'no parity shown'} within {MARGIN} points")
    if o.json:
        o.json.write_text(json.dumps({arm: asdict(v) for arm, v in verdicts.items()}, indent=1) + "\n")
    if o.plot:
        plot(arms, verdicts["fletch"], o.plot)


if __name__ == "__main__":
    main()
