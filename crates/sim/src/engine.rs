//! The clock: an event queue of "job j wants its next sample".

use crate::{
    Case,
    arms::{Arm, ArmKind, Granted, Net},
    books::Books,
    bound,
    case::Reader,
};
use fletch_core::order::sweep::SweepParams;
use serde::Serialize;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// What came of a case.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// The case's name.
    pub case: String,
    /// Which arm.
    pub arm: ArmKind,
    /// The cache, as a part of the dataset.
    pub cache: f64,
    /// Backend bytes per delivered byte.
    pub ratio: f64,
    /// What any policy must fetch, in the same unit; 0 if it was not asked for.
    pub bound: f64,
    /// Its simple form, (1 − c) · fastest / Σ rates.
    pub simple: f64,
    /// Of the delivered, read by range.
    pub ranged: f64,
    /// Neighbours from one unit at lag 1 relative to a uniform shuffle, per job ...
    pub near: Vec<f64>,
    /// ... and the mean over lags 1 to 10.
    pub near10: Vec<f64>,
    /// Longest run of draws that were fetched for that very draw.
    pub run_max: u64,
    /// Worst job's part of samples that were asked for less than 16 of its draws earlier.
    pub fresh: f64,
    /// Busiest 1 % of an epoch against the mean fetch rate.
    pub peak: f64,
    /// Part of the measured time that each job waited for a sample.
    pub stalled: Vec<f64>,
    /// Mean seconds of each job's epochs that ended in the measured time.
    pub epoch_seconds: Vec<f64>,
    /// Samples delivered in the measured time.
    pub delivered: u64,
    /// Of them, fetched ahead for strict jobs and dropped unread.
    pub vain: f64,
    /// Loads that servers refused, or whose bytes were no good.
    pub failed: u64,
}

impl Outcome {
    /// Distance to the bound: 1 is the best possible.
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

/// Events in fixed point, ties by job.
fn tick(t: f64) -> u64 {
    (t * 1_048_576.0) as u64
}

/// Plays a case against an arm.
///
/// # Panics
/// When the case has faults ([`Case::faults`]), or when a policy breaks its promises: a sample
/// delivered twice, a cache over its capacity, a sample that is neither here nor paid for.
#[must_use]
pub fn simulate(case: &Case, arm: ArmKind, params: SweepParams) -> Outcome {
    simulate_with(case, arm, params, &mut |_| {})
}

/// Plays a case with Fletch's policy and gives the trace of its sweep (`SweepPolicy::play` plays it
/// again), in pieces to `trace`.
///
/// # Panics
/// As [`simulate`].
pub fn record(case: &Case, params: SweepParams, trace: &mut dyn FnMut(Vec<u8>)) -> Outcome {
    let mut policy = ArmKind::Fletch.build(case, params, true);
    play(case, ArmKind::Fletch, policy.as_mut(), &mut |_| {}, &mut |p| trace(p.take_trace()))
}

/// Events between two words to who watches.
const WATCH_EVERY: u64 = 1 << 16;

/// As [`simulate`], and says now and then which part of the case's time has passed.
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
    let mut books = Books::new(case);
    let mut net = Net::new(case.origin);
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
        if books.jobs[j].left.count() == 0 {
            books.begin(j, now);
            policy.begin(j, &mut books);
        }
        if client.buffer.is_empty() {
            let granted = policy.grant(j, now, &mut net, &mut books);
            client.buffer.push_back(granted.expect("an epoch with samples left grants one"));
        }
        let Some(&Granted { sample, arrives, asked, forced }) = client.buffer.front() else { continue };
        if arrives > now {
            if now >= case.warm {
                books.jobs[j].stalled += arrives - now;
            }
            client.clock = arrives;
            heap.push(Reverse((tick(arrives), j)));
            continue;
        }
        client.buffer.pop_front();
        books.deliver(j, sample, now, forced, now - asked < 16.0 / spec.rate);
        let lease = spec.lease.max(1) as usize;
        while client.buffer.len() + lease <= spec.leased.unwrap_or(case.leased) {
            let before = client.buffer.len();
            client.buffer.extend((0..lease).map_while(|_| policy.grant(j, now, &mut net, &mut books)));
            if client.buffer.len() == before {
                break;
            }
        }
        client.clock += 1.0 / spec.rate;
        heap.push(Reverse((tick(client.clock), j)));
    }
    now_and_then(policy);
    outcome(case, arm, &books)
}

fn outcome(case: &Case, arm: ArmKind, books: &Books) -> Outcome {
    let delivered = books.delivered.max(1) as f64;
    let simple = bound::simple(case);
    let steady = case.origin.is_none()
        && case.jobs.iter().all(|s| {
            s.end.is_none() && s.pauses.is_empty() && s.subset.is_none() && s.reader == Reader::Substitute
        });
    let mut best = if case.bound { bound::packing(books, case) / delivered } else { 0.0 };
    if steady {
        // For a finite window the simple form is slightly higher.
        best = best.max(simple);
    }
    let span = case.end - case.warm;
    let mean = books.backend as f64 / (span / books.bucket);
    let first = (case.warm / books.bucket) as u64 + 1;
    let last = first + ((span / books.bucket) as u64).saturating_sub(1);
    let peak = books.buckets.range(first..last).map(|b| *b.1).max().unwrap_or(0) as f64 / mean.max(1.0);
    let counted: Vec<_> =
        books.jobs.iter().filter(|b| b.reader == Reader::Substitute && b.seen > 0).collect();
    Outcome {
        case: case.name.clone(),
        arm,
        cache: case.cache,
        ratio: books.backend as f64 / delivered,
        bound: best,
        simple,
        ranged: books.ranged as f64 / delivered,
        near: counted.iter().map(|b| b.near(1, 1)).collect(),
        near10: counted.iter().map(|b| b.near(1, 10)).collect(),
        run_max: counted.iter().map(|b| b.run_max).max().unwrap_or(0),
        fresh: counted.iter().map(|b| b.fresh()).fold(0.0, f64::max),
        peak,
        stalled: books.jobs.iter().map(|b| b.stalled / span).collect(),
        epoch_seconds: books
            .jobs
            .iter()
            .map(|b| {
                let ended: Vec<f64> =
                    b.spans.iter().filter(|s| s.0 >= case.warm).map(|s| s.1 - s.0).collect();
                ended.iter().sum::<f64>() / ended.len().max(1) as f64
            })
            .collect(),
        delivered: books.delivered,
        vain: books.vain as f64 / delivered,
        failed: books.failed,
    }
}
