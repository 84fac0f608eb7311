//! What is wrong now: a pure function over the state that a caller may see.
//!
//! Each problem has the name of an alert of the Prometheus rules, and the runbook of that name. The bounds
//! here are those of one server in the last minutes; the rules look at all servers and for longer.

use super::history::{Counts, Totals};
use fletch_api::{
    Mount, OriginView,
    dashboard::{Alert, DashboardJob, DashboardProblem, JobState, Severity, WaitsFor},
    origins::OriginState,
};

/// The most problems of one alert that are listed.
const LISTED_MAX: usize = 20;
/// The fewest requests that tell a part of errors.
const REQUESTS_MIN: u64 = 50;
/// The part of requests that may end with an error of the server: 14.4 times that of an objective of 99.9 %,
/// which would use up a month's errors in two days.
const ERRORS_PART: f64 = 0.0144;
/// The fewest evicted bytes that can be thrashing.
const THRASHED_BYTES_MIN: u64 = 64 << 20;
/// A cache thrashes if it evicts and appends at least this part of what it delivers.
const THRASHED_PART: f64 = 0.5;
/// A cache that saves more than this part of what it delivers does not thrash.
const THRASHED_SAVED_PART: f64 = 0.1;
/// The most pauses in ten minutes that an origin may ask for.
const PAUSES_MAX: u64 = 3;
/// A job that waits for as long, and runs at less than half of its speed, is stalled for its user.
const WAITED_LONG_NS: u64 = 600 * 1_000_000_000;
/// The part of its speed, and the part of the time in which it does not wait, below which a job is slow.
const SLOW_SPEED: f64 = 0.5;
const SLOW_STALL: f64 = 0.9;

/// What a caller may see of the state.
#[derive(Debug, Default)]
pub struct Findings<'a> {
    /// The present, in nanoseconds since 1970.
    pub at_ns: u64,
    /// The state of the disk tier and its explanation. `None` without a disk tier, and for all but admins.
    pub disk: Option<(&'a str, Option<&'a str>)>,
    /// The origins.
    pub origins: &'a [OriginView],
    /// The jobs.
    pub jobs: &'a [DashboardJob],
    /// The mounts.
    pub mounts: &'a [Mount],
    /// What the server counted in the last ten minutes, and in the last hour. `None` for all but admins.
    pub counted: Option<(Counts, Totals, Counts)>,
}

/// Returns the path of the runbook of an alert, at this server.
fn runbook(alert: Alert) -> String {
    format!("/runbooks/{}", alert.as_str())
}

fn times(n: u64) -> String {
    if n == 1 { "once".to_owned() } else { format!("{n} times") }
}

fn problem(alert: Alert, severity: Severity, subject: impl Into<String>, detail: String) -> DashboardProblem {
    DashboardProblem { alert, severity, subject: subject.into(), detail, runbook: runbook(alert) }
}

/// Returns what is wrong, the worst first.
#[must_use]
pub fn problems(f: &Findings<'_>) -> Vec<DashboardProblem> {
    let mut all = Vec::new();
    all.extend(disk(f));
    all.extend(origins(f.origins).take(LISTED_MAX));
    all.extend(stalled_jobs(f.jobs, f.at_ns).take(LISTED_MAX));
    all.extend(mounts(f.mounts).take(LISTED_MAX));
    if let Some((recent, bytes, hour)) = f.counted {
        all.extend(counted(recent, bytes, hour));
    }
    all.sort_by(|a, b| (a.severity, a.alert, &a.subject).cmp(&(b.severity, b.alert, &b.subject)));
    all
}

fn disk(f: &Findings<'_>) -> Option<DashboardProblem> {
    let (state, why) = f.disk?;
    let why = why.map_or_else(String::new, |why| format!(": {why}"));
    match state {
        "on" | "closed" => None,
        "full" => Some(problem(
            Alert::FletchCacheFull,
            Severity::Warning,
            "disk cache",
            format!("the file system of the cache is full, so the cache keeps nothing new{why}"),
        )),
        _ => Some(problem(
            Alert::FletchDiskFailing,
            Severity::Warning,
            "disk cache",
            format!("the disk of the cache does not work (`{state}`), so reads go past it{why}"),
        )),
    }
}

