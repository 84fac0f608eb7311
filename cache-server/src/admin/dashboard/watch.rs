//! What each job does, what it waits for, and since when.
//!
//! [`JobWatches::observe`] gets the numbers of every job at each sample. [`judge`] decides.

use super::history::SAMPLE_EVERY;
use fletch_api::{
    EpochState,
    benefit::BenefitVerdict,
    dashboard::{
        DashboardHistory, EpochProgress, HistorySeries, HistorySource, JobDoing, JobState, WaitsFor,
    },
};
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

/// The most jobs that are watched.
pub const WATCHED_MAX: usize = 2000;
/// A job that waits for bytes and gets none for as long is stalled.
pub const STALLED_AFTER: Duration = Duration::from_secs(60);
/// A job that has samples and acknowledges none for as long is stalled: checkpoints take less.
pub const TRAINER_STALLED_AFTER: Duration = Duration::from_secs(300);
/// A job waits if it waited for more than this part of the last minute.
const WAITING_PART: f64 = 0.5;
/// A job waits now if it waited for more than this part of the time since the sample before the last.
const WAITING_NOW_PART: f64 = 0.8;
/// The samples of the last minute.
const RECENT_MAX: usize = 13;
/// The time between two samples of the hour.
const HOUR_EVERY: Duration = Duration::from_secs(30);
/// The samples of the hour.
const HOUR_MAX: usize = 121;

/// The present, by two clocks.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Nanoseconds since the server started.
    pub mono_ns: u64,
    /// Nanoseconds since 1970.
    pub unix_ns: u64,
}

/// The numbers of a job.
#[derive(Debug, Clone)]
pub struct JobReading {
    pub id: String,
    /// The latest epoch.
    pub epoch: Option<EpochProgress>,
    /// Bytes that were sent.
    pub delivered: u64,
    /// The time in which at least one reply waited.
    pub stalled: Duration,
    /// What the job waits for most, by its acks.
    pub verdict: Option<BenefitVerdict>,
    /// Whether an origin of its dataset fails now.
    pub is_origin_failing: bool,
}

impl JobReading {
    /// Returns the epoch, if it is open and has entries left.
    fn open_epoch(&self) -> Option<EpochProgress> {
        self.epoch.filter(|e| e.state == EpochState::Open && e.acked < e.planned)
    }

    /// Returns whether the latest epoch is over: nothing of it is left to be asked for.
    fn is_over(&self) -> bool {
        self.epoch.is_some() && self.open_epoch().is_none()
    }

    /// Returns what grows while the job makes progress.
    fn progress(&self) -> (u64, u64) {
        match self.open_epoch() {
            Some(epoch) => (epoch.epoch + 1, epoch.acked),
            None => (0, self.delivered),
        }
    }
}

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobVerdict {
    /// What it does.
    pub state: JobState,
    pub waits_for: Option<WaitsFor>,
    /// Since when, in nanoseconds since 1970.
    pub since_ns: u64,
    /// Acknowledged entries a second, over the last minute.
    pub rate: Option<f64>,
    /// Bytes that were sent a second, over the last minute.
    pub bytes_rate: Option<f64>,
    /// The part of the last minute in which it waited.
    pub stall_part: Option<f64>,
}

impl JobVerdict {
    /// Returns what the job does, in the form in which all programs show it.
    #[must_use]
    pub fn doing(&self) -> JobDoing {
        JobDoing::new(self.state, self.waits_for, self.since_ns)
    }
}

/// The numbers of a job at one time.
#[derive(Debug, Clone, Copy)]
struct Point {
    at: Now,
    epoch: u64,
    acked: u64,
    delivered: u64,
    stalled: Duration,
}

impl Point {
    fn seconds_since(&self, before: &Point) -> f64 {
        self.at.mono_ns.saturating_sub(before.at.mono_ns) as f64 / 1e9
    }

    /// Returns the acknowledged entries a second since an earlier point of the same epoch.
    fn rate_since(&self, before: &Point) -> Option<f64> {
        let seconds = self.seconds_since(before);
        (seconds > 0.0 && self.epoch == before.epoch)
            .then(|| self.acked.saturating_sub(before.acked) as f64 / seconds)
    }

    fn bytes_since(&self, before: &Point) -> Option<f64> {
        let seconds = self.seconds_since(before);
        (seconds > 0.0).then(|| self.delivered.saturating_sub(before.delivered) as f64 / seconds)
    }

