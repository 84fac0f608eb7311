//! The estimate over a window of steps.

use super::{
    observation::{BatchObservation, Window},
    predict::OVERLAP_MAX,
    service::{Service, service},
};
use std::collections::{BTreeMap, BTreeSet};

/// The fewest steps that are estimated.
const STEPS_MIN: usize = 8;
/// A step counts as a pause (a checkpoint, an evaluation) from this many seconds on ...
const PAUSE_SECONDS: f64 = 10.0;
/// ... if it also takes this many times the upper quartile of steps.
const PAUSE_QUARTILES: f64 = 20.0;
/// A link, a disk or the lanes that are busy for less than this part of the time had time left.
const BUSY: f64 = 0.85;
/// The least part of the time without pauses by which the bound for links is scaled.
const UNPAUSED_LEAST: f64 = 0.5;
/// The part of steps for which a rank must come last, so that its own step is known.
const LAST_PART: f64 = 0.03;
/// A job that waits for less than this part of the time shows its most rate.
const WAIT_LITTLE: f64 = 0.1;
/// The parts of a window of which none may have a full link, if the job is to count as fed.
const PARTS: u32 = 4;
/// A link that is busy for more than this part of a part of the window is full there.
const FULL: f64 = 0.97;
/// Steps must take this part of the time, so that they show how fast the job computes.
const STEPS_PART: f64 = 0.25;
/// Preparation that is at most this much faster than the job limits it.
const PREPARATION_LIMITS: f64 = 1.15;
/// The part of steps whose device time must be known, so that it stands for all of them: a framework tells it
/// late, and the first steps of an epoch have none.
const DEVICE_PART: f64 = 0.5;
/// A stall below this part of the time does not count.
const STALL: f64 = 0.08;
/// A rate below this part of the prediction shows that computing and fetching overlap in part only.
const BELOW_PREDICTION: f64 = 0.97;
/// A rate that limits nothing. It is finite, so that its products with numbers of samples are (I2).
const NO_LIMIT: f64 = 1e300;
/// Bisections of the overlap exponent.
const BISECTIONS: usize = 30;

/// What a job waits for most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It hardly waits: it computes.
    Compute,
    /// Its own workers, which decode and transform.
    Preparation,
    /// The origin of its dataset.
    Origin,
    /// The server's disk.
    Disk,
    /// The server itself: its queue, its processors, or the network to it.
    Queue,
}

/// The parts of a job's time, which add up to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parts {
    /// The part in which it computes, or the machine stops its loop while a batch is ready.
    pub compute: f64,
    /// The part in which it waits for preparation.
    pub preparation: f64,
    /// The part in which it waits for the origin, the disk or the server's queue.
    pub fetch: f64,
}

/// Why there is no estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotMeasured {
    /// The window has too few steps.
    #[error("not measured yet: {steps} of {STEPS_MIN} steps")]
    FewSteps {
        /// The steps that it has.
        steps: usize,
    },
    /// The steps took no time, by the clocks of the acknowledgements.
    #[error("not measured: the clocks of the job do not advance")]
    NoTime,
}

/// What a window of steps tells about a job. Rates are samples a second of all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The rate over the window.
    pub rate: f64,
    /// The rate if the job never waited for data; an upper bound unless `is_sure`.
    pub most_rate: f64,
    /// Whether `most_rate` is a value and not only a bound.
    pub is_sure: bool,
    /// The rate of the origin's link while it is busy; `None` if nothing was fetched.
    pub origin_rate: Option<f64>,
    /// The rate of the disk while it is busy; `None` if nothing was read from it.
    pub disk_rate: Option<f64>,
    /// Where the time goes.
    pub parts: Parts,
    /// What the job waits for most.
    pub verdict: Verdict,
    /// How well computing and fetching overlap: 1 for one after the other, 64 for fully.
    pub overlap: f64,
    /// The time of a sample in the server and until the first byte, divided among the receivers, in seconds.
    pub latency: f64,
    /// The processes that receive batches.
    pub lanes: f64,
}

