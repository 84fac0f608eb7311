//! The clock: a queue of events, each of which is "job j wants its next sample".

use crate::{
    Case,
    arms::{Arm, ArmKind, Granted, OriginLink},
    bound,
    case::Reader,
    statistics::Statistics,
};
use fletch_core::order::sweep::SweepParams;
use serde::Serialize;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// The result of a case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// The case's name.
    pub case: String,
    /// The policy that was simulated.
    pub arm: ArmKind,
    /// Cache size as a part of the dataset.
    pub cache: f64,
    /// Origin bytes per delivered byte.
    pub ratio: f64,
    /// The least `ratio` of any policy; 0 if it was not computed.
    pub bound: f64,
    /// The simple form of the bound, (1 − c) · fastest / Σ rates.
    pub simple: f64,
    /// The part of `ratio` that was read by range.
    pub ranged: f64,
    /// Per job: how often neighbours come from one unit, relative to a uniform shuffle.
    pub near: Vec<f64>,
    /// Per job: the same, as the mean over distances 1 to 10.
    pub near10: Vec<f64>,
    /// Longest run of samples of which each was fetched for its own pick.
    pub run_max: u64,
    /// Of the worst job: the part of samples requested less than 16 of its own picks earlier.
    pub fresh: f64,
    /// Fetch rate of the busiest hundredth of an epoch, relative to the mean.
    pub peak: f64,
    /// Per job: the part of the measured time that it waited for a sample.
    pub stalled: Vec<f64>,
    /// Per job: the mean length in seconds of the epochs that began in the measured time.
    pub epoch_seconds: Vec<f64>,
    /// Samples delivered in the measured time.
    pub delivered: u64,
    /// Samples prefetched for strict jobs and evicted unread, per delivered sample.
    pub vain: f64,
    /// Loads that servers refused, or whose bytes were wrong.
    pub failed: u64,
}

impl Outcome {
    /// Returns the ratio relative to the bound: 1 is the best possible.
    #[must_use]
    pub fn times_bound(&self) -> f64 {
        if self.bound > 0.0 { self.ratio / self.bound } else { f64::NAN }
    }
}

struct Client {
    clock: f64,
    buffer: VecDeque<Granted>,
    active: bool,
}

/// Converts a time to fixed point. The queue breaks ties by job.
fn tick(t: f64) -> u64 {
    (t * 1_048_576.0) as u64
}

/// Simulates a case against an arm.
///
/// # Panics When the case has faults ([`Case::faults`]), or when a policy breaks its promises: it delivers a
/// sample twice, exceeds the capacity, or delivers a sample that is neither cached nor paid for.
#[must_use]
pub fn simulate(case: &Case, arm: ArmKind, params: SweepParams) -> Outcome {
    simulate_with(case, arm, params, &mut |_| {})
}

/// Simulates a case with Fletch's policy and passes the trace of its sweep to `trace`, in pieces.
/// `SweepPolicy::play` plays it again.
///
/// # Panics
/// As [`simulate`].
pub fn record(case: &Case, params: SweepParams, trace: &mut dyn FnMut(Vec<u8>)) -> Outcome {
    let mut policy = ArmKind::Fletch.build(case, params, true);
    play(case, ArmKind::Fletch, policy.as_mut(), &mut |_| {}, &mut |p| trace(p.take_trace()))
}

/// Events between two calls of `watch`.
const WATCH_EVERY: u64 = 1 << 16;

/// Simulates as [`simulate`] does, and now and then calls `watch` with the part of the case's time that has
/// passed.
///
/// # Panics
/// As [`simulate`].
#[must_use]
pub fn simulate_with(case: &Case, arm: ArmKind, params: SweepParams, watch: &mut dyn FnMut(f64)) -> Outcome {
    let mut policy = arm.build(case, params, false);
    play(case, arm, policy.as_mut(), watch, &mut |_| {})
}

