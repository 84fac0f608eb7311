//! The tables of `fletch status` and `fletch top`.

use super::{
    percent, size,
    snapshot::Snapshot,
    span,
    text_table::{Align::Left, Align::Right, TextTable},
};
use fletch_api::{
    EpochState, JobLine, JobUse, MountBenefit, MountState, OriginState, OriginView, ShareBasis,
    benefit::BenefitVerdict,
    dashboard::{DashboardJob, JobState, WaitsFor},
};
use fletch_core::{DatasetName, JobName, Tenant};
use std::time::Duration;

/// The job of reads that no job asked for. They show in the datasets.
const NO_JOB: &str = "none";
/// The shortest time between two samples, in seconds, from which the stall of a training loop is computed. In
/// less time it jumps, and the whole epoch counts.
const STEADY_S: f64 = 10.0;

/// Returns each dataset: its size, what the cache has of it, and what the cache saved.
#[must_use]
pub fn datasets(now: &Snapshot) -> TextTable {
    let mut table = TextTable::new(&[
        ("DATASET", Left),
        ("SIZE", Right),
        ("CACHED", Right),
        ("DELIVERED", Right),
        ("FROM ORIGIN", Right),
        ("AVOIDED", Right),
        ("SAVED", Right),
    ]);
    for d in &now.accounts.datasets {
        let cached = d.layout_bytes.zip(d.cached_bytes);
        // Other layouts and versions of the dataset may be cached, too.
        let cached = cached.map(|(all, cached)| percent(cached.min(all), all));
        table.push([
            d.dataset.to_string(),
            d.version_bytes.map_or_else(|| "-".to_owned(), size),
            cached.unwrap_or_else(|| d.cached_bytes.map_or_else(|| "-".to_owned(), size)),
            size(d.delivered_bytes),
            size(d.origin_bytes),
            size(d.avoided_bytes),
            percent(d.avoided_bytes, d.delivered_bytes),
        ]);
    }
    table
}

/// Returns each draft in use, and how much of it is known.
#[must_use]
pub fn drafts(now: &Snapshot) -> TextTable {
    let head = [("DATASET", Left), ("FILES", Right), ("KNOWN", Right), ("OF", Right), ("LISTED", Right)];
    let mut table = TextTable::new(&head);
    for draft in &now.drafts {
        let age = span(Duration::from_nanos(now.at_ns.saturating_sub(draft.listed_ns)));
        table.push([
            draft.dataset.to_string(),
            draft.files.to_string(),
            percent(draft.known_bytes, draft.bytes),
            size(draft.bytes),
            format!("{age} ago"),
        ]);
    }
    table
}

/// Returns each job: its epoch, its rate since `before`, where its bytes came from, and its stall.
#[must_use]
pub fn jobs(before: Option<&Snapshot>, now: &Snapshot) -> TextTable {
    let mut table = TextTable::new(&[
        ("JOB", Left),
        ("DATASET", Left),
        ("EPOCH", Left),
        ("RATE", Right),
        ("HIT", Right),
        ("SHARED", Right),
        ("MISS", Right),
        ("FROM ORIGIN", Right),
        ("STALL", Right),
        ("SPEED", Right),
        ("WAITS FOR", Left),
    ]);
    let mut idle: Vec<&JobLine> = now.jobs.iter().collect();
    for job in now.accounts.jobs.iter().filter(|j| j.job.as_str() != NO_JOB) {
        idle.retain(|line| (&line.name, &line.dataset) != (&job.job, &job.dataset));
        let line = now.jobs.iter().find(|line| line.name == job.job && line.dataset == job.dataset);
        let (mut rate, replies) = change(before, now, job);
        let steady = before.filter(|before| now.seconds_since(before) >= STEADY_S);
        let of_loop = line.and_then(|line| loop_stall(steady, line));
        let mut stall = of_loop.clone().unwrap_or(replies);
        let (speed, mut waits) = benefit(now, line);
        // What the server saw in the last minute is steadier than this sample, and what its page shows.
        let seen = now.seen.iter().find(|s| (&s.tenant, &s.name, &s.dataset) == of(job));
        if let Some(seen) = seen {
            if let Some(bytes) = seen.bytes_rate {
                rate = format!("{}/s", size(bytes.round() as u64));
            }
            if let (None, Some(part)) = (of_loop, seen.stall_part) {
                stall = format!("{:.0} %", part * 100.0);
            }
            waits = waiting(seen).to_owned();
        }
        let all = job.delivered_bytes();
        table.push([
            job.job.to_string(),
            job.dataset.to_string(),
            epoch(line),
            rate,
            percent(job.hit_bytes, all),
            percent(job.substituted_bytes, all),
            percent(job.miss_bytes + job.bypass_bytes, all),
            size(job.origin_bytes),
            stall,
            speed,
            waits,
        ]);
    }
    for line in idle {
        let none = || "-".to_owned();
        let (name, dataset) = (line.name.to_string(), line.dataset.to_string());
        let (speed, mut waits) = benefit(now, Some(line));
        if let Some(seen) = now.seen.iter().find(|s| s.id == line.id) {
            waits = waiting(seen).to_owned();
        }
        let epoch = epoch(Some(line));
        table.push([name, dataset, epoch, none(), none(), none(), none(), none(), none(), speed, waits]);
    }
    table
}