    fn stall_since(&self, before: &Point) -> Option<f64> {
        let seconds = self.seconds_since(before);
        let stalled = self.stalled.saturating_sub(before.stalled).as_secs_f64();
        (seconds > 0.0).then(|| (stalled / seconds).min(1.0))
    }
}

/// What a verdict depends on.
#[derive(Debug)]
struct Seen {
    reading: JobReading,
    /// Whether it received bytes since the sample before.
    reads: bool,
    /// The time without progress.
    silent: Duration,
    /// The part of the last minute in which replies waited.
    stall_part: f64,
    is_waiting_now: bool,
}

#[derive(Debug)]
struct Watch {
    recent: VecDeque<Point>,
    hour: VecDeque<Point>,
    progress: (u64, u64),
    /// When the progress changed, or the watch began.
    progressed: Now,
    /// What the latest sample saw.
    seen: Option<Seen>,
    verdict: JobVerdict,
}

fn push(points: &mut VecDeque<Point>, point: Point, max: usize) {
    if points.len() == max {
        points.pop_front();
    }
    points.push_back(point);
}

/// What all jobs do.
#[derive(Debug, Default)]
pub struct JobWatches(HashMap<String, Watch>);

impl JobWatches {
    /// Records the numbers of all jobs. Forgets jobs that are not among them.
    pub fn observe(&mut self, now: Now, readings: &[JobReading]) {
        let mut before = std::mem::take(&mut self.0);
        for reading in readings.iter().take(WATCHED_MAX) {
            let mut watch = before.remove(&reading.id).unwrap_or_else(|| Watch::new(now, reading));
            watch.observe(now, reading);
            self.0.insert(reading.id.clone(), watch);
        }
    }

    /// Takes over new verdicts of measured jobs between two samples: all programs show the latest one.
    pub fn remeasure(&mut self, unix_ns: u64, verdicts: &HashMap<String, BenefitVerdict>) {
        for (id, watch) in &mut self.0 {
            let Some(mut seen) = watch.seen.take() else { continue };
            let verdict = verdicts.get(id).copied();
            if seen.reading.verdict != verdict {
                seen.reading.verdict = verdict;
                watch.decide(unix_ns, &seen);
            }
            watch.seen = Some(seen);
        }
    }

    /// Returns what a job does. Before its first sample nobody knows, and it asks for nothing.
    #[must_use]
    pub fn verdict(&self, id: &str, unix_ns: u64) -> JobVerdict {
        let unseen = JobVerdict {
            state: JobState::Idle,
            waits_for: None,
            since_ns: unix_ns,
            rate: None,
            bytes_rate: None,
            stall_part: None,
        };
        match self.0.get(id) {
            Some(watch) => watch.verdict,
            None => unseen,
        }
    }

    /// Returns the last hour of a job: its rate, and the part of the time in which it waited.
    #[must_use]
    pub fn hour(&self, id: &str) -> DashboardHistory {
        let points = self.0.get(id).map(|w| &w.hour);
        let pairs = || points.into_iter().flat_map(|p| p.iter().zip(p.iter().skip(1)));
        let series = |name: &str, values| HistorySeries { name: name.to_owned(), values };
        DashboardHistory {
            source: HistorySource::Memory,
            times: pairs().map(|(_, b)| b.at.unix_ns as f64 / 1e9).collect(),
            series: vec![
                series("rate", pairs().map(|(a, b)| b.rate_since(a)).collect()),
                series("stalled", pairs().map(|(a, b)| b.stall_since(a)).collect()),
            ],
        }
    }
}

impl Watch {
    fn new(now: Now, reading: &JobReading) -> Self {
        let verdict = JobVerdict {
            state: JobState::Running,
            waits_for: None,
            since_ns: now.unix_ns,
            rate: None,
            bytes_rate: None,
            stall_part: None,
        };
        Watch {
            recent: VecDeque::new(),
            hour: VecDeque::new(),
            progress: reading.progress(),
            progressed: now,
            seen: None,
            verdict,
        }
    }

