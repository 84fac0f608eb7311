//! The statistics of a run: what each job was delivered, and what was fetched. They also check the arms: a
//! sample that is delivered twice in an epoch is a panic.

use crate::{Case, case::Reader};
use fletch_core::plan::Bits;
use std::collections::{BTreeMap, VecDeque};

/// The statistics and the epoch's state of one job.
pub(crate) struct JobStatistics {
    pub reader: Reader,
    pub plan: Bits,
    pub left: Bits,
    pub epoch: u64,
    /// Delivery times, kept for the bound.
    pub times: Vec<f64>,
    /// Epochs, as ranges of indexes into `times`.
    pub epochs: Vec<(usize, usize)>,
    /// Begin and end of each finished epoch.
    pub spans: Vec<(f64, f64)>,
    began: f64,
    /// Seconds in the measured time that the job waited for a sample.
    pub stalled: f64,
    last: VecDeque<u32>,
    same: [u64; 11],
    pub seen: u64,
    chance: f64,
    run: u64,
    pub run_max: u64,
    fresh: u64,
}

impl JobStatistics {
    /// Returns how often neighbours come from one unit, at lags `from..=to`, relative to a uniform shuffle.
    pub fn near(&self, from: usize, to: usize) -> f64 {
        let same: u64 = self.same[from..=to].iter().sum();
        same as f64 / (to + 1 - from) as f64 / self.seen.max(1) as f64 / self.chance
    }

    /// Returns the part of samples that were requested shortly before their delivery.
    pub fn fresh(&self) -> f64 {
        self.fresh as f64 / self.seen.max(1) as f64
    }
}

/// The statistics of a run.
pub(crate) struct Statistics {
    pub jobs: Vec<JobStatistics>,
    pub unit_of: Vec<u32>,
    pub warm: f64,
    pub backend: u64,
    pub ranged: u64,
    pub loads: u64,
    pub delivered: u64,
    /// Samples' worth that was prefetched and evicted unread.
    pub vain: u64,
    /// Loads that were refused, or whose bytes were wrong.
    pub failed: u64,
    pub buckets: BTreeMap<u64, u64>,
    pub bucket: f64,
    keep_times: bool,
}

impl Statistics {
    pub fn new(case: &Case) -> Self {
        let n = case.samples();
        let unit_of: Vec<u32> =
            (0u32..).zip(&case.units).flat_map(|(u, &g)| std::iter::repeat_n(u, g as usize)).collect();
        let fastest = case.jobs.iter().map(|j| j.rate).fold(0.0, f64::max);
        let jobs = case
            .jobs
            .iter()
            .map(|spec| {
                let plan = match spec.subset {
                    None => Bits::ones(n as u64),
                    Some(sub) => {
                        let mut plan = Bits::zeros(n as u64);
                        for s in 0..n as u64 {
                            let unit = unit_of[s as usize];
                            if sub.has(case.units.len(), unit, s) {
                                plan.set(s);
                            }
                        }
                        plan
                    }
                };
                let total = plan.count() as f64;
                let mut at = 0u64;
                let chance = case
                    .units
                    .iter()
                    .map(|&g| {
                        let here = plan.count_in(at, at + u64::from(g)) as f64;
                        at += u64::from(g);
                        (here / total).powi(2)
                    })
                    .sum();
                JobStatistics {
                    reader: spec.reader,
                    left: Bits::zeros(n as u64),
                    plan,
                    epoch: 0,
                    times: Vec::new(),
                    epochs: Vec::new(),
                    spans: Vec::new(),
                    began: 0.0,
                    stalled: 0.0,
                    last: VecDeque::new(),
                    same: [0; 11],
                    seen: 0,
                    chance,
                    run: 0,
                    run_max: 0,
                    fresh: 0,
                }
            })
            .collect();
        Statistics {
            jobs,
            unit_of,
            warm: case.warm,
            backend: 0,
            ranged: 0,
            loads: 0,
            delivered: 0,
            vain: 0,
            failed: 0,
            buckets: BTreeMap::new(),
            bucket: n as f64 / fastest / 100.0,
            keep_times: case.bound,
        }
    }

    /// Counts `n` samples' worth of bytes that were requested from the origin.
    pub fn fetched(&mut self, now: f64, n: u64, range: bool) {
        if now >= self.warm {
            self.backend += n;
            if range {
                self.ranged += n
            } else {
                self.loads += 1
            }
            *self.buckets.entry((now / self.bucket) as u64).or_default() += n;
        }
    }

    /// Counts `n` samples' worth of prefetched bytes that were evicted, if `unread`.
    pub fn vain(&mut self, now: f64, unread: bool, n: u64) {
        if unread && now >= self.warm {
            self.vain += n;
        }
    }

    /// Counts a load that was refused, or whose bytes will be wrong.
    pub fn failed(&mut self, now: f64) {
        self.failed += u64::from(now >= self.warm);
    }

    /// Starts an epoch of job j.
    pub fn begin(&mut self, j: usize, now: f64) {
        let b = &mut self.jobs[j];
        b.left = b.plan.clone();
        b.epoch += 1;
        b.began = now;
        let t = b.times.len();
        b.epochs.push((t, t));
    }

    /// Records that job j consumes a sample. `forced`: it was fetched for this pick; `fresh`: shortly before.
    pub fn deliver(&mut self, j: usize, sample: u32, now: f64, forced: bool, fresh: bool) {
        let unit = self.unit_of[sample as usize];
        let b = &mut self.jobs[j];
        assert!(b.left.clear(u64::from(sample)), "job {j}: sample {sample} delivered twice in one epoch");
        if self.keep_times {
            b.times.push(now);
            if let Some(e) = b.epochs.last_mut() {
                e.1 += 1;
            }
        }
        if now >= self.warm {
            self.delivered += 1;
            b.seen += 1;
            b.run = if forced { b.run + 1 } else { 0 };
            b.run_max = b.run_max.max(b.run);
            b.fresh += u64::from(fresh);
            for (lag, &x) in b.last.iter().enumerate() {
                b.same[lag + 1] += u64::from(x == unit);
            }
        }
        if b.left.count() == 0 {
            b.spans.push((b.began, now));
        }
        b.last.push_front(unit);
        b.last.truncate(10);
    }
}