fn origins(origins: &[OriginView]) -> impl Iterator<Item = DashboardProblem> + '_ {
    origins.iter().filter(|o| o.state == OriginState::Failing).map(|o| {
        let names: Vec<_> = o.datasets.iter().take(5).map(|d| d.as_str()).collect();
        let more = if o.datasets.len() > names.len() { ", …" } else { "" };
        let why = o.last_error.as_ref().map_or("it does not answer", |e| e.why.as_str());
        let detail = format!("the origin of {}{more} fails: {why}", names.join(", "));
        problem(Alert::FletchOriginErrors, Severity::Critical, &o.uri, detail)
    })
}

/// Returns whether a job waits for long, and is slow.
fn is_slow(job: &DashboardJob, now_ns: u64) -> bool {
    job.state == JobState::Waiting
        && now_ns.saturating_sub(job.since_ns) >= WAITED_LONG_NS
        && match job.speed {
            Some(speed) => speed < SLOW_SPEED,
            None => job.stall_part.is_some_and(|part| part > SLOW_STALL),
        }
}

fn stalled_jobs(jobs: &[DashboardJob], now_ns: u64) -> impl Iterator<Item = DashboardProblem> + '_ {
    let stalled = move |j: &&DashboardJob| j.state == JobState::Stalled || is_slow(j, now_ns);
    jobs.iter().filter(stalled).map(|j| {
        let what = match j.waits_for {
            Some(WaitsFor::FailingOrigin) => "it waits for bytes of an origin that fails",
            Some(WaitsFor::Origin) => "it waits for bytes of the origin",
            Some(WaitsFor::Disk) => "it waits for the server's disk",
            Some(WaitsFor::Server) => "it waits for the server",
            Some(WaitsFor::Trainer) => "its training process has samples and acknowledges none",
            Some(WaitsFor::Bytes | WaitsFor::Preparation) | None => "it waits for bytes",
        };
        let how = match j.state {
            JobState::Stalled => "the job makes no progress",
            _ => "the job has run at less than half of its speed for ten minutes",
        };
        let detail = format!("{how}: {what} (dataset {})", j.dataset);
        problem(Alert::FletchJobStalled, Severity::Warning, j.name.as_str(), detail)
    })
}

fn mounts(mounts: &[Mount]) -> impl Iterator<Item = DashboardProblem> + '_ {
    mounts.iter().filter_map(|m| {
        let why = m.announced.problem.as_deref()?;
        let at = format!("{}:{}", m.announced.host, m.announced.dir);
        let detail =
            format!("the mount of {} does not show the version that it should: {why}", m.announced.dataset);
        Some(problem(Alert::FletchMountBroken, Severity::Critical, at, detail))
    })
}