fn play(
    case: &Case,
    arm: ArmKind,
    policy: &mut dyn Arm,
    watch: &mut dyn FnMut(f64),
    now_and_then: &mut dyn FnMut(&mut dyn Arm),
) -> Outcome {
    let faults = case.faults();
    assert!(faults.is_empty(), "{}: {}", case.name, faults.join("; "));
    let mut stats = Statistics::new(case);
    let mut link = OriginLink::new(case.origin);
    let mut heap = BinaryHeap::new();
    let mut clients: Vec<Client> = (0u32..)
        .zip(&case.jobs)
        .map(|(j, s)| Client { clock: s.start + f64::from(j) * 1e-3, buffer: VecDeque::new(), active: false })
        .collect();
    for (j, c) in clients.iter().enumerate() {
        heap.push(Reverse((tick(c.clock), j)));
    }
    let mut events = 0u64;
    while let Some(Reverse((_, j))) = heap.pop() {
        events += 1;
        if events.is_multiple_of(WATCH_EVERY) {
            watch(clients[j].clock / case.end);
            now_and_then(policy);
        }
        let (spec, client) = (&case.jobs[j], &mut clients[j]);
        let now = client.clock;
        if now >= case.end {
            continue;
        }
        if spec.end.is_some_and(|e| now >= e) {
            if std::mem::take(&mut client.active) {
                policy.leave(j);
                client.buffer.clear();
            }
            continue;
        }
        if let Some(&(_, until)) = spec.pauses.iter().find(|p| now >= p.0 && now < p.1) {
            client.clock = until;
            heap.push(Reverse((tick(until), j)));
            continue;
        }
        client.active = true;
        if stats.jobs[j].left.count() == 0 {
            stats.begin(j, now);
            policy.begin(j, &mut stats);
        }
        if client.buffer.is_empty() {
            let granted = policy.grant(j, now, &mut link, &mut stats);
            client.buffer.push_back(granted.expect("an epoch with samples left grants one"));
        }
        let Some(&Granted { sample, arrives, asked, forced }) = client.buffer.front() else { continue };
        if arrives > now {
            if now >= case.warm {
                stats.jobs[j].stalled += arrives - now;
            }
            client.clock = arrives;
            heap.push(Reverse((tick(arrives), j)));
            continue;
        }
        client.buffer.pop_front();
        stats.deliver(j, sample, now, forced, now - asked < 16.0 / spec.rate);
        let lease = spec.lease.max(1) as usize;
        while client.buffer.len() + lease <= spec.leased.unwrap_or(case.leased) {
            let before = client.buffer.len();
            client.buffer.extend((0..lease).map_while(|_| policy.grant(j, now, &mut link, &mut stats)));
            if client.buffer.len() == before {
                break;
            }
        }
        client.clock += 1.0 / spec.rate;
        heap.push(Reverse((tick(client.clock), j)));
    }
    now_and_then(policy);
    outcome(case, arm, &stats)
}

fn outcome(case: &Case, arm: ArmKind, stats: &Statistics) -> Outcome {
    let delivered = stats.delivered.max(1) as f64;
    let simple = bound::simple(case);
    let steady = case.origin.is_none()
        && case.jobs.iter().all(|s| {
            s.end.is_none() && s.pauses.is_empty() && s.subset.is_none() && s.reader == Reader::Substitute
        });
    let mut best = if case.bound { bound::packing(stats, case) / delivered } else { 0.0 };
    if steady {
        // For a finite window the simple form is slightly higher.
        best = best.max(simple);
    }
    let span = case.end - case.warm;
    let mean = stats.backend as f64 / (span / stats.bucket);
    let first = (case.warm / stats.bucket) as u64 + 1;
    let last = first + ((span / stats.bucket) as u64).saturating_sub(1);
    let peak = stats.buckets.range(first..last).map(|b| *b.1).max().unwrap_or(0) as f64 / mean.max(1.0);
    let counted: Vec<_> =
        stats.jobs.iter().filter(|b| b.reader == Reader::Substitute && b.seen > 0).collect();
    Outcome {
        case: case.name.clone(),
        arm,
        cache: case.cache,
        ratio: stats.backend as f64 / delivered,
        bound: best,
        simple,
        ranged: stats.ranged as f64 / delivered,
        near: counted.iter().map(|b| b.near(1, 1)).collect(),
        near10: counted.iter().map(|b| b.near(1, 10)).collect(),
        run_max: counted.iter().map(|b| b.run_max).max().unwrap_or(0),
        fresh: counted.iter().map(|b| b.fresh()).fold(0.0, f64::max),
        peak,
        stalled: stats.jobs.iter().map(|b| b.stalled / span).collect(),
        epoch_seconds: stats
            .jobs
            .iter()
            .map(|b| {
                let ended: Vec<f64> =
                    b.spans.iter().filter(|s| s.0 >= case.warm).map(|s| s.1 - s.0).collect();
                ended.iter().sum::<f64>() / ended.len().max(1) as f64
            })
            .collect(),
        delivered: stats.delivered,
        vain: stats.vain as f64 / delivered,
        failed: stats.failed,
    }
}