/// The steps of a window, and what they add up to.
struct Steps {
    count: f64,
    batches_per_step: f64,
    /// Seconds of the steps, less pauses.
    elapsed: f64,
    /// First and last end of a step.
    span: (f64, f64),
    waited: f64,
    /// Seconds that the loop waited for batches that were not ready. `None` if the acknowledgements do not
    /// say how long workers waited for leases.
    delayed: Option<f64>,
    decoded: f64,
    /// Seconds that the device computed, if enough steps tell.
    device: Option<f64>,
    /// Seconds that the steps took by the loop's clock, without waits for other ranks.
    host: f64,
    /// Ranks that came last often enough to show their own step.
    shown_ranks: usize,
    ranks: usize,
    /// The tenth percentile of the loop's own part of a step.
    launch: f64,
}

fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, f64::max)
}

impl Steps {
    /// Returns whether the loop itself prepares batches within its steps: the device is idle for a part of
    /// them that counts.
    fn prepare(&self) -> bool {
        self.device.is_some_and(|device| self.host - device > STALL * self.host)
    }

    fn of(batches: &[BatchObservation]) -> Result<Steps, NotMeasured> {
        let mut by_step: BTreeMap<u64, Vec<&BatchObservation>> = BTreeMap::new();
        for batch in batches {
            by_step.entry(batch.step).or_default().push(batch);
        }
        let steps = by_step.len();
        if steps < STEPS_MIN {
            return Err(NotMeasured::FewSteps { steps });
        }
        // The rank that got its batch last stepped alone; the steps of the others contain its wait.
        let mut shortest: Vec<f64> = by_step
            .values()
            .map(|ranks| ranks.iter().map(|b| b.stepped).fold(f64::INFINITY, f64::min))
            .collect();
        shortest.sort_by(f64::total_cmp);
        let pause = (PAUSE_QUARTILES * shortest[steps * 3 / 4]).max(PAUSE_SECONDS);
        let ends = || by_step.values().map(|ranks| ranks.iter().map(|b| b.ended).fold(f64::MIN, f64::max));
        let span = (ends().fold(f64::INFINITY, f64::min), ends().fold(f64::MIN, f64::max));
        let (mut count, mut waited, mut decoded, mut paused) = (0.0, 0.0, 0.0, 0.0);
        let mut kept = Vec::new();
        let (mut device, mut device_steps) = (0.0, 0.0);
        let mut own: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for ranks in by_step.values() {
            let got = |b: &BatchObservation| b.ended - b.stepped;
            let Some(last) = ranks.iter().max_by(|a, b| got(a).total_cmp(&got(b))) else { continue };
            if last.stepped >= pause {
                paused += last.stepped - shortest[steps / 2];
                continue;
            }
            count += 1.0;
            waited += largest(ranks.iter().map(|b| b.waited));
            decoded += largest(ranks.iter().map(|b| b.prepared));
            kept.push(ranks.as_slice());
            // A step whose device time one rank does not tell is not known.
            let of_step = ranks.iter().map(|b| b.device).try_fold(0.0, |most: f64, d| Some(most.max(d?)));
            if let Some(seconds) = of_step {
                device += seconds;
                device_steps += 1.0;
            }
            let (sum, times) = own.entry(last.rank).or_default();
            *sum += last.stepped;
            *times += 1.0;
        }
        let shown: Vec<f64> =
            own.values().filter(|o| o.1 >= LAST_PART * count).map(|(sum, times)| sum / times).collect();
        let elapsed = (span.1 - span.0 - paused) * count / (steps as f64 - 1.0);
        if !(elapsed.is_finite() && elapsed > 0.0 && count > 0.0) {
            return Err(NotMeasured::NoTime);
        }
        let ranks: BTreeSet<u32> = batches.iter().map(|b| b.rank).collect();
        Ok(Steps {
            count,
            batches_per_step: largest(by_step.values().map(|ranks| ranks.len() as f64)),
            elapsed,
            span,
            waited,
            delayed: delayed(&kept, elapsed),
            decoded,
            device: (device_steps >= DEVICE_PART * count).then(|| device / device_steps * count),
            host: count * largest(shown.iter().copied()),
            shown_ranks: shown.len(),
            ranks: ranks.len(),
            launch: shortest[steps / 10],
        })
    }
}

/// Returns `samples / seconds`, or [`NO_LIMIT`] if the time is 0.
fn rate(samples: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { samples / seconds } else { NO_LIMIT }
}

