//! The exactly-once books of each job, and every statistic of what was delivered. An arm cannot
//! cheat them: it says which sample, and the books say whether that is allowed.

use crate::{Case, case::Reader};
use fletch_core::plan::Bits;
use std::collections::{BTreeMap, VecDeque};

pub(crate) struct JobBook {
    pub reader: Reader,
    pub plan: Bits,
    pub left: Bits,
    pub epoch: u64,
    /// Delivery times, and epochs as ranges of indexes into them (kept for the bound).
    pub times: Vec<f64>,
    pub epochs: Vec<(usize, usize)>,
    /// Of each finished epoch: when it began and ended.
    pub spans: Vec<(f64, f64)>,
    began: f64,
    /// Seconds that the job waited for a sample, inside the measured time.
    pub stalled: f64,
    last: VecDeque<u32>,
    same: [u64; 11],
    pub seen: u64,
    chance: f64,
    run: u64,
    pub run_max: u64,
    fresh: u64,
}

impl JobBook {
    /// Neighbours from one unit at lags `from..=to`, relative to a uniform shuffle.
    pub fn near(&self, from: usize, to: usize) -> f64 {
        let same: u64 = self.same[from..=to].iter().sum();
        same as f64 / (to + 1 - from) as f64 / self.seen.max(1) as f64 / self.chance
    }

    pub fn fresh(&self) -> f64 {
        self.fresh as f64 / self.seen.max(1) as f64
    }
}

pub(crate) struct Books {
    pub jobs: Vec<JobBook>,
    pub unit_of: Vec<u32>,
    pub warm: f64,
    pub backend: u64,
    pub ranged: u64,
    pub loads: u64,
    pub delivered: u64,
    /// Samples' worth fetched ahead and dropped unread; loads refused or no good.
    pub vain: u64,
    pub failed: u64,
    pub buckets: BTreeMap<u64, u64>,
    pub bucket: f64,
    keep_times: bool,
}

impl Books {
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
                JobBook {
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
        Books {
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

    /// `n` samples' worth of bytes were asked of the origin.
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

    /// `n` samples' worth was dropped that had been fetched ahead; `unread` if nobody had use of it.
    pub fn vain(&mut self, now: f64, unread: bool, n: u64) {
        if unread && now >= self.warm {
            self.vain += n;
        }
    }

    /// A load was refused, or will turn out to be no good.
    pub fn failed(&mut self, now: f64) {
        self.failed += u64::from(now >= self.warm);
    }

    pub fn begin(&mut self, j: usize, now: f64) {
        let b = &mut self.jobs[j];
        b.left = b.plan.clone();
        b.epoch += 1;
        b.began = now;
        let t = b.times.len();
        b.epochs.push((t, t));
    }

    /// Job j consumes a sample. `forced`: fetched for this very draw; `fresh`: shortly before.
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