/// Returns the rate of a job as a part of its rate without waits, and what it waits for.
fn benefit(now: &Snapshot, line: Option<&JobLine>) -> (String, String) {
    let share = line.and_then(|line| now.allocation.jobs.iter().find(|share| share.id == line.id));
    let speed = share.and_then(|s| s.speed).map(|speed| format!("{:.0} %", speed * 100.0));
    let waits = share.and_then(|s| s.verdict).map(|verdict| match verdict {
        BenefitVerdict::Compute => "nothing",
        BenefitVerdict::Preparation => WaitsFor::Preparation.words(),
        BenefitVerdict::Origin => WaitsFor::Origin.words(),
        BenefitVerdict::Disk => WaitsFor::Disk.words(),
        BenefitVerdict::Queue => WaitsFor::Server.words(),
    });
    (speed.unwrap_or_else(|| "-".to_owned()), waits.unwrap_or("-").to_owned())
}

fn of(job: &JobUse) -> (&Tenant, &JobName, &DatasetName) {
    (&job.tenant, &job.job, &job.dataset)
}

/// Returns what a job waits for, by the verdict of the server. A job that asks for nothing waits for nothing.
fn waiting(seen: &DashboardJob) -> &'static str {
    match (seen.doing.state, seen.doing.waits_for) {
        (JobState::Idle, _) => "-",
        (_, None) => "nothing",
        (_, Some(waits_for)) => waits_for.words(),
    }
}

/// Returns the shares of the disk, one line for a dataset: the most valuable byte first.
#[must_use]
pub fn shares(now: &Snapshot) -> TextTable {
    let mut table = TextTable::new(&[
        ("DATASET", Left),
        ("SHARE", Right),
        ("SWEEP", Right),
        ("OF DISK", Right),
        ("FILLED", Right),
        ("CAN USE", Right),
        ("BY READS", Right),
        ("JOBS", Right),
        ("PLACE", Right),
        ("BY", Left),
    ]);
    for d in &now.allocation.datasets {
        let basis = match d.basis {
            ShareBasis::Benefit => "worth to its jobs",
            ShareBasis::Reads => "reads",
            ShareBasis::Idle => "what others leave",
        };
        table.push([
            d.dataset.to_string(),
            size(d.share_bytes),
            if d.is_sweep { size(d.sweep_share_bytes) } else { "-".to_owned() },
            percent(d.share_bytes, now.allocation.capacity_bytes),
            percent(d.cached_bytes, d.share_bytes),
            size(d.size_bytes),
            size(d.by_reads_bytes),
            d.jobs.to_string(),
            d.rank.map_or_else(|| "-".to_owned(), |rank| rank.to_string()),
            basis.to_owned(),
        ]);
    }
    table
}

/// Returns the rate of a job's bytes, and the part of the time in which its replies waited.
///
/// Without an earlier snapshot, the rate is unknown and the stall is its sum in seconds.
fn change(before: Option<&Snapshot>, now: &Snapshot, job: &JobUse) -> (String, String) {
    let seconds = before.map_or(0.0, |before| now.seconds_since(before));
    let Some(before) = before.filter(|_| seconds > 0.0) else {
        return ("-".to_owned(), span(Duration::from_millis(job.stalled_ms)));
    };
    let same = |j: &&JobUse| (&j.tenant, &j.job, &j.dataset) == (&job.tenant, &job.job, &job.dataset);
    let old = before.accounts.jobs.iter().find(same);
    let delivered = job.delivered_bytes().saturating_sub(old.map_or(0, |j| j.delivered_bytes()));
    let stalled = job.stalled_ms.saturating_sub(old.map_or(0, |j| j.stalled_ms));
    // A rate of bytes is far below 2^53.
    let rate = (delivered as f64 / seconds).round() as u64;
    let elapsed = (seconds * 1000.0).round() as u64;
    (format!("{}/s", size(rate)), percent(stalled.min(elapsed), elapsed))
}