/// Estimates a job from a window of steps. 256 steps give the rates, 64 the verdict.
///
/// # Errors
/// [`NotMeasured`].
pub fn estimate(window: &Window<'_>) -> Result<Estimate, NotMeasured> {
    let steps = Steps::of(window.batches)?;
    let batches = window.batches.len() as f64;
    let lanes = window.batches.iter().map(|b| b.lane).collect::<BTreeSet<_>>().len() as f64;
    let sum = |of: fn(&BatchObservation) -> f64| window.batches.iter().map(of).sum::<f64>();
    let all = window.samples * steps.batches_per_step * steps.count;
    let now = all / steps.elapsed;
    let computed = steps.device.unwrap_or(steps.host);
    let compute = rate(all, computed);
    let in_loop = window.decodes_in_loop;
    let preparation = if in_loop {
        rate(all, steps.decoded)
    } else {
        rate(lanes * window.samples * batches, sum(|b| b.prepared))
    };
    let from = steps.span.0.max(window.since);
    let link = service(window.link, from, steps.span.1);
    let disk = service(window.disk, from, steps.span.1);
    let unpaused = steps.elapsed / (steps.span.1 - steps.span.0);
    // A job waits for its link at the end of one epoch, and not at the beginning of the next. So a window
    // over both has parts in which the link is full.
    let part = (steps.span.1 - from) / f64::from(PARTS);
    let is_full = |i: u32| {
        let begins = from + part * f64::from(i);
        service(window.link, begins, begins + part).busy > FULL
    };
    let link_was_full = (0..PARTS).any(is_full);
    // Nobody but the receiver knows how long its request waits for a server that is short of processors. At
    // the begin of an epoch, a job that waits for its origin gets what was fetched before, and waits for the
    // server, until it has caught up.
    let has_missed = sum(|b| 1.0 - b.hit_part) > STALL * batches;
    let (from_origin, from_server) =
        if link_was_full && has_missed { (sum(unexplained), 0.0) } else { (0.0, sum(unexplained)) };
    let blocked = [sum(|b| b.origin) + from_origin, sum(|b| b.disk), sum(|b| b.queue) + from_server];
    let part_of_lanes = |seconds: f64| seconds / lanes / steps.elapsed;
    let received: Option<f64> = window.batches.iter().map(|b| b.received).sum();
    let lanes_had_time = match received.map(part_of_lanes) {
        // A lane that receives one batch after it has prepared another one is never only receiving.
        Some(received) if received < STALL => true,
        Some(received) => !in_loop && received + part_of_lanes(sum(|b| b.prepared)) < BUSY,
        None => part_of_lanes(blocked.iter().sum()) < BUSY,
    };
    // Whoever serves had time left, and so had those who receive: nothing could have come faster.
    let is_fed = link.busy < BUSY * unpaused.max(UNPAUSED_LEAST)
        && disk.busy < BUSY
        && lanes_had_time
        && !link_was_full;
    let model = match (in_loop, steps.device) {
        // No step is shorter than what the loop does in it.
        (false, _) if steps.prepare() => preparation.min(rate(all, steps.host)),
        (false, _) => compute.min(preparation),
        // The device computes while the loop prepares the next batch.
        (true, Some(_)) => {
            let step = window.samples * steps.batches_per_step;
            compute.min(rate(step, step / preparation + steps.launch))
        }
        (true, None) => 1.0 / (1.0 / compute + 1.0 / preparation),
    };
    let most_rate = if is_fed { now } else { model.max(now) };
    // The loop of a device that runs ahead does not see steps while it waits for data. Nor does a rank that
    // never comes last show how long it steps.
    let shows_steps = steps.device.is_some() || steps.shown_ranks >= steps.ranks;
    let stepped = if steps.prepare() { steps.host } else { computed };
    let is_sure = is_fed
        || steps.waited < WAIT_LITTLE * steps.elapsed
        || (shows_steps && stepped > STEPS_PART * steps.elapsed)
        || preparation < PREPARATION_LIMITS * now;
    // A loop that prepares batches itself has no workers that could be idle.
    let delayed = if in_loop || steps.prepare() { None } else { steps.delayed };
    let parts = parts(now, compute, most_rate, is_fed, delayed.map(|seconds| seconds / all));
    let mut out = Estimate {
        rate: now,
        most_rate,
        is_sure,
        origin_rate: link.rate,
        disk_rate: disk.rate,
        parts,
        verdict: verdict(&parts, in_loop || steps.prepare(), (link, disk), blocked),
        overlap: OVERLAP_MAX,
        latency: (blocked[2] / batches + window.first_byte) / window.samples / lanes,
        lanes,
    };
    out.overlap = overlap(out, sum(|b| b.hit_part) / batches);
    Ok(out)
}