fn counted(recent: Counts, bytes: Totals, hour: Counts) -> impl Iterator<Item = DashboardProblem> {
    let errors = (recent.requests >= REQUESTS_MIN
        && recent.errors as f64 > ERRORS_PART * recent.requests as f64)
        .then(|| {
            let detail = format!(
                "{} of {} requests in the last ten minutes ended with an error of the server",
                recent.errors, recent.requests
            );
            problem(Alert::FletchErrorBudgetBurn, Severity::Critical, "requests", detail)
        });
    let wrong = (hour.corrupt > 0).then(|| {
        let detail = format!(
            "wrong bytes were found {} in the last hour; none of them was delivered",
            times(hour.corrupt)
        );
        problem(Alert::FletchWrongBytes, Severity::Critical, "content", detail)
    });
    let throttled = (recent.pauses > PAUSES_MAX || recent.throttled > 0).then(|| {
        let detail = format!(
            "an origin asked the server to slow down {} in ten minutes; calls that failed for it: {}",
            times(recent.pauses),
            recent.throttled
        );
        problem(Alert::FletchOriginThrottled, Severity::Warning, "origins", detail)
    });
    let faults = hour.late_acks + hour.abandoned + hour.damaged_epochs;
    let not_once = (faults > 0).then(|| {
        let detail = format!(
            "in the last hour: acks after the end of their lease: {}; epochs that a job left unfinished: {}; \
             epochs with a damaged ledger: {}",
            hour.late_acks, hour.abandoned, hour.damaged_epochs
        );
        problem(Alert::FletchEpochNotExactlyOnce, Severity::Warning, "epochs", detail)
    });
    let turned_over = recent.evicted_bytes.min(recent.put_bytes);
    let thrashes = turned_over >= THRASHED_BYTES_MIN
        && turned_over as f64 >= THRASHED_PART * bytes.delivered as f64
        && (bytes.avoided as f64) < THRASHED_SAVED_PART * bytes.delivered as f64;
    let thrashing = thrashes.then(|| {
        let detail = format!(
            "in ten minutes the cache evicted {} MiB and appended {} MiB to deliver {} MiB",
            recent.evicted_bytes >> 20,
            recent.put_bytes >> 20,
            bytes.delivered >> 20
        );
        problem(Alert::FletchThrashing, Severity::Warning, "disk cache", detail)
    });
    let damaged = (recent.disk_errors > 0 || hour.quarantined > 0).then(|| {
        let detail = format!(
            "failed operations on the disk of the cache in ten minutes: {}; damaged chunks in an hour: {}",
            recent.disk_errors, hour.quarantined
        );
        problem(Alert::FletchDiskFailing, Severity::Warning, "disk cache", detail)
    });
    [errors, wrong, throttled, not_once, thrashing, damaged].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::{AnnounceMount, EpochState, OriginFailure, dashboard::EpochProgress};
    use fletch_core::{DatasetName, Domain, Hash, JobName, MountId, Root, Tenant};

    fn found(f: &Findings<'_>) -> Vec<Alert> {
        problems(f).into_iter().map(|p| p.alert).collect()
    }

    fn job(state: JobState, waits_for: Option<WaitsFor>, epoch: Option<EpochState>) -> DashboardJob {
        DashboardJob {
            id: "id".to_owned(),
            is_declared: true,
            name: JobName::new("train").expect("name"),
            tenant: Tenant::default_tenant(),
            domain: Domain::default_domain(),
            dataset: DatasetName::new("set").expect("name"),
            state,
            waits_for,
            since_ns: 0,
            epoch: epoch.map(|state| EpochProgress {
                epoch: 3,
                state,
                planned: 1,
                acked: 0,
                held: 0,
                redelivered: 0,
            }),
            rate: None,
            bytes_rate: None,
            eta_s: None,
            speed: None,
            stall_part: None,
            hit_bytes: 0,
            substituted_bytes: 0,
            miss_bytes: 0,
            bypass_bytes: 0,
            origin_bytes: 0,
            stalled_ms: 0,
        }
    }

    fn origin(state: OriginState) -> OriginView {
        OriginView {
            uri: "s3://bucket/set".to_owned(),
            domain: Domain::default_domain(),
            datasets: vec![DatasetName::new("set").expect("name")],
            state,
            requests: 9,
            failed: 9,
            last_error: Some(OriginFailure { why: "access denied".to_owned(), at_ns: 1 }),
        }
    }

    fn mount(problem: Option<&str>) -> Mount {
        Mount {
            id: MountId::new("m").expect("id"),
            announced: AnnounceMount {
                dataset: DatasetName::new("set").expect("name"),
                root: Root(Hash::of(b"r")),
                dir: "/data".to_owned(),
                host: "gpu7".to_owned(),
                pid: 1,
                job: JobName::new("train").expect("name"),
                version: "latest".to_owned(),
                problem: problem.map(str::to_owned),
                reads: None,
            },
            seen_ns: 0,
            benefit: None,
        }
    }

    #[test]
    fn nothing_is_wrong_with_a_healthy_server() {
        let counts = Counts {
            requests: 100_000,
            errors: 100,
            put_bytes: 10 << 30,
            evicted_bytes: 1 << 20,
            ..Counts::default()
        };
        let healthy = Findings {
            at_ns: 0,
            disk: Some(("on", None)),
            origins: &[origin(OriginState::Ok)],
            jobs: &[
                job(JobState::Running, None, Some(EpochState::Open)),
                job(JobState::Waiting, Some(WaitsFor::Origin), Some(EpochState::Open)),
                job(JobState::Idle, None, Some(EpochState::Finished)),
            ],
            mounts: &[mount(None)],
            counted: Some((counts, Totals::default(), Counts::default())),
        };
        assert_eq!(found(&healthy), []);
        assert_eq!(found(&Findings::default()), []);
    }

    #[test]
    fn each_problem_has_the_name_of_its_alert() {
        let with = |f: Findings<'_>| found(&f);
        let disk = |state| with(Findings { disk: Some((state, Some("why"))), ..Findings::default() });
        assert_eq!(disk("full"), [Alert::FletchCacheFull]);
        for state in ["io", "absent", "read_only", "denied", "vanished"] {
            assert_eq!(disk(state), [Alert::FletchDiskFailing], "{state}");
        }
        let failing = [origin(OriginState::Failing)];
        assert_eq!(with(Findings { origins: &failing, ..Findings::default() }), [Alert::FletchOriginErrors]);
        let jobs = [job(JobState::Stalled, Some(WaitsFor::Trainer), Some(EpochState::Open))];
        assert_eq!(with(Findings { jobs: &jobs, ..Findings::default() }), [Alert::FletchJobStalled]);
        let mounts = [mount(Some("the version is gone"))];
        assert_eq!(with(Findings { mounts: &mounts, ..Findings::default() }), [Alert::FletchMountBroken]);
        let recent = Counts { requests: 1000, errors: 15, ..Counts::default() };
        let counted = |recent, hour| {
            let bytes = Totals { delivered: 100 << 20, ..Totals::default() };
            with(Findings { counted: Some((recent, bytes, hour)), ..Findings::default() })
        };
        let none = Counts::default();
        assert_eq!(counted(recent, none), [Alert::FletchErrorBudgetBurn]);
        assert_eq!(counted(Counts { errors: 14, ..recent }, none), []);
        assert_eq!(counted(Counts { requests: 49, ..recent }, none), [], "too few requests tell nothing");
        assert_eq!(counted(none, Counts { corrupt: 1, ..none }), [Alert::FletchWrongBytes]);
        assert_eq!(counted(Counts { pauses: 3, ..none }, none), []);
        assert_eq!(counted(Counts { pauses: 4, ..none }, none), [Alert::FletchOriginThrottled]);
        assert_eq!(counted(Counts { throttled: 1, ..none }, none), [Alert::FletchOriginThrottled]);
        assert_eq!(counted(Counts { disk_errors: 1, ..none }, none), [Alert::FletchDiskFailing]);
        assert_eq!(counted(none, Counts { quarantined: 1, ..none }), [Alert::FletchDiskFailing]);
        for faults in [
            Counts { late_acks: 1, ..none },
            Counts { abandoned: 1, ..none },
            Counts { damaged_epochs: 1, ..none },
        ] {
            assert_eq!(counted(none, faults), [Alert::FletchEpochNotExactlyOnce]);
        }
        let turned = Counts { evicted_bytes: 80 << 20, put_bytes: 90 << 20, ..none };
        assert_eq!(counted(turned, none), [Alert::FletchThrashing]);
        assert_eq!(counted(Counts { evicted_bytes: 63 << 20, ..turned }, none), []);
        let bytes = Totals { delivered: 100 << 20, avoided: 20 << 20, ..Totals::default() };
        let saves = Findings { counted: Some((turned, bytes, none)), ..Findings::default() };
        assert_eq!(with(saves), [], "it saves enough");
    }

    #[test]
    fn a_job_that_waits_is_a_problem_when_it_is_slow_for_long() {
        let found = |speed, stall_part, since_s: u64| {
            let waits =
                DashboardJob { speed, stall_part, ..job(JobState::Waiting, Some(WaitsFor::Origin), None) };
            let jobs = [DashboardJob { since_ns: (10_000 - since_s) * 1_000_000_000, ..waits }];
            problems(&Findings { at_ns: 10_000 * 1_000_000_000, jobs: &jobs, ..Findings::default() }).len()
        };
        assert_eq!((found(Some(0.4), None, 600), found(Some(0.4), None, 599)), (1, 0));
        assert_eq!((found(Some(0.6), Some(1.0), 900), found(None, None, 900)), (0, 0));
        assert_eq!((found(None, Some(0.95), 900), found(None, Some(0.8), 900)), (1, 0));
    }

    #[test]
    fn the_worst_come_first_and_say_what_to_read() {
        let all = problems(&Findings {
            disk: Some(("full", None)),
            origins: &[origin(OriginState::Failing)],
            jobs: &[job(JobState::Stalled, Some(WaitsFor::FailingOrigin), Some(EpochState::Open))],
            ..Findings::default()
        });
        let severities: Vec<_> = all.iter().map(|p| p.severity).collect();
        assert_eq!(severities, [Severity::Critical, Severity::Warning, Severity::Warning]);
        assert_eq!(all[1].runbook, "/runbooks/FletchJobStalled");
        assert_eq!((all[1].subject.as_str(), all[0].subject.as_str()), ("train", "s3://bucket/set"));
        assert!(all[0].detail.contains("access denied"), "{:?}", all[0]);
        assert!(Alert::ALL.windows(2).all(|w| w[0] < w[1]), "the list is complete and in order");
        let many = vec![origin(OriginState::Failing); 100];
        assert_eq!(problems(&Findings { origins: &many, ..Findings::default() }).len(), LISTED_MAX);
    }
}