/// Returns the part of the time in which a training loop waited, if the loop says so in its acks.
fn loop_stall(before: Option<&Snapshot>, line: &JobLine) -> Option<String> {
    let now = line.epoch.as_ref().filter(|e| e.times.batches > 0)?;
    let old = before.and_then(|before| before.jobs.iter().find(|old| old.id == line.id)?.epoch.as_ref());
    let old = old.filter(|old| old.epoch == now.epoch).map(|old| old.times).unwrap_or_default();
    let waited = now.times.waited_ns.saturating_sub(old.waited_ns);
    let all = waited.saturating_add(now.times.stepped_ns.saturating_sub(old.stepped_ns));
    // Between two samples without a step, the whole epoch counts.
    let (waited, all) = match all {
        0 => (now.times.waited_ns, now.times.waited_ns.saturating_add(now.times.stepped_ns)),
        all => (waited, all),
    };
    Some(percent(waited, all))
}

/// Returns the number and the progress of a job's epoch.
fn epoch(line: Option<&JobLine>) -> String {
    match line.map(|line| line.epoch.as_ref()) {
        None => "-".to_owned(),
        Some(None) => "idle".to_owned(),
        Some(Some(e)) => match e.state {
            EpochState::Finished => format!("{} done", e.epoch),
            _ => format!("{} at {}", e.epoch, percent(e.acked, e.planned)),
        },
    }
}

/// Returns the mounts by directory.
#[must_use]
pub fn mounts(now: &Snapshot) -> TextTable {
    let mut table = TextTable::new(&[
        ("DIR", Left),
        ("HOST", Left),
        ("DATASET", Left),
        ("JOB", Left),
        ("RATE", Right),
        ("WITHOUT WAITS", Left),
        ("STATE", Left),
    ]);
    let mut mounts: Vec<_> = now.mounts.iter().collect();
    // Dead mounts first, then those with a problem: they need somebody.
    mounts.sort_by_key(|m| (!m.dead, m.problem.is_none(), &m.dir, &m.host));
    for m in mounts {
        let state = match &m.problem {
            _ if m.dead => "dead".to_owned(),
            Some(problem) => problem.clone(),
            None => "ok".to_owned(),
        };
        let (rate, without_waits) = mount_benefit(m.benefit.filter(|_| !m.dead));
        let (dir, host) = (m.dir.clone(), m.host.clone());
        table.push([dir, host, m.dataset.clone(), m.job.clone(), rate, without_waits, state]);
    }
    table
}

/// Returns the rate at which a mount's programs read, and the bound of the rate if reads took no time.
fn mount_benefit(benefit: Option<MountBenefit>) -> (String, String) {
    let per_second = |rate: u64| format!("{}/s", size(rate));
    let none = || "-".to_owned();
    let Some(benefit) = benefit else { return (none(), none()) };
    match benefit.state {
        MountState::Idle => (none(), none()),
        MountState::Kernel => (none(), "no gain: page cache".to_owned()),
        MountState::Reading => {
            let most = benefit.most_rate.map(|most| format!("at most {}", per_second(most)));
            (benefit.rate.map_or_else(none, per_second), most.unwrap_or_else(|| "no bound".to_owned()))
        }
    }
}

fn errors<'a>(origins: impl Iterator<Item = &'a OriginView>, now_ns: u64) -> TextTable {
    let mut table = TextTable::new(&[
        ("ORIGIN", Left),
        ("CALLS", Right),
        ("FAILED", Right),
        ("LAST", Left),
        ("ERROR", Left),
    ]);
    for origin in origins {
        let last = origin.last_error.as_ref();
        let ago = last.map(|e| span(Duration::from_nanos(now_ns.saturating_sub(e.at_ns))) + " ago");
        table.push([
            origin.uri.clone(),
            origin.requests.to_string(),
            origin.failed.to_string(),
            ago.unwrap_or_default(),
            last.map_or_else(|| "it does not answer".to_owned(), |e| e.why.clone()),
        ]);
    }
    table
}

/// Returns the origins that fail now, with their last errors.
#[must_use]
pub fn failing_origins(now: &Snapshot) -> TextTable {
    errors(now.failing().into_iter(), now.at_ns)
}

/// Returns the last errors of origins that work again.
#[must_use]
pub fn past_errors(now: &Snapshot) -> TextTable {
    let works = now.origins.iter().filter(|o| o.state == OriginState::Ok && o.last_error.is_some());
    errors(works, now.at_ns)
}

/// Returns whose credentials the server uses, and until when they are valid.
#[must_use]
pub fn credentials(now: &Snapshot) -> TextTable {
    let mut table = TextTable::new(&[("ORIGIN", Left), ("IDENTITY", Left), ("EXPIRES", Left)]);
    for c in &now.credentials {
        let expires = match c.expires_ns {
            None => "-".to_owned(),
            Some(at) if at <= now.at_ns => {
                format!("expired {} ago", span(Duration::from_nanos(now.at_ns - at)))
            }
            Some(at) => format!("in {}", span(Duration::from_nanos(at - now.at_ns))),
        };
        table.push([c.origin.clone(), c.identity.clone(), expires]);
    }
    table
}