/// Returns how long the lane of a batch waited for its lease beyond what the server knows of.
fn unexplained(batch: &BatchObservation) -> f64 {
    batch.received.map_or(0.0, |received| (received - batch.origin - batch.disk - batch.queue).max(0.0))
}

/// Returns how long loops waited for batches that were not ready, over steps that took `elapsed` seconds.
/// `None` if the acknowledgements do not say how long workers waited for their leases.
///
/// A worker is busy with a batch while it receives and prepares the batch. Two parts of a wait belong to the
/// loop, because the batch was ready and the machine did not run the loop: the part beyond the time for which
/// the worker was busy with the batch, and the share of time in which the worker was idle. A worker that is
/// busy for [`BUSY`] of the time is never idle.
///
/// A wait up to the usual wait counts in full. Stalls of a machine are rare, and a cost that no clock shows
/// comes with each batch.
fn delayed(steps: &[&[&BatchObservation]], elapsed: f64) -> Option<f64> {
    let mut lanes: BTreeMap<u32, f64> = BTreeMap::new();
    let mut waits = Vec::new();
    for batch in steps.iter().copied().flatten() {
        *lanes.entry(batch.lane).or_default() += batch.received? + batch.prepared;
        waits.push(batch.waited);
    }
    waits.sort_by(f64::total_cmp);
    let usual = waits.get(waits.len() / 2).copied().unwrap_or_default();
    let delay = |batch: &BatchObservation| {
        let of_batch = batch.received.unwrap_or_default() + batch.prepared;
        let of_lane = lanes.get(&batch.lane).copied().unwrap_or_default();
        let busy = (of_lane / (BUSY * elapsed)).min(1.0);
        (busy * batch.waited.min(of_batch)).max(batch.waited.min(usual))
    };
    Some(steps.iter().map(|ranks| largest(ranks.iter().map(|batch| delay(batch)))).sum())
}

/// Divides the time of a sample into computing, waiting for preparation and waiting for data.
///
/// `delayed` is the time of a sample for which the loop waited for batches that were not ready, if it is
/// known. The loop's time beyond it counts as computing: neither workers nor data could shorten it.
fn parts(now: f64, compute: f64, most_rate: f64, is_fed: bool, delayed: Option<f64>) -> Parts {
    let time = 1.0 / now;
    let base = (1.0 / compute).min(time);
    let stall = (time - base).min(delayed.unwrap_or(f64::INFINITY));
    let preparation = if is_fed { stall } else { (1.0 / most_rate - base).clamp(0.0, stall) };
    let (stall, preparation) = (stall / time, preparation / time);
    Parts { compute: 1.0 - stall, preparation, fetch: (stall - preparation).max(0.0) }
}

fn verdict(parts: &Parts, in_loop: bool, (link, disk): (Service, Service), blocked: [f64; 3]) -> Verdict {
    let [origin, on_disk, queue] = blocked;
    if parts.preparation.max(parts.fetch) < STALL {
        return Verdict::Compute;
    }
    // A loop that decodes prepares every batch while it computes nothing.
    if in_loop && parts.compute > parts.preparation && parts.fetch < STALL {
        return Verdict::Compute;
    }
    if parts.preparation >= parts.fetch {
        return Verdict::Preparation;
    }
    let is_full = link.busy > BUSY && link.busy > disk.busy;
    if is_full || origin >= on_disk.max(queue) {
        Verdict::Origin
    } else if on_disk >= queue {
        Verdict::Disk
    } else {
        Verdict::Queue
    }
}

/// Returns the overlap exponent with which the prediction at the present part of hits is the present rate.
fn overlap(mut estimate: Estimate, hit_part: f64) -> f64 {
    if estimate.rate >= BELOW_PREDICTION * estimate.rate_at(hit_part) {
        return OVERLAP_MAX;
    }
    let (mut low, mut high) = (1.0, OVERLAP_MAX);
    for _ in 0..BISECTIONS {
        estimate.overlap = f64::midpoint(low, high);
        if estimate.rate_at(hit_part) > estimate.rate {
            high = estimate.overlap;
        } else {
            low = estimate.overlap;
        }
    }
    estimate.overlap
}
