"""Statistics against closed forms and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from calculet_perf.statistics import bootstrap, compare, holm, quantiles, series, summary, throughput
from calculet_perf.statistics.compare import Change, Direction, Outcome
from calculet_perf.statistics.quantiles import Bound


def lognormal(count: int, seed: int, scale: float = 20.0, sigma: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(math.log(scale), sigma, count)


def in_rounds(values: np.ndarray, rounds: int) -> dict[int, np.ndarray]:
    return dict(enumerate(np.array_split(values, rounds)))


# ---------------------------------------------------------------- quantiles
@pytest.mark.parametrize("count", [1, 2, 19, 30, 100, 299, 1_000])
@pytest.mark.parametrize("q", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_nearest_rank_is_numpys_inverted_cdf(count: int, q: float) -> None:
    values = np.sort(lognormal(count, count))
    assert quantiles.nearest_rank(values, q) == np.quantile(values, q, method="inverted_cdf")


@pytest.mark.parametrize("count", [30, 100, 368, 1_000])
@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_exact_interval_is_scipys(count: int, q: float) -> None:
    values = np.sort(lognormal(count, 3))
    expected = stats.quantile_test(values, p=q).confidence_interval(0.95)
    found = quantiles.interval(values, q)
    assert [math.nan if bound is None else bound for bound in found] == pytest.approx(list(expected), nan_ok=True)


def test_binomial_cdf_is_scipys_for_large_counts() -> None:
    k = np.arange(0, 20_001, 997)
    assert quantiles._cdf(20_000, 0.99)[k] == pytest.approx(stats.binom.cdf(k, 20_000, 0.99), abs=1e-9)


def test_sample_counts_that_certify_p99() -> None:
    assert quantiles.samples_needed(0.99) == 299 and quantiles.samples_needed(0.99, both=True) == 368
    assert quantiles.samples_needed(0.99, 0.99) == 459 and quantiles.samples_needed(0.99, 0.99, both=True) == 528
    table = {
        30: (Bound.BOTH, Bound.UPPER, Bound.NONE),
        100: (Bound.BOTH, Bound.BOTH, Bound.NONE),
        299: (Bound.BOTH, Bound.BOTH, Bound.UPPER),
    }
    for count, expected in table.items():
        assert tuple(quantiles.certified(count, q) for q in (0.5, 0.9, 0.99)) == expected
    assert quantiles.certified(298, 0.99) is Bound.NONE and quantiles.certified(368, 0.99) is Bound.BOTH


@pytest.mark.parametrize("count", [298, 299, 367, 368])
def test_certified_says_what_the_exact_bounds_do(count: int) -> None:
    values = np.sort(lognormal(count, 1))
    both = None not in quantiles.interval(values, 0.99)
    assert (quantiles.certified(count, 0.99) is Bound.BOTH) == both
    assert (quantiles.certified(count, 0.99) is not Bound.NONE) == (quantiles.upper_bound(values, 0.99) is not None)


def test_failures_are_infinitely_slow_and_print_as_unbounded() -> None:
    values = np.array([1.0] * 95 + [math.inf] * 5)
    found = summary.summarise(values, 1)
    assert found is not None and (found.count, found.success, found.error) == (100, 95, 5)
    assert found.quantiles["p95"].value == 1.0 and not found.quantiles["p95"].unbounded
    assert found.quantiles["p99"].value is None and found.quantiles["p99"].unbounded
    assert found.mean == 1.0 and found.max == 1.0


def test_moments_are_scipys() -> None:
    values = lognormal(200, 5)
    found = summary.summarise(values, 1)
    assert found is not None
    assert found.mad == pytest.approx(stats.median_abs_deviation(values))
    assert found.mad_normal == pytest.approx(stats.median_abs_deviation(values, scale="normal"))
    assert found.std == pytest.approx(stats.tstd(values)) and found.mean == pytest.approx(values.mean())


def test_no_samples_have_no_summary_and_nan_is_refused() -> None:
    assert summary.summarise(np.empty(0), 1) is None
    with pytest.raises(ValueError, match="NaN"):
        summary.summarise(np.array([1.0, math.nan]), 1)


# ---------------------------------------------------------------- bootstrap
def test_bca_of_the_mean_is_scipys() -> None:
    values = lognormal(60, 7, sigma=0.8)
    expected = stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=9_999, batch=500, rng=np.random.default_rng(1)
    ).confidence_interval
    assert bootstrap.mean_interval(values, 2) == pytest.approx(tuple(expected), rel=0.02)


def test_quantile_bootstrap_by_beta_is_resampling() -> None:
    """The same distribution as drawing n with replacement and taking the k-th smallest, found without drawing n."""
    values = np.sort(lognormal(80, 9))
    generator = np.random.default_rng(3)
    slow = np.sort(values[generator.integers(0, 80, (20_000, 80))], axis=1)[:, quantiles.rank(80, 0.9) - 1]
    fast = bootstrap.quantile_resamples(values, 0.9, np.random.default_rng(4), 20_000)
    assert stats.ks_2samp(slow, fast).pvalue > 0.01


def test_intervals_are_seeded() -> None:
    values = lognormal(50, 1)
    assert bootstrap.mean_interval(values, 5) == bootstrap.mean_interval(values, 5) != bootstrap.mean_interval(values, 6)


def test_block_bootstrap_is_wider_on_a_dependent_series() -> None:
    generator, values = np.random.default_rng(2), np.empty(400)
    values[0] = 0
    for index in range(1, 400):
        values[index] = 0.9 * values[index - 1] + generator.normal()
    block = series.block_length(values)
    assert 5 < block <= 100
    low, high = bootstrap.block_interval(values, lambda part: float(part.mean()), block, 1)
    alone_low, alone_high = bootstrap.block_interval(values, lambda part: float(part.mean()), 1, 1)
    assert high - low > 2 * (alone_high - alone_low)


def test_independent_samples_need_no_blocks() -> None:
    assert series.block_length(lognormal(400, 11)) == 1


# ---------------------------------------------------------------- trends
@pytest.mark.parametrize("seed", range(4))
def test_theil_sen_is_scipys(seed: int) -> None:
    generator = np.random.default_rng(seed)
    x = np.sort(generator.uniform(0, 10, 40))
    y = np.round(0.7 * x + generator.standard_t(2, 40), 1 if seed % 2 else 6)
    expected = stats.theilslopes(y, x, 0.95)
    found = series.theil_sen(x, y)
    assert (found.slope, found.low, found.high) == pytest.approx((expected.slope, expected.low_slope, expected.high_slope))


def test_a_trend_of_three_points_has_no_bounds() -> None:
    found = series.theil_sen(np.arange(3.0), np.array([0.0, 1.0, 2.0]))
    assert found.slope == 1.0 and found.low is None


# ---------------------------------------------------------------- throughput
def spans(rows: list[tuple[float, float, float, float, float]]) -> throughput.Spans:
    start, first, last, end, tokens = (np.array(column) for column in zip(*rows, strict=True))
    return throughput.Spans(start, end, first, last, tokens)


def test_steady_window_leaves_out_ramps() -> None:
    # Two lanes at 10 tokens/s each from 2 s to 12 s; one lane alone before and after.
    rows = [(0, 1, 11, 11, 101), (1, 2, 12, 12, 101), (11, 12, 22, 22, 101)]
    found = throughput.steady(spans(rows), 2)
    assert found is not None and (found.begin_s, found.end_s, found.level) == (1, 12, 2)
    # Both of the first answers whole; the third one's first token is not before the end.
    assert found.tokens == pytest.approx(101 + 101)


def test_an_even_load_has_its_exact_rate() -> None:
    rows = [
        (lane * 0.1 + 10 * turn, lane * 0.1 + 10 * turn, lane * 0.1 + 10 * (turn + 1), lane * 0.1 + 10 * (turn + 1), 200.0)
        for lane in range(4)
        for turn in range(5)
    ]
    found = throughput.steady(spans(rows), 4)
    assert found is not None and found.level == 4
    assert found.tokens_per_s == pytest.approx(80, rel=0.01)
    assert throughput.slices(spans(rows), found).mean() == pytest.approx(found.tokens_per_s, rel=0.01)


def test_answers_without_a_visible_first_token_are_spread_over_their_request() -> None:
    rows = [(0.0, math.nan, math.nan, 10.0, 100.0), (0.0, math.nan, math.nan, 10.0, 100.0)]
    assert throughput.tokens_between(spans(rows), 0, 5) == pytest.approx(100)


def test_one_request_alone_is_its_own_window() -> None:
    found = throughput.steady(spans([(0.0, 1.0, 2.0, 2.0, 11.0)]), 1)
    assert found is not None and found.seconds == 2.0 and found.completed == 1
    assert throughput.steady(spans([(0.0, 1.0, 2.0, 2.0, 11.0)]), None) is None


# ---------------------------------------------------------------- comparison
def test_holm_by_hand() -> None:
    assert holm.adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm.adjusted([]) == []


@pytest.mark.parametrize("rounds", [1, 10])
@pytest.mark.parametrize("seed", range(3))
def test_eight_percent_is_found_and_nothing_is_not(rounds: int, seed: int) -> None:
    base, same, slow = (
        lognormal(300, seed, sigma=0.05),
        lognormal(300, seed + 50, sigma=0.05),
        1.08 * lognormal(300, seed + 90, sigma=0.05),
    )
    worse = compare.quantile_delta(in_rounds(base, rounds), in_rounds(slow, rounds), 0.5, seed)
    equal = compare.quantile_delta(in_rounds(base, rounds), in_rounds(same, rounds), 0.5, seed)
    assert worse is not None and compare.not_worse(worse, 3) is Outcome.FAIL and worse.change is Change.WORSE
    assert worse.percent == pytest.approx(8, abs=2) and worse.p_within(3) < 0.01
    assert equal is not None and compare.not_worse(equal, 3) is Outcome.PASS and equal.p_within(3) > 0.5


def test_few_noisy_samples_decide_nothing() -> None:
    delta = compare.quantile_delta(in_rounds(lognormal(30, 1, sigma=0.8), 1), in_rounds(lognormal(30, 2, sigma=0.8), 1), 0.5, 1)
    assert delta is not None and compare.not_worse(delta, 3) is Outcome.UNDECIDED


def test_throughput_turns_the_sign_and_says_so() -> None:
    base, less = np.full(20, 100.0) + np.arange(20) % 3, np.full(20, 90.0) + np.arange(20) % 3
    delta = compare.mean_delta(base, less, 1, Direction.HIGHER_IS_BETTER, paired=True)
    assert delta is not None and delta.percent == pytest.approx(-9.9, abs=0.2) and delta.absolute == pytest.approx(-10)
    assert (
        delta.change is Change.WORSE
        and compare.not_worse(delta, 5) is Outcome.FAIL
        and compare.not_worse(delta, 12) is Outcome.PASS
    )
    back = compare.mean_delta(less, base, 1, Direction.HIGHER_IS_BETTER, paired=True)
    assert back is not None and compare.improved(back, 10) is Outcome.PASS and compare.improved(back, 12) is Outcome.FAIL


def test_rounds_bootstrap_is_the_plain_one_done_faster() -> None:
    rounds = [lognormal(size, seed) for seed, size in enumerate((7, 12, 9, 10, 11, 8))]
    chosen = bootstrap.rounds_indices(6, 50, np.random.default_rng(1))
    slow = [quantiles.nearest_rank(np.sort(bootstrap.pooled(rounds, row)), 0.95) for row in chosen]
    assert compare._round_quantiles(rounds, 0.95, chosen).tolist() == slow


def test_interval_over_rounds_covers_a_shared_disturbance() -> None:
    """Whole rounds are slow or fast by 10 %; resampling requests would be five times too sure."""
    generator = np.random.default_rng(3)
    rounds = {index: (1 + 0.1 * generator.normal()) * lognormal(40, index, sigma=0.02) for index in range(10)}
    other = {index: (1 + 0.1 * generator.normal()) * lognormal(40, index + 50, sigma=0.02) for index in range(10)}
    by_rounds = compare.quantile_delta(rounds, other, 0.5, 1)
    flat = compare.quantile_delta(
        {0: generator.permutation(np.concatenate(list(rounds.values())))},
        {0: generator.permutation(np.concatenate(list(other.values())))},
        0.5,
        1,
    )
    assert by_rounds is not None and flat is not None and by_rounds.method == "rounds" and flat.method == "requests"
    width = [high - low for low, high in (by_rounds.interval_percent, flat.interval_percent)]
    assert width[0] > 1.5 * width[1]


def test_noise_floor_follows_the_noise() -> None:
    quiet = compare.noise_floor(in_rounds(lognormal(300, 1, sigma=0.02), 10), 0.5, 1)
    loud = compare.noise_floor(in_rounds(lognormal(300, 1, sigma=0.4), 10), 0.5, 1)
    assert quiet is not None and loud is not None and quiet < 0.6 < 3 < loud
    assert compare.noise_floor(in_rounds(lognormal(19, 1), 1), 0.5, 1) is None
    assert compare.noise_floor(in_rounds(lognormal(300, 1, sigma=0.02), 1), 0.5, 1) == pytest.approx(quiet, abs=0.3)


def test_failures_at_the_quantile_of_the_candidate_are_infinitely_worse() -> None:
    base, failing = lognormal(300, 1), np.concatenate([lognormal(270, 2), np.full(30, math.inf)])
    delta = compare.quantile_delta(in_rounds(base, 1), in_rounds(failing, 1), 0.99, 1)
    assert delta is not None and delta.percent == math.inf and compare.not_worse(delta, 5) is Outcome.FAIL


@pytest.mark.long
def test_intervals_over_rounds_hold_what_they_promise() -> None:
    """Builds that differ by exactly 4 %, measured in disturbed rounds: 95 % intervals hold 4 % in nearly 95 % of 300 comparisons."""
    held = 0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        disturbed = 1 + 0.03 * generator.normal(size=(2, 12))
        base = {index: disturbed[0, index] * lognormal(40, 2 * seed + 10_000 * index, sigma=0.05) for index in range(12)}
        other = {
            index: 1.04 * disturbed[1, index] * lognormal(40, 2 * seed + 1 + 10_000 * index, sigma=0.05) for index in range(12)
        }
        delta = compare.quantile_delta(base, other, 0.5, seed)
        assert delta is not None
        low, high = delta.interval_percent
        held += low <= 4 <= high
    assert 0.88 <= held / 300 <= 0.98, held


@pytest.mark.long
def test_two_identical_builds_are_seldom_called_different() -> None:
    """Independent samples without rounds: the sign is decided wrongly in about 5 % of 400 comparisons of P50 and of P90."""
    for q in (0.5, 0.9):
        wrong = 0
        for seed in range(400):
            sides = [in_rounds(lognormal(200, 7 * seed + side + int(1_000_000 * q)), 1) for side in (0, 1)]
            delta = compare.quantile_delta(sides[0], sides[1], q, seed)
            wrong += delta is not None and delta.change is not Change.UNDECIDED
        assert wrong / 400 <= 0.09, (q, wrong)
