//! How links divide their bandwidth among streams, what a division is worth, and the rate of every job.

use super::{
    problem::Problem,
    streams::{DatasetStreams, Flow},
};

/// The price of origin bytes where nobody waits for them: all that the jobs of a link could ask for costs
/// this part of their mean speed.
///
/// Without a price, capacity that makes no job faster could go anywhere. With it, that capacity goes where it
/// saves most origin bytes, and links keep room.
const ORIGIN_PRICE: f64 = 0.05;

/// What a division does to each link, and its value.
#[derive(Debug, Clone)]
pub(super) struct Evaluation {
    /// The value of the goal.
    pub value: f64,
    /// What each link gives to a weight of 1, in bytes a second; infinite if the link is not full.
    pub levels: Vec<f64>,
    /// The value of one byte a second more of each link.
    pub prices: Vec<f64>,
}

/// Returns the level of a link: weighted max-min by water-filling. A stream that needs less than its part
/// leaves the rest to the others.
fn water_level(bandwidth: f64, flows: &[Flow<'_>]) -> f64 {
    let mut demands: Vec<(f64, f64)> = flows.iter().map(|f| (f.demand(), f.stream.weight())).collect();
    // By demand per weight: one pass serves everybody who is below the level. Sums start at the end, because
    // a difference of large sums would leave a rounding error as the weight of the last stream.
    demands.sort_by(|a, b| (a.0 * b.1).total_cmp(&(b.0 * a.1)));
    let mut weights_from = vec![0.0; demands.len() + 1];
    for (i, (_, weight)) in demands.iter().enumerate().rev() {
        weights_from[i] = weights_from[i + 1] + weight;
    }
    let mut left = bandwidth;
    for (i, (demand, weight)) in demands.iter().enumerate() {
        let level = left / weights_from[i];
        if *demand > level * weight {
            return level;
        }
        left -= demand;
    }
    f64::INFINITY
}

/// Evaluates a division of a sorted problem.
pub(super) fn evaluate(problem: &Problem, datasets: &[DatasetStreams], shares: &[f64]) -> Evaluation {
    let mut flows: Vec<Vec<Flow<'_>>> = vec![Vec::new(); problem.links.len()];
    for (dataset, &share) in datasets.iter().zip(shares) {
        flows[dataset.link].extend(dataset.flows(share));
    }
    let mut out = Evaluation { value: 0.0, levels: Vec::new(), prices: Vec::new() };
    for (link, flows) in problem.links.iter().zip(&flows) {
        let level = water_level(link.bandwidth, flows);
        let (mut slope, mut waiting_weight, mut load) = (0.0, 0.0, 0.0);
        for flow in flows {
            let bandwidth = flow.bandwidth(level);
            load += bandwidth;
            if flow.demand() > bandwidth {
                let (value, by_log_rate) = flow.stream.value(flow.rate(bandwidth));
                out.value += value;
                slope += by_log_rate;
                waiting_weight += flow.stream.weight();
            }
        }
        let weight: f64 = flows.iter().map(|f| f.stream.weight()).sum();
        let asked: f64 = flows.iter().map(|f| f.stream.rate_sum).sum();
        let idle_price = if asked > 0.0 { ORIGIN_PRICE * weight / link.bandwidth.min(asked) } else { 0.0 };
        out.value -= idle_price * load;
        out.levels.push(level);
        out.prices.push(if waiting_weight > 0.0 { slope / level / waiting_weight } else { idle_price });
    }
    out
}

/// Returns the rate of every job of a problem under a division, in bytes a second, in the problem's order.
///
/// `shares` are bytes of each dataset, in the problem's order, beside the pinned bytes.
///
/// # Panics
/// If `shares` has another length than the problem's datasets, or an index of the problem is out of range
/// ([`Problem::check`] tells).
#[must_use]
pub fn job_rates(problem: &Problem, shares: &[f64]) -> Vec<f64> {
    assert_eq!(shares.len(), problem.datasets.len(), "one share for each dataset");
    let datasets = DatasetStreams::of(problem);
    let levels = evaluate(problem, &datasets, shares).levels;
    let mut rates = vec![0.0; problem.jobs.len()];
    for (dataset, &share) in datasets.iter().zip(shares) {
        for flow in dataset.flows(share) {
            let pace = flow.rate(flow.bandwidth(levels[dataset.link]));
            for &job in &flow.stream.jobs {
                rates[job] = problem.jobs[job].most_rate.min(pace);
            }
        }
    }
    rates
}

/// Returns what is fetched of every dataset under a division, in bytes a second, in the problem's order.
///
/// # Panics
/// As [`job_rates`].
#[must_use]
pub fn origin_rates(problem: &Problem, shares: &[f64]) -> Vec<f64> {
    assert_eq!(shares.len(), problem.datasets.len(), "one share for each dataset");
    let datasets = DatasetStreams::of(problem);
    let levels = evaluate(problem, &datasets, shares).levels;
    let fetched = |(dataset, &share): (&DatasetStreams, &f64)| {
        dataset.flows(share).map(|flow| flow.bandwidth(levels[dataset.link])).sum()
    };
    datasets.iter().zip(shares).map(fetched).collect()
}

/// Returns what one byte more is worth to each dataset, in units of the goal.
///
/// It is the slope over the next 1/1,000 of the dataset, links and prices being as they are. A dataset that
/// has all of its bytes has the value 0.
///
/// # Panics
/// As [`job_rates`].
#[must_use]
pub fn byte_values(problem: &Problem, shares: &[f64]) -> Vec<f64> {
    assert_eq!(shares.len(), problem.datasets.len(), "one share for each dataset");
    let datasets = DatasetStreams::of(problem);
    let now = evaluate(problem, &datasets, shares);
    let value = |(dataset, &share): (&DatasetStreams, &f64)| {
        let (level, price) = (now.levels[dataset.link], now.prices[dataset.link]);
        let more = (dataset.size / 1000.0).min(dataset.room - share);
        if more <= 0.0 {
            return 0.0;
        }
        let gain =
            dataset.priced_value(share + more, level, price) - dataset.priced_value(share, level, price);
        (gain / more).max(0.0)
    };
    datasets.iter().zip(shares).map(value).collect()
}
