"""Tests the verdict on made-up numbers: python3 -m unittest discover -s benches/parity"""

import json
import random
import unittest
from dataclasses import asdict
from pathlib import Path

from judge import read, t_above, t_quantile, tost


def arm(mean: float, deviation: float, n: int = 23) -> list[float]:
    """Returns n numbers with exactly this mean and sample deviation."""
    raw = [i - (n - 1) / 2 for i in range(n)]
    scale = deviation / (sum(x * x for x in raw) / (n - 1)) ** 0.5
    return [mean + scale * x for x in raw]


class Judge(unittest.TestCase):
    def test_students_t_is_that_of_the_tables(self) -> None:
        for df, p, t in ((1, 0.05, 6.3138), (10, 0.05, 1.8125), (44, 0.05, 1.6802), (7, 0.005, 3.4995)):
            self.assertAlmostEqual(t_quantile(p, df), t, places=3)
            self.assertAlmostEqual(t_above(t, df), p, places=4)
            self.assertAlmostEqual(t_above(-t, df), 1 - p, places=4)

    def test_an_interval_by_hand(self) -> None:
        # Equal deviations and sizes: 44 degrees of freedom, error 0.5 * sqrt(2 / 23).
        v = tost(arm(85.1, 0.5), arm(85.0, 0.5))
        self.assertAlmostEqual(v.difference, 0.1, places=3)
        reach = 1.6802 * 0.5 * (2 / 23) ** 0.5
        self.assertAlmostEqual(v.interval[0], 0.1 - reach, places=3)
        self.assertAlmostEqual(v.interval[1], 0.1 + reach, places=3)
        self.assertTrue(v.equivalent)

    def test_what_is_not_shown_is_not_equivalent(self) -> None:
        for a, b in (
            (arm(84.4, 0.5), arm(85, 0.5)),
            (arm(85.6, 0.5), arm(85, 0.5)),
            (arm(85.3, 0.5), arm(85, 0.5)),  # inside the margin, its interval is not
            (arm(85, 3.0), arm(85, 3.0)),  # equal means, too few runs
            (arm(20, 2.0), arm(85, 0.5)),
        ):
            self.assertFalse(tost(a, b).equivalent)

    def test_unequal_deviations_are_welchs(self) -> None:
        v = tost(arm(85, 0.2), arm(85, 1.0))
        u, w = 0.04 / 23, 1.0 / 23
        df = (u + w) ** 2 / ((u * u + w * w) / 22)
        self.assertAlmostEqual(v.interval[1], t_quantile(0.05, df) * (u + w) ** 0.5, places=3)

    def test_the_committed_verdict_follows_from_the_committed_runs(self) -> None:
        here = Path(__file__).parent
        for study, first, runs in (("", 1, 23), ("-2", 101, 23), ("-3", 201, 36)):
            arms = read(here / f"results{study}.jsonl", first, runs)
            said = json.loads((here / f"verdict{study}.json").read_text())
            for arm_name, verdict in said.items():
                now = json.loads(json.dumps(asdict(tost(arms[arm_name], arms["random"]))))
                for key, value in verdict.items():
                    if key.startswith("p_"):
                        self.assertAlmostEqual(now[key], value, places=9)
                    else:
                        self.assertEqual(now[key], value, f"{arm_name}, {key}")
            self.assertEqual(set(said), {"fletch", "sorted"})

    def test_errors_are_as_rare_as_registered(self) -> None:
        rng = random.Random(4)

        def shown(difference: float) -> int:
            draw = lambda mean: [rng.gauss(mean, 0.511) for _ in range(23)]
            return sum(tost(draw(85 + difference), draw(85)).equivalent for _ in range(400))

        # At the margin one in twenty (s = 4.4 of 400), at no difference nine of ten (s = 6).
        self.assertLess(shown(0.5), 20 + 5 * 4.4)
        self.assertGreater(shown(0.0), 360 - 5 * 6)


if __name__ == "__main__":
    unittest.main()
