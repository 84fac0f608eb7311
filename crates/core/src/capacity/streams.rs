//! The streams of a dataset: what its jobs read from the origin at a given share of the cache.
//!
//! A stream is a sweep with all of its jobs, or one job that reads by itself. Per byte that its fastest job
//! reads, it fetches 1 − c/D bytes from the origin, c being the cached bytes of a dataset of D bytes.

use super::problem::{JobDemand, Problem};

/// What a sweep of several jobs fetches, relative to the bytes that are not cached. Measured sweeps lie 2 to
/// 5 % above the bound.
const SWEEP_OVERHEAD: f64 = 1.03;
/// The relative tolerance of comparisons between bytes.
pub(super) const TOLERANCE: f64 = 1e-9;

/// The jobs of one stream, slowest first.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    /// The indices of its jobs in [`Problem::jobs`].
    pub jobs: Vec<usize>,
    /// The most rates of its jobs, ascending.
    most_rates: Vec<f64>,
    /// Sums of weights over the jobs from an index on.
    weights_from: Vec<f64>,
    /// Sums of weight × ln(most rate) over the jobs from an index on.
    logs_from: Vec<f64>,
    /// The sum of its jobs' most rates.
    pub rate_sum: f64,
    overhead: f64,
}

impl Stream {
    fn new(problem: &Problem, mut jobs: Vec<usize>) -> Self {
        let of = |i: usize| &problem.jobs[i];
        jobs.sort_by(|&a, &b| of(a).most_rate.total_cmp(&of(b).most_rate).then(of(a).id.cmp(&of(b).id)));
        let sums_from = |term: fn(&JobDemand) -> f64| {
            let mut sums = vec![0.0; jobs.len() + 1];
            for (i, &job) in jobs.iter().enumerate().rev() {
                sums[i] = sums[i + 1] + term(of(job));
            }
            sums
        };
        Stream {
            most_rates: jobs.iter().map(|&j| of(j).most_rate).collect(),
            weights_from: sums_from(|j| j.weight),
            logs_from: sums_from(|j| j.weight * j.most_rate.ln()),
            rate_sum: jobs.iter().map(|&j| of(j).most_rate).sum(),
            overhead: if jobs.len() > 1 { SWEEP_OVERHEAD } else { 1.0 },
            jobs,
        }
    }

    /// Returns the sum of its jobs' weights.
    pub fn weight(&self) -> f64 {
        self.weights_from[0]
    }

    /// Returns the rate of its fastest job if none waits, in bytes a second.
    pub fn top_rate(&self) -> f64 {
        self.most_rates.last().copied().unwrap_or(0.0)
    }

    /// Returns the value of its jobs when its fastest moves at `rate`, and the derivative of the value by
    /// ln(rate). Both are 0 if no job waits.
    pub fn value(&self, rate: f64) -> (f64, f64) {
        let waiting = self.most_rates.partition_point(|&most| most <= rate);
        let weight = self.weights_from[waiting];
        if waiting == self.most_rates.len() {
            return (0.0, 0.0);
        }
        (weight * rate.ln() - self.logs_from[waiting], weight)
    }
}

/// A stream at a share of the cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flow<'a> {
    /// The stream.
    pub stream: &'a Stream,
    /// The bytes that it fetches per byte that its fastest job reads.
    pub fetched_per_byte: f64,
}

impl Flow<'_> {
    /// Returns the bytes a second that it fetches if its link is not full.
    pub fn demand(&self) -> f64 {
        self.fetched_per_byte * self.stream.top_rate()
    }

    /// Returns what it fetches where a full link gives `level` bytes a second to a weight of 1.
    pub fn bandwidth(&self, level: f64) -> f64 {
        self.demand().min(level * self.stream.weight())
    }

    /// Returns the rate of its fastest job with a bandwidth, in bytes a second.
    pub fn rate(&self, bandwidth: f64) -> f64 {
        if self.fetched_per_byte > 0.0 { bandwidth / self.fetched_per_byte } else { self.stream.top_rate() }
    }
}

/// The streams of one dataset, with and without a sweep.
#[derive(Debug, Clone)]
pub(super) struct DatasetStreams {
    pub size: f64,
    /// The most bytes that its share can be: its size less what is pinned.
    pub room: f64,
    pub link: usize,
    pinned: f64,
    window: f64,
    sweep: Option<Stream>,
    /// The sweep's jobs, each by itself.
    apart: Vec<Stream>,
    strict: Vec<Stream>,
}

impl DatasetStreams {
    /// Returns the streams of every dataset of a sorted problem.
    pub fn of(problem: &Problem) -> Vec<DatasetStreams> {
        let mut readers: Vec<(Vec<usize>, Vec<usize>)> = vec![Default::default(); problem.datasets.len()];
        for (i, job) in problem.jobs.iter().enumerate() {
            let (any_order, strict) = &mut readers[job.dataset];
            if job.strict { strict.push(i) } else { any_order.push(i) }
        }
        let each = |jobs: &[usize]| jobs.iter().map(|&j| Stream::new(problem, vec![j])).collect();
        let streams = |(d, (any_order, strict)): (&super::DatasetDemand, (Vec<usize>, Vec<usize>))| {
            let pinned = d.pinned.min(d.size);
            DatasetStreams {
                size: d.size,
                room: d.size - pinned,
                link: d.link,
                pinned,
                window: if any_order.len() > 1 { d.window } else { 0.0 },
                apart: each(&any_order),
                strict: each(&strict),
                sweep: (!any_order.is_empty()).then(|| Stream::new(problem, any_order)),
            }
        };
        problem.datasets.iter().zip(readers).map(streams).collect()
    }

    /// Returns the flows at a share of the cache.
    pub fn flows(&self, share: f64) -> impl Iterator<Item = Flow<'_>> {
        let cached = self.pinned + share;
        let missing = (1.0 - cached / self.size).max(0.0);
        let swept = cached >= self.window - TOLERANCE * self.size;
        let readers: &[Stream] = if swept { self.sweep.as_slice() } else { &self.apart };
        readers.iter().chain(&self.strict).map(move |stream| {
            let overhead = if swept { stream.overhead } else { 1.0 };
            Flow { stream, fetched_per_byte: overhead * missing }
        })
    }

    /// Returns the shares above 0 at which something changes where the link gives `level`: the window, the
    /// whole dataset, and where one job more stops waiting. Ascending.
    pub fn knees(&self, level: f64) -> Vec<f64> {
        let mut knees = vec![self.window - self.pinned, self.room];
        for stream in self.sweep.iter().chain(&self.strict) {
            let unbound = level * stream.weight() / stream.overhead;
            knees.extend(stream.most_rates.iter().map(|f| self.size * (1.0 - unbound / f) - self.pinned));
        }
        knees.retain(|&share| share > 0.0 && share <= self.room);
        knees.sort_by(f64::total_cmp);
        knees.dedup_by(|a, b| *a - *b < TOLERANCE * self.size);
        knees
    }

    /// Returns the value at a share, where the link gives `level` and a byte a second costs `price`. Exact to
    /// first order.
    pub fn priced_value(&self, share: f64, level: f64, price: f64) -> f64 {
        self.flows(share)
            .map(|flow| {
                let bandwidth = flow.bandwidth(level);
                flow.stream.value(flow.rate(bandwidth)).0 - price * bandwidth
            })
            .sum()
    }
}