    fn observe(&mut self, now: Now, reading: &JobReading) {
        let (epoch, acked) = reading.epoch.map_or((0, 0), |e| (e.epoch + 1, e.acked));
        let point = Point { at: now, epoch, acked, delivered: reading.delivered, stalled: reading.stalled };
        push(&mut self.recent, point, RECENT_MAX);
        let hour_due = self.hour.back().is_none_or(|p| {
            // A sample may come a little early.
            let least = HOUR_EVERY.saturating_sub(SAMPLE_EVERY / 2).as_secs_f64();
            point.seconds_since(p) >= least
        });
        if hour_due {
            push(&mut self.hour, point, HOUR_MAX);
        }
        if self.progress != reading.progress() {
            (self.progress, self.progressed) = (reading.progress(), now);
        }
        let first = self.recent.front().copied().unwrap_or(point);
        let stall_part = point.stall_since(&first);
        let silent = Duration::from_nanos(now.mono_ns.saturating_sub(self.progressed.mono_ns));
        let same_epoch = self.recent.iter().find(|p| p.epoch == point.epoch);
        self.verdict.rate = reading.open_epoch().and(same_epoch).and_then(|p| point.rate_since(p));
        self.verdict.bytes_rate = point.bytes_since(&first);
        self.verdict.stall_part = stall_part;
        let reads = self.recent.iter().rev().nth(1).is_some_and(|p| p.delivered < point.delivered);
        let (stall_part, is_waiting_now) = (stall_part.unwrap_or(0.0), self.is_waiting_now(&point));
        let seen = Seen { reading: reading.clone(), reads, silent, stall_part, is_waiting_now };
        self.decide(now.unix_ns, &seen);
        self.seen = Some(seen);
    }

    /// Sets the verdict.
    fn decide(&mut self, unix_ns: u64, seen: &Seen) {
        let (state, waits_for) = judge(seen);
        let is_same = (state, waits_for) == (self.verdict.state, self.verdict.waits_for);
        self.verdict.since_ns = match state {
            JobState::Stalled | JobState::Idle => self.progressed.unix_ns,
            JobState::Waiting | JobState::Running if is_same => self.verdict.since_ns,
            JobState::Waiting | JobState::Running => unix_ns,
        };
        (self.verdict.state, self.verdict.waits_for) = (state, waits_for);
    }

    /// Returns whether replies of the job wait without a pause.
    fn is_waiting_now(&self, point: &Point) -> bool {
        let before = self.recent.iter().rev().nth(2).or(self.recent.front());
        before.and_then(|b| point.stall_since(b)).is_some_and(|part| part >= WAITING_NOW_PART)
    }
}

