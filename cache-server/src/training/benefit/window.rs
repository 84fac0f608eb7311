//! The latest batches of a job, with the times of their leases, and what they tell.

use super::{
    lease_times::LeaseTimes,
    probe::Probe,
    service_log::{ServiceLog, seconds},
};
use fletch_api::{
    BatchTimes,
    benefit::{BenefitEstimate, BenefitVerdict, JobBenefit, WhatIf},
};
use fletch_core::benefit::{BatchObservation, Estimate, NotMeasured, Verdict, Window, estimate};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::Instant,
};

/// The steps that give the rates.
const RATE_STEPS: usize = 256;
/// The steps that give the verdict: it follows a bottleneck that moves.
const VERDICT_STEPS: usize = 64;
/// The steps at the end of a probe that count.
pub const PROBE_STEPS: usize = 64;
/// The fewest batches that a window remembers at most.
const BATCHES_MIN: usize = 512;
/// The most ranks for which a window has room for all steps.
const RANKS_MAX: usize = 16;
/// The most leases whose times are remembered until their batches are acknowledged.
const LEASES_MAX: usize = 512;
/// From this many batches on, what no batch told is taken for unknown.
const BATCHES_TO_TELL: usize = 8;
/// The parts of the data in the cache for which a rate is predicted, as multiples of the present part.
const WHAT_IF: [f64; 2] = [2.0, 4.0];

/// The logs of those who serve a job.
pub struct Served<'a> {
    /// The origins of its content. Those that served nothing do not matter.
    pub origins: Vec<&'a ServiceLog>,
    /// The disk of the server.
    pub disk: &'a ServiceLog,
}

/// The latest batches of a job.
#[derive(Debug, Default)]
pub struct JobWindow(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// By the time of their acks.
    batches: VecDeque<BatchObservation>,
    entries: VecDeque<u32>,
    /// The epoch of the latest ack, and how many batches of it each rank acknowledged.
    epoch: u64,
    ordinals: HashMap<u32, u64>,
    decodes_in_loop: bool,
    /// By epoch and lease.
    leases: BTreeMap<(u64, u64), LeaseTimes>,
    /// Of the latest two epochs: the bytes that were streamed, and those of them that the server did not read
    /// from the origin for the epoch.
    passes: BTreeMap<u64, (u64, u64)>,
    /// The mean bytes of an entry, of the latest lease that has any.
    entry_bytes: f64,
    last_ack: Option<Instant>,
    probe: Option<Probe>,
}

/// A lease as the ledger knows it.
#[derive(Debug, Clone, Copy)]
pub struct AckedLease {
    pub epoch: u64,
    pub lease: u64,
    pub rank: u32,
    /// The worker of the rank.
    pub worker: u32,
}

