"""The constants of routings.py: found, and measured against what they should reach.

python benchmarks/calibration.py --experts 64          # measured against target
python benchmarks/calibration.py --experts 64 --find   # find the constants anew
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from routings import DEPTHS, SHAPES, Generator, Shape, generate

from moesaic.core.profile import Profile
from moesaic.policy.placement.locality import token_level
from moesaic.policy.placement.solvers import SOLVERS

PUBLISHED = np.array(
    [  # F1 p25 p50 p75, hotness of the top k, largest hotness among the others
        [1.000, 1.000, 1.000, 0.833, 1.000, 1.000, 0.000, 0.042, 0.071],
        [0.833, 1.000, 1.000, 0.767, 0.917, 1.000, 0.000, 0.056, 0.083],
        [0.833, 1.000, 1.000, 0.722, 0.889, 1.000, 0.000, 0.056, 0.083],
        [0.667, 0.833, 1.000, 0.708, 0.889, 1.000, 0.000, 0.053, 0.083],
        [0.667, 0.833, 1.000, 0.667, 0.833, 1.000, 0.000, 0.050, 0.074],
        [0.667, 0.833, 1.000, 0.667, 0.833, 1.000, 0.000, 0.051, 0.083],
    ]
)
"""Table 1 of Semantic Parallelism, layers DEPTHS of 26."""
RATE = 0.47
RANKS = 8
SHARE = 0.2
"""The share of the requests that serves as the profile."""
BASELINES = ("metis", "kmeans")


def concentration(profile: Profile) -> npt.NDArray[np.float64]:
    """[layers, 9] as in PUBLISHED, of the profile's own routes.

    F1: of each token, predicted by its id's k most frequent experts. Hotness: of each id that occurs, the
    share of its choices on those k, and the largest share of any other expert.
    """
    k, rows = profile.top_k, []
    for layer, counts in enumerate(profile.counts):
        dense = np.zeros((profile.vocab_size, profile.num_experts), dtype=np.int32)
        dense[counts.tokens, counts.experts] = counts.counts
        order = np.argsort(-dense, axis=1, kind="stable")
        ranked = (
            np.take_along_axis(dense, order, axis=1)[counts.known_tokens]
            / dense.sum(axis=1)[counts.known_tokens, None]
        )
        hot = np.zeros(dense.shape, dtype=np.bool_)
        np.put_along_axis(hot, order[:, :k], True, axis=1)
        f1 = hot[profile.routes.tokens[:, None], profile.routes.experts[:, layer]].mean(axis=1)
        numbers = f1, ranked[:, :k].sum(axis=1), ranked[:, k]
        rows.append(np.concatenate([np.percentile(one, (25, 50, 75)) for one in numbers]))
    return np.array(rows)


def rate(profile: Profile, solver: str, ranks: int = RANKS) -> float:
    """Local activation rate at token level, on requests that the solver has not seen."""
    train, test = profile.routes.split(SHARE, seed=0)
    half = profile.with_routes(train)
    return token_level(SOLVERS[solver](half, ranks), test, half.nearest).rate


def calibrated(shape: Shape) -> Shape:
    """The shape with noise and decay found anew, each twice, given the other."""
    for _ in range(2):
        shape = replace(shape, noise=_fitted_noise(shape))
        shape = replace(shape, decay=_fitted_decay(shape))
    return shape


def _fitted_noise(shape: Shape) -> tuple[float, ...]:
    options = np.geomspace(0.02, 0.8, 33).round(3)
    found = concentration(Generator(shape, 800, 0).profile(options.tolist()))
    errors = np.abs(PUBLISHED[:, None] - found).sum(axis=2)
    return tuple(options[errors.argmin(axis=1)].tolist())


def _fitted_decay(shape: Shape) -> float:
    low, high = 0.0, 6.0
    for _ in range(8):
        decay = (low + high) / 2
        made = generate(replace(shape, decay=decay))
        low, high = (decay, high) if max(rate(made, name) for name in BASELINES) < RATE else (low, decay)
    return round((low + high) / 2, 2)


def check(shape: Shape) -> None:
    """Print the measured values beside the values that they should have."""
    print(f"{shape.experts} experts, top {shape.top_k}: decay {shape.decay}, noise {shape.noise}")
    print("layer          F1: p25   p50   p75   top-k: p25   p50   p75   others: p25   p50   p75")
    for depth, want, found in zip(
        DEPTHS, PUBLISHED, concentration(generate(shape, len(DEPTHS))), strict=True
    ):
        for name, row in (("published", want), ("here", found)):
            parts = ("  ".join(f"{number:.3f}" for number in row[i : i + 3]) for i in (0, 3, 6))
            print(f"{depth:5} {name:10}  {'        '.join(parts)}")
    for seed in range(3):
        made = generate(shape, seed=seed)
        rates = [f"{name} {rate(made, name):.3f}" for name in (*BASELINES, "vanilla")]
        print(f"seed {seed}: local activation rate on {RANKS} ranks: {', '.join(rates)}; the better: {RATE}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    shapes = {shape.experts: shape for shape in SHAPES}
    parser.add_argument("--experts", type=int, choices=sorted(shapes), default=64)
    parser.add_argument("--find", action="store_true")
    given = parser.parse_args()
    check(calibrated(shapes[given.experts]) if given.find else shapes[given.experts])