/// Decides what a job does and waits for.
fn judge(seen: &Seen) -> (JobState, Option<WaitsFor>) {
    let Seen { reading, reads, silent, stall_part, is_waiting_now } = seen;
    let (silent, stall_part, is_waiting_now) = (*silent, *stall_part, *is_waiting_now);
    // Nothing of its epoch is left to wait for.
    if reading.is_over() {
        return (if *reads { JobState::Running } else { JobState::Idle }, None);
    }
    let measured = reading.verdict.and_then(WaitsFor::of);
    let source = || match measured {
        _ if reading.is_origin_failing => WaitsFor::FailingOrigin,
        Some(source) if source != WaitsFor::Preparation => source,
        _ => WaitsFor::Bytes,
    };
    if silent >= STALLED_AFTER {
        let held = reading.open_epoch().map_or(0, |e| e.held);
        if is_waiting_now {
            return (JobState::Stalled, Some(source()));
        }
        if held == 0 {
            return (JobState::Idle, None);
        }
        if silent >= TRAINER_STALLED_AFTER {
            return (JobState::Stalled, Some(WaitsFor::Trainer));
        }
        return (JobState::Running, None);
    }
    match measured.filter(|_| reading.open_epoch().is_some()) {
        // Its own workers keep it waiting, not Fletch.
        Some(WaitsFor::Preparation) => (JobState::Running, Some(WaitsFor::Preparation)),
        Some(_) => (JobState::Waiting, Some(source())),
        None if stall_part > WAITING_PART => (JobState::Waiting, Some(source())),
        None => (JobState::Running, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NS: u64 = 1_000_000_000;
    /// The wall clock at the start of the server.
    const START_S: u64 = 1000;

    fn epoch(acked: u64, held: u64) -> Option<EpochProgress> {
        Some(EpochProgress {
            epoch: 0,
            state: EpochState::Open,
            planned: 10_000,
            acked,
            held,
            redelivered: 0,
        })
    }

    fn reading(epoch: Option<EpochProgress>, delivered: u64, stalled_s: u64) -> JobReading {
        JobReading {
            id: "j".to_owned(),
            epoch,
            delivered,
            stalled: Duration::from_secs(stalled_s),
            verdict: None,
            is_origin_failing: false,
        }
    }

    fn observe(watches: &mut JobWatches, at_s: u64, reading: JobReading) -> JobVerdict {
        let now = Now { mono_ns: at_s * NS, unix_ns: (START_S + at_s) * NS };
        watches.observe(now, &[reading]);
        watches.verdict("j", 0)
    }

    #[test]
    fn a_job_that_trains_has_a_rate_and_a_since() {
        let mut watches = JobWatches::default();
        for at in (0..=600).step_by(5) {
            let verdict = observe(&mut watches, at, reading(epoch(at * 10, 8), at * 1000, 0));
            assert_eq!((verdict.state, verdict.since_ns), (JobState::Running, START_S * NS), "at {at}");
            assert_eq!(verdict.rate, (at > 0).then_some(10.0), "at {at}");
        }
        let hour = watches.hour("j");
        assert_eq!(hour.times.len(), 20);
        assert_eq!(hour.series[0].values, vec![Some(10.0); 20]);
        assert_eq!(hour.series[1].values, vec![Some(0.0); 20]);
    }

    #[test]
    fn a_job_that_gets_no_bytes_is_stalled_since_its_last_ack() {
        let mut watches = JobWatches::default();
        (0..=30).step_by(5).for_each(|at| {
            observe(&mut watches, at, reading(epoch(at, 8), at, 0));
        });
        let mut states = Vec::new();
        for at in (35..=120).step_by(5) {
            let mut now = reading(epoch(30, 0), 30, at - 30);
            now.is_origin_failing = true;
            let verdict = observe(&mut watches, at, now);
            states.push(verdict.state);
            if verdict.state == JobState::Stalled {
                assert!(at >= 30 + 60, "at {at}");
                assert_eq!(verdict.since_ns, (START_S + 30) * NS, "since the last ack");
                assert_eq!(verdict.waits_for, Some(WaitsFor::FailingOrigin));
            }
        }
        states.dedup();
        assert_eq!(states, [JobState::Running, JobState::Waiting, JobState::Stalled]);
        let again = observe(&mut watches, 125, reading(epoch(40, 8), 40, 90));
        assert_ne!(again.state, JobState::Stalled, "it acknowledged");
    }

    #[test]
    fn a_trainer_may_be_silent_for_five_minutes_and_a_job_without_leases_is_idle() {
        let (mut trainer, mut gone) = (JobWatches::default(), JobWatches::default());
        for at in (0..=400).step_by(5) {
            let verdict = observe(&mut trainer, at, reading(epoch(5, 64), 9, 0));
            let want = if at < 300 {
                (JobState::Running, None)
            } else {
                (JobState::Stalled, Some(WaitsFor::Trainer))
            };
            assert_eq!((verdict.state, verdict.waits_for), want, "at {at}");
            let verdict = observe(&mut gone, at, reading(epoch(5, 0), 9, 0));
            let want = if at < 60 { JobState::Running } else { JobState::Idle };
            assert_eq!((verdict.state, verdict.since_ns), (want, START_S * NS), "at {at}");
        }
    }

    #[test]
    fn a_measured_job_waits_for_what_its_acks_say() {
        for (verdict, want) in [
            (BenefitVerdict::Compute, (JobState::Running, None)),
            (BenefitVerdict::Preparation, (JobState::Running, Some(WaitsFor::Preparation))),
            (BenefitVerdict::Origin, (JobState::Waiting, Some(WaitsFor::Origin))),
            (BenefitVerdict::Disk, (JobState::Waiting, Some(WaitsFor::Disk))),
            (BenefitVerdict::Queue, (JobState::Waiting, Some(WaitsFor::Server))),
        ] {
            let mut watches = JobWatches::default();
            observe(&mut watches, 0, reading(epoch(0, 8), 0, 0));
            let now = JobReading { verdict: Some(verdict), ..reading(epoch(50, 8), 50, 0) };
            let found = observe(&mut watches, 5, now);
            assert_eq!((found.state, found.waits_for), want, "{verdict:?}");
        }
    }

    #[test]
    fn a_job_whose_epoch_is_over_waits_for_nothing() {
        let mut watches = JobWatches::default();
        let waits = |epoch, delivered, stalled_s| JobReading {
            verdict: Some(BenefitVerdict::Origin),
            is_origin_failing: true,
            ..reading(epoch, delivered, stalled_s)
        };
        observe(&mut watches, 0, waits(epoch(0, 8), 0, 0));
        let before = observe(&mut watches, 5, waits(epoch(9_990, 8), 500, 5));
        assert_eq!((before.state, before.waits_for), (JobState::Waiting, Some(WaitsFor::FailingOrigin)));
        for state in [EpochState::Open, EpochState::Finished, EpochState::Abandoned] {
            let over = epoch(10_000, 0).map(|e| EpochProgress { state, ..e });
            let mut watches = JobWatches::default();
            observe(&mut watches, 0, waits(epoch(0, 8), 0, 0));
            observe(&mut watches, 5, waits(epoch(9_990, 8), 500, 5));
            let last = observe(&mut watches, 10, waits(over, 510, 10));
            assert_eq!((last.state, last.waits_for), (JobState::Running, None), "its last bytes");
            for at in [15, 20, 60, 100, 400] {
                // A reply that was cut off may still count as one that waits.
                let verdict = observe(&mut watches, at, waits(over, 510, at));
                assert_eq!((verdict.state, verdict.waits_for), (JobState::Idle, None), "{state:?} at {at}");
            }
            let next = EpochProgress { epoch: 1, acked: 1, ..epoch(0, 8).expect("epoch") };
            let verdict = observe(&mut watches, 405, waits(Some(next), 600, 400));
            assert_eq!(verdict.state, JobState::Waiting, "the next epoch");
        }
    }

    #[test]
    fn a_new_measurement_is_shown_before_the_next_sample() {
        let mut watches = JobWatches::default();
        observe(&mut watches, 0, reading(epoch(0, 8), 0, 0));
        assert_eq!(observe(&mut watches, 5, reading(epoch(50, 8), 50, 0)).state, JobState::Running);
        let of = |verdict| HashMap::from([("j".to_owned(), verdict)]);
        for at_s in [7, 8] {
            watches.remeasure((START_S + at_s) * NS, &of(BenefitVerdict::Origin));
            let verdict = watches.verdict("j", 0);
            assert_eq!((verdict.state, verdict.waits_for), (JobState::Waiting, Some(WaitsFor::Origin)));
            assert_eq!(verdict.since_ns, (START_S + 7) * NS, "since the first of them");
        }
        watches.remeasure((START_S + 9) * NS, &of(BenefitVerdict::Compute));
        assert_eq!(watches.verdict("j", 0).state, JobState::Running);
        watches.remeasure((START_S + 9) * NS, &HashMap::from([("k".to_owned(), BenefitVerdict::Disk)]));
        assert_eq!(watches.0.len(), 1, "a job that is not watched stays so");
    }

    #[test]
    fn a_mount_that_reads_waits_runs_and_idles() {
        let mut watches = JobWatches::default();
        observe(&mut watches, 0, reading(None, 0, 0));
        assert_eq!(observe(&mut watches, 5, reading(None, 100, 1)).state, JobState::Running);
        let waiting = observe(&mut watches, 60, reading(None, 200, 50));
        assert_eq!((waiting.state, waiting.waits_for), (JobState::Waiting, Some(WaitsFor::Bytes)));
        let idle = (65..=200).step_by(5).map(|at| observe(&mut watches, at, reading(None, 200, 50)));
        assert_eq!(idle.last().map(|v| (v.state, v.since_ns)), Some((JobState::Idle, (START_S + 60) * NS)));
    }

    #[test]
    fn i6_jobs_that_are_gone_are_forgotten_and_too_many_are_not_watched() {
        let mut watches = JobWatches::default();
        let many: Vec<_> =
            (0..WATCHED_MAX + 5).map(|i| JobReading { id: format!("j{i}"), ..reading(None, 0, 0) }).collect();
        let now = Now { mono_ns: 0, unix_ns: 0 };
        watches.observe(now, &many);
        assert_eq!(watches.0.len(), WATCHED_MAX);
        (0..1000).for_each(|i| watches.observe(Now { mono_ns: i * 5 * NS, unix_ns: 0 }, &many[..1]));
        assert_eq!(watches.0.len(), 1);
        let watch = &watches.0["j0"];
        assert_eq!((watch.recent.len(), watch.hour.len()), (RECENT_MAX, HOUR_MAX));
    }
}