impl JobWindow {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock()
    }

    /// Notes what the stream of a lease waited for. A lease that is streamed again counts as streamed last.
    pub fn note_lease(&self, epoch: u64, lease: u64, times: LeaseTimes) {
        let mut inner = self.lock();
        if times.bytes > 0 {
            inner.entry_bytes = times.bytes as f64 / f64::from(times.entries);
        }
        let before = inner.leases.insert((epoch, lease), times).unwrap_or_default();
        let (bytes, shared) = inner.passes.entry(epoch).or_default();
        *bytes = bytes.saturating_sub(before.bytes) + times.bytes;
        *shared = shared.saturating_sub(before.shared_bytes) + times.shared_bytes;
        if inner.passes.len() > 2 {
            inner.passes.pop_first();
        }
        if inner.leases.len() > LEASES_MAX {
            inner.leases.pop_first();
        }
    }

    /// Notes the batches of a lease whose ack came just now. Batches of an earlier epoch are ignored.
    pub fn note_batches(&self, of: AckedLease, batches: &[BatchTimes]) {
        let ack = Instant::now();
        let now = seconds(ack);
        let mut inner = self.lock();
        let inner = &mut *inner;
        inner.last_ack = Some(ack);
        if of.epoch < inner.epoch {
            return;
        }
        if of.epoch > inner.epoch {
            inner.epoch = of.epoch;
            inner.ordinals.clear();
        }
        let times = inner.leases.get(&(of.epoch, of.lease)).copied().unwrap_or_default();
        let duration = |ns: u64| ns as f64 / 1e9;
        // A caller may send as many batches as fit into a body. Older ones would leave the window at once.
        let batches = &batches[batches.len().saturating_sub(BATCHES_MIN)..];
        // The last batch ended now, and the others before it.
        let mut ended =
            now - batches.iter().map(|b| duration(b.waited_ns) + duration(b.stepped_ns)).sum::<f64>();
        for batch in batches {
            ended += duration(batch.waited_ns) + duration(batch.stepped_ns);
            let ordinal = inner.ordinals.entry(of.rank).or_default();
            // An epoch has fewer steps than entries, and those are 32 bits.
            let step = (of.epoch << 32) | (*ordinal & u64::from(u32::MAX));
            *ordinal += 1;
            let part =
                if times.entries > 0 { f64::from(batch.entries) / f64::from(times.entries) } else { 0.0 };
            let blocked = |d: std::time::Duration| d.as_secs_f64() * part.min(1.0);
            let hit_part = if times.bytes > 0 { times.shared_bytes as f64 / times.bytes as f64 } else { 0.0 };
            inner.decodes_in_loop = batch.in_loop;
            inner.entries.push_back(batch.entries);
            inner.batches.push_back(BatchObservation {
                step,
                rank: of.rank,
                lane: (of.rank << 16) | (of.worker & 0xffff),
                ended,
                waited: duration(batch.waited_ns),
                received: batch.received_ns.map(|ns| (duration(ns) - blocked(times.held)).max(0.0)),
                prepared: duration(batch.prepared_ns),
                stepped: duration(batch.stepped_ns),
                device: batch.device_ns.map(duration),
                origin: blocked(times.origin),
                disk: blocked(times.disk),
                queue: blocked(times.queue),
                hit_part,
            });
        }
        let most = BATCHES_MIN.max(RATE_STEPS * inner.ordinals.len().min(RANKS_MAX));
        while inner.batches.len() > most {
            inner.batches.pop_front();
            inner.entries.pop_front();
        }
        let Inner { batches: all, probe, .. } = inner;
        if let Some(probe) = probe {
            let entries = batches.iter().map(|b| u64::from(b.entries)).sum();
            probe.count(entries, || latest_steps(all.make_contiguous(), PROBE_STEPS));
        }
    }

    /// Begins a probe that ends when as many samples were acknowledged. It takes the place of an earlier one.
    pub fn begin_probe(&self, entries: u64) {
        self.lock().probe = Some(Probe::new(entries));
    }

    /// Returns when the latest ack came.
    #[must_use]
    pub fn last_ack(&self) -> Option<Instant> {
        self.lock().last_ack
    }

    /// Returns what the latest batches tell.
    #[must_use]
    pub fn benefit(&self, served: &Served<'_>) -> JobBenefit {
        let (batches, entries, entry_bytes, decodes_in_loop, cached) = {
            let inner = self.lock();
            let entries: f64 = inner.entries.iter().map(|&n| f64::from(n)).sum();
            let batches: Vec<_> = inner.batches.iter().copied().collect();
            let mean = entries / batches.len().max(1) as f64;
            (batches, mean.max(1.0), inner.entry_bytes, inner.decodes_in_loop, cached_part(&inner.passes))
        };
        let unknown = if batches.len() < BATCHES_TO_TELL {
            None
        } else if batches.iter().all(|b| b.stepped == 0.0) {
            Some("the acks of the job carry no times of steps")
        } else if entry_bytes == 0.0 {
            Some("the job asks for references, or its samples are too long to be read before they are sent")
        } else {
            None
        };
        if let Some(why) = unknown {
            return JobBenefit {
                steps: steps_of(&batches).len() as u64,
                not_measured: Some(format!("not measured: {why}")),
                estimate: None,
                probe: self.lock().probe.as_ref().map(Probe::view),
            };
        }
        let of = |batches: &[BatchObservation]| {
            let from = batches.iter().map(|b| b.ended).fold(f64::INFINITY, f64::min);
            let logs: Vec<_> = served.origins.iter().map(|log| log.requests(from, entry_bytes)).collect();
            let (disk, mut since) = served.disk.requests(from, entry_bytes);
            let mut link = Vec::new();
            for (requests, forgotten) in logs {
                link.extend(requests);
                since = since.max(forgotten);
            }
            estimate(&Window {
                batches,
                // Under load a request's time has its turn at the link in it, and nothing tells them apart.
                first_byte: 0.0,
                link: &link,
                disk: &disk,
                since,
                samples: entries,
                decodes_in_loop,
            })
        };
        let over = |steps: usize| {
            let latest = latest_steps(&batches, steps);
            of(&latest).map(|estimate| (estimate, latest))
        };
        let (probed, probe) = {
            let mut inner = self.lock();
            if let Some(probe) = &mut inner.probe
                && let Some(batches) = probe.take_batches()
            {
                probe.conclude(of(&batches).ok().as_ref());
            }
            (inner.probe.as_ref().and_then(Probe::most_rate), inner.probe.as_ref().map(Probe::view))
        };
        let verdict = over(VERDICT_STEPS).map(|(estimate, _)| estimate.verdict);
        match (over(RATE_STEPS), verdict) {
            (Ok((mut estimate, latest)), Ok(verdict)) => {
                if let Some(probed) = probed.filter(|_| !estimate.is_sure) {
                    (estimate.most_rate, estimate.is_sure) = (estimate.most_rate.min(probed), true);
                }
                JobBenefit {
                    steps: steps_of(&latest).len() as u64,
                    not_measured: None,
                    estimate: Some(view(&estimate, verdict, cached, entry_bytes)),
                    probe,
                }
            }
            (Err(why), _) | (_, Err(why)) => JobBenefit {
                steps: match why {
                    NotMeasured::FewSteps { steps } => steps as u64,
                    NotMeasured::NoTime => steps_of(&batches).len() as u64,
                },
                not_measured: Some(why.to_string()),
                estimate: None,
                probe,
            },
        }
    }
}

/// Returns the part of the bytes of about one pass that the server did not read from the origin for the job.
///
/// That is the latest epoch, and as much of the one before as the latest has left.
///
/// A pass begins with what the cache holds of the window, so a part of a pass may tell another part.
fn cached_part(passes: &BTreeMap<u64, (u64, u64)>) -> f64 {
    let mut latest = passes.values().rev();
    let Some(&(bytes, shared)) = latest.next() else { return 0.0 };
    let (mut all, mut cached) = (bytes as f64, shared as f64);
    if let Some(&(before, shared)) = latest.next()
        && before > bytes
    {
        let left = (before - bytes) as f64;
        all += left;
        cached += shared as f64 * left / before as f64;
    }
    if all > 0.0 { cached / all } else { 0.0 }
}

fn steps_of(batches: &[BatchObservation]) -> BTreeSet<u64> {
    batches.iter().map(|b| b.step).collect()
}

/// Returns the batches of the latest steps.
fn latest_steps(batches: &[BatchObservation], steps: usize) -> Vec<BatchObservation> {
    let first = steps_of(batches).into_iter().rev().take(steps).min().unwrap_or_default();
    batches.iter().filter(|b| b.step >= first).copied().collect()
}

fn view(estimate: &Estimate, verdict: Verdict, cached: f64, sample_bytes: f64) -> BenefitEstimate {
    let mut parts: Vec<f64> = WHAT_IF.iter().map(|times| cached * times).filter(|c| *c < 1.0).collect();
    parts.push(1.0);
    // Twice or four times nothing is nothing.
    parts.retain(|part| *part > cached);
    BenefitEstimate {
        rate: estimate.rate,
        most_rate: estimate.most_rate,
        is_sure: estimate.is_sure,
        origin_rate: estimate.origin_rate,
        disk_rate: estimate.disk_rate,
        compute: estimate.parts.compute,
        preparation: estimate.parts.preparation,
        fetch: estimate.parts.fetch,
        verdict: match verdict {
            Verdict::Compute => BenefitVerdict::Compute,
            Verdict::Preparation => BenefitVerdict::Preparation,
            Verdict::Origin => BenefitVerdict::Origin,
            Verdict::Disk => BenefitVerdict::Disk,
            Verdict::Queue => BenefitVerdict::Queue,
        },
        cached,
        sample_bytes,
        what_if: parts
            .into_iter()
            .map(|cached| WhatIf { cached, rate: estimate.rate_with_more(cached) })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const MS: u64 = 1_000_000;

    fn ack(window: &JobWindow, epoch: u64, lease: u64, batches: &[BatchTimes]) {
        window.note_batches(AckedLease { epoch, lease, rank: 0, worker: 0 }, batches);
    }

    fn batch(waited: u64, stepped: u64) -> BatchTimes {
        BatchTimes { entries: 10, waited_ns: waited * MS, stepped_ns: stepped * MS, ..BatchTimes::default() }
    }

    fn benefit(window: &JobWindow, origin: &ServiceLog) -> JobBenefit {
        window.benefit(&Served { origins: vec![origin], disk: &ServiceLog::default() })
    }

    #[test]
    fn the_cached_part_is_that_of_about_one_pass() {
        let part = |passes: &[(u64, (u64, u64))]| cached_part(&passes.iter().copied().collect());
        assert_eq!(part(&[]), 0.0);
        assert_eq!(part(&[(0, (100, 0))]), 0.0);
        // A quarter of the second pass brought 20 of its 25 bytes, and the first brought 40 of 100.
        assert_eq!(part(&[(0, (100, 40)), (1, (25, 20))]), 0.5);
        assert_eq!(part(&[(0, (100, 40)), (1, (100, 50))]), 0.5);
        assert_eq!(part(&[(0, (0, 0)), (1, (10, 10))]), 1.0);
    }

    #[test]
    fn a_job_is_measured_from_eight_steps_on() {
        let (window, origin) = (JobWindow::default(), ServiceLog::default());
        let none = benefit(&window, &origin);
        assert_eq!((none.steps, none.estimate), (0, None));
        window.note_lease(0, 1, LeaseTimes { entries: 70, bytes: 7000, ..LeaseTimes::default() });
        ack(&window, 0, 1, &vec![batch(0, 50); 7]);
        let few = benefit(&window, &origin);
        assert_eq!(few.not_measured.as_deref(), Some("not measured yet: 7 of 8 steps"));
        // The steps of the next epoch follow those of this one.
        ack(&window, 1, 1, &vec![batch(0, 50); 7]);
        let measured = benefit(&window, &origin);
        assert_eq!((measured.steps, measured.not_measured), (14, None));
        // The clocks of these acks overlap, because both came at once.
        let estimate = measured.estimate.expect("an estimate");
        assert!(estimate.is_sure && estimate.verdict == BenefitVerdict::Compute, "{estimate:?}");
    }

    #[test]
    fn a_job_that_waits_for_its_origin_is_told_so() {
        let (window, origin) = (JobWindow::default(), ServiceLog::default());
        let begun = Instant::now();
        std::thread::sleep(Duration::from_millis(600));
        // One long busy time of five requests, which brought 600 entries of 100 bytes.
        (0..5).for_each(|_| origin.note(begun, 12_000));
        let blocked = Duration::from_millis(8);
        for lease in 0..50 {
            let times = LeaseTimes { entries: 10, bytes: 1000, shared_bytes: 250, ..LeaseTimes::default() };
            window.note_lease(0, lease, LeaseTimes { origin: blocked, ..times });
        }
        // One ack of 50 steps of 10 ms, of which 2 ms compute.
        let leases: Vec<u64> = (0..50).collect();
        ack(&window, 0, leases[0], &vec![batch(8, 2); 50]);
        let estimate = benefit(&window, &origin).estimate.expect("an estimate");
        assert_eq!(estimate.verdict, BenefitVerdict::Origin, "{estimate:?}");
        assert!((900.0..1100.0).contains(&estimate.rate), "{estimate:?}");
        assert!((estimate.cached - 0.25).abs() < 1e-9, "{estimate:?}");
        let parts: Vec<f64> = estimate.what_if.iter().map(|w| w.cached).collect();
        assert_eq!(parts, [0.5, 1.0]);
        assert!(estimate.what_if[0].rate > 1.2 * estimate.rate, "{estimate:?}");
    }

    #[test]
    fn what_a_worker_waits_for_and_the_server_does_not_see_is_the_servers() {
        let origin = ServiceLog::default();
        let verdict = |held: u64| {
            let window = JobWindow::default();
            let times = LeaseTimes { entries: 10, bytes: 1000, shared_bytes: 1000, ..LeaseTimes::default() };
            window.note_lease(0, 1, LeaseTimes { held: Duration::from_millis(held), ..times });
            // One worker waits 8 ms for its lease, and prepares it in 1 ms. The step takes 2 ms.
            let times = BatchTimes { received_ns: Some(8 * MS), prepared_ns: MS, ..batch(8, 2) };
            ack(&window, 0, 1, &vec![times; 50]);
            benefit(&window, &origin).estimate.expect("an estimate").verdict
        };
        assert_eq!(verdict(0), BenefitVerdict::Queue);
        // The server held the answers back until the job acknowledged earlier ones.
        assert_ne!(verdict(8), BenefitVerdict::Queue);
    }

    #[test]
    fn a_job_whose_acks_carry_no_times_is_not_measured() {
        let (window, origin) = (JobWindow::default(), ServiceLog::default());
        ack(&window, 0, 1, &vec![batch(0, 0); 40]);
        let none = benefit(&window, &origin);
        assert_eq!(none.not_measured.expect("why").matches("carry no times").count(), 1);
        // Nor is one whose bytes the server did not send itself.
        ack(&window, 0, 2, &vec![batch(0, 5); 40]);
        assert!(benefit(&window, &origin).not_measured.expect("why").contains("references"));
        window.note_lease(0, 3, LeaseTimes { entries: 10, bytes: 10, ..LeaseTimes::default() });
        // Times that no clock can show change nothing but this job's numbers.
        let never = BatchTimes { waited_ns: u64::MAX, stepped_ns: u64::MAX, ..batch(0, 0) };
        ack(&window, 0, 3, &vec![never; 40]);
        let benefit = benefit(&window, &origin);
        assert!(benefit.estimate.is_none_or(|e| e.rate.is_finite() && e.most_rate.is_finite()));
    }

    #[test]
    fn what_a_window_remembers_is_bounded() {
        let window = JobWindow::default();
        for lease in 0..3000 {
            window.note_lease(0, lease, LeaseTimes::default());
            ack(&window, 0, lease, &[batch(0, 1)]);
        }
        // One ack with as many batches as a body holds.
        ack(&window, 0, 3000, &vec![batch(0, 1); 300_000]);
        let inner = window.lock();
        assert_eq!((inner.leases.len(), inner.batches.len()), (LEASES_MAX, BATCHES_MIN));
        assert_eq!(inner.entries.len(), inner.batches.len());
    }
}
