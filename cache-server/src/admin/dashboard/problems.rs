//! What is wrong now: a pure function over the state that a caller may see.
//!
//! Each problem has the name of an alert of the Prometheus rules, the runbook of that name, and the bounds of
//! that rule ([`bounds`]). The rules look at all servers, and some wait for a problem to last.

use super::{
    bounds,
    history::{Counts, Totals},
};
use fletch_api::{
    GivenCredentials, Mount, OriginView, Problem, WaitingJob,
    dashboard::{Alert, DashboardJob, DashboardProblem, JobState, Severity, WaitsFor},
    origins::OriginState,
};
use fletch_core::DatasetName;
use fletch_host::usage::HostUsage;
use std::{collections::BTreeMap, time::Duration};

/// The most jobs that a problem names.
const NAMED_MAX: usize = 5;
/// The most problems of one alert that are listed.
const LISTED_MAX: usize = 20;
/// The fewest requests that tell a part of errors.
const REQUESTS_MIN: u64 = 50;
/// [`bounds::SLOW_FOR`], in nanoseconds.
const SLOW_FOR_NS: u64 = bounds::SLOW_FOR.as_secs() * 1_000_000_000;

/// What a caller may see of the state.
#[derive(Debug, Default)]
pub struct Findings<'a> {
    /// The present, in nanoseconds since 1970.
    pub at_ns: u64,
    /// The state of the disk tier and its explanation. `None` without a disk tier, and for all but admins.
    pub disk: Option<(&'a str, Option<&'a str>)>,
    pub origins: &'a [OriginView],
    pub jobs: &'a [DashboardJob],
    pub mounts: &'a [Mount],
    /// What the server counted. `None` for all but admins.
    pub counted: Option<Counted>,
    /// What the server uses of its machine. Empty for all but admins.
    pub host: HostUsage,
    /// The credentials that a user handed over. Empty for all but admins.
    pub credentials: &'a [GivenCredentials],
    /// The datasets whose last listing or seal failed, and why.
    pub refreshes: &'a [(DatasetName, Problem)],
    /// The jobs of the cluster whose server is away.
    pub waiting: &'a [WaitingJob],
    /// When the certificate of the listener expires, in seconds since 1970.
    pub certificate_expires_s: Option<u64>,
}

/// What the server counted, in the windows of the rules.
#[derive(Debug, Default)]
pub struct Counted {
    /// In [`bounds::PAUSES_WITHIN`].
    pub recent: Counts,
    /// In [`bounds::DISK_ERRORS_WITHIN`].
    pub disk: Counts,
    /// In [`bounds::HOUR`].
    pub hour: Counts,
    /// What was read of each dataset in [`bounds::HOUR`].
    pub datasets: Vec<ReadDataset>,
}

/// What was read of a dataset in an hour.
#[derive(Debug, Clone)]
pub struct ReadDataset {
    pub name: DatasetName,
    /// The bytes of its version.
    pub version_bytes: u64,
    /// What was read and delivered.
    pub bytes: Totals,
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
    all.extend(host(&f.host));
    all.extend(credentials(f.credentials, f.at_ns).take(LISTED_MAX));
    all.extend(refreshes(f.refreshes).take(LISTED_MAX));
    all.extend(lost_servers(f.waiting).take(LISTED_MAX));
    all.extend(certificate(f));
    if let Some(counts) = &f.counted {
        all.extend(counted(counts));
        all.extend(thrashing(counts).take(LISTED_MAX));
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
    job.doing.state == JobState::Waiting
        && now_ns.saturating_sub(job.doing.since_ns) >= SLOW_FOR_NS
        && match job.speed {
            Some(speed) => speed < bounds::SLOW_SPEED,
            None => job.stall_part.is_some_and(|part| part > bounds::SLOW_STALL),
        }
}

fn stalled_jobs(jobs: &[DashboardJob], now_ns: u64) -> impl Iterator<Item = DashboardProblem> + '_ {
    let stalled = move |j: &&DashboardJob| j.doing.state == JobState::Stalled || is_slow(j, now_ns);
    jobs.iter().filter(stalled).map(|j| {
        let what = match j.doing.waits_for {
            Some(WaitsFor::FailingOrigin) => "it waits for bytes of an origin that fails",
            Some(WaitsFor::Origin) => "it waits for bytes of the origin",
            Some(WaitsFor::Disk) => "it waits for the server's disk",
            Some(WaitsFor::Server) => "it waits for the server",
            Some(WaitsFor::Trainer) => "its training process has samples and acknowledges none",
            Some(WaitsFor::Bytes | WaitsFor::Preparation) | None => "it waits for bytes",
        };
        let how = match j.doing.state {
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

/// Returns what is wrong with the machine of the server.
fn host(host: &HostUsage) -> impl Iterator<Item = DashboardProblem> {
    let mib = |bytes: u64| bytes >> 20;
    let disk = match (host.state_free, host.state_size) {
        (Some(free), Some(size)) if (free as f64) < bounds::STATE_FREE_MIN * size as f64 => {
            let detail = format!(
                "the disk of the state directory has {} of {} MiB free; without room no job makes progress",
                mib(free),
                mib(size)
            );
            Some(problem(Alert::FletchStateDiskFull, Severity::Warning, "state directory", detail))
        }
        _ => None,
    };
    let memory = match (host.memory, host.memory_limit) {
        (Some(used), Some(limit)) if used as f64 > bounds::MEMORY_MAX * limit as f64 => {
            let (used, limit) = (mib(used), mib(limit));
            let detail = format!("the server uses {used} of {limit} MiB; at the limit the kernel kills it");
            Some(problem(Alert::FletchMemoryNearLimit, Severity::Warning, "memory", detail))
        }
        _ => None,
    };
    [disk, memory].into_iter().flatten()
}

fn credentials(given: &[GivenCredentials], now_ns: u64) -> impl Iterator<Item = DashboardProblem> + '_ {
    given.iter().filter_map(move |of| {
        let left = Duration::from_nanos(of.expires_ns?.saturating_sub(now_ns));
        if left >= bounds::CREDENTIALS_WITHIN {
            return None;
        }
        let detail = match left.as_secs() {
            0 => format!("the credentials of {} expired; hand over new ones with `fletch up`", of.identity),
            s => format!(
                "the credentials of {} expire in {} min; hand over new ones with `fletch up`",
                of.identity,
                s.div_ceil(60)
            ),
        };
        Some(problem(Alert::FletchCredentialsExpire, Severity::Warning, &of.origin, detail))
    })
}

fn refreshes(failed: &[(DatasetName, Problem)]) -> impl Iterator<Item = DashboardProblem> + '_ {
    failed.iter().map(|(dataset, Problem { detail, hint, .. })| {
        let detail = format!("{dataset} is not brought up to date: {detail}; {hint}");
        problem(Alert::FletchRefreshFailed, Severity::Warning, dataset.as_str(), detail)
    })
}

/// Returns a problem for each lost server for which jobs wait.
fn lost_servers(waiting: &[WaitingJob]) -> impl Iterator<Item = DashboardProblem> {
    let mut servers: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for job in waiting.iter().filter(|job| job.is_gone) {
        servers.entry(&job.server).or_default().push(job.name.as_str());
    }
    let problems = servers.into_iter().map(|(server, jobs)| {
        let (one, more) = match jobs.len() {
            1 => ("a job waits", ""),
            n if n > NAMED_MAX => ("jobs wait", ", …"),
            _ => ("jobs wait", ""),
        };
        let names = jobs[..jobs.len().min(NAMED_MAX)].join(", ");
        let detail = format!(
            "{one} for this server, which is down or has lost its state: {names}{more}; start it with its \
             state directory, or give each job a saved state"
        );
        problem(Alert::FletchJobWaitsForServer, Severity::Critical, server, detail)
    });
    problems.collect::<Vec<_>>().into_iter()
}

fn certificate(f: &Findings<'_>) -> Option<DashboardProblem> {
    let expires = Duration::from_secs(f.certificate_expires_s?);
    let left = expires.saturating_sub(Duration::from_nanos(f.at_ns));
    if left >= bounds::CERTIFICATE_WITHIN {
        return None;
    }
    let hours = left.as_secs() / 3600;
    let detail = format!("the certificate expires in {hours} h; then no client connects");
    Some(problem(Alert::FletchCertificateExpires, Severity::Warning, "certificate", detail))
}

fn thrashing(counts: &Counted) -> impl Iterator<Item = DashboardProblem> + '_ {
    let evicts = counts.hour.evicted_bytes > 0;
    counts.datasets.iter().filter(move |of| evicts && thrashes(of)).map(|of| {
        let detail = format!(
            "in an hour {} MiB of {} MiB were read from the origin, and less than a tenth of what was \
             delivered was saved: the cache evicts what is read next",
            of.bytes.origin >> 20,
            of.version_bytes >> 20
        );
        problem(Alert::FletchThrashing, Severity::Warning, of.name.as_str(), detail)
    })
}

fn thrashes(of: &ReadDataset) -> bool {
    of.bytes.origin as f64 > bounds::THRASHED_READS * of.version_bytes as f64
        && (of.bytes.avoided as f64) < bounds::THRASHED_SAVED * of.bytes.delivered as f64
}

fn counted(counts: &Counted) -> impl Iterator<Item = DashboardProblem> {
    let (recent, hour) = (counts.recent, counts.hour);
    let allowed = bounds::ERRORS_BURN * bounds::ERRORS_OBJECTIVE;
    let burns = |of: Counts| of.requests > 0 && of.errors as f64 > allowed * of.requests as f64;
    let errors = (hour.requests >= REQUESTS_MIN && burns(hour) && burns(recent)).then(|| {
        let detail = format!(
            "{} of {} requests in an hour, and {} of {} in ten minutes, ended with an error of the server",
            hour.errors, hour.requests, recent.errors, recent.requests
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
    let throttled = (recent.pauses > bounds::PAUSES_MAX || recent.throttled > 0).then(|| {
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
    let damaged = (counts.disk.disk_errors > 0 || hour.quarantined > 0).then(|| {
        let detail = format!(
            "failed operations on the disk of the cache in 15 minutes: {}; damaged chunks in an hour: {}",
            counts.disk.disk_errors, hour.quarantined
        );
        problem(Alert::FletchDiskFailing, Severity::Warning, "disk cache", detail)
    });
    [errors, wrong, throttled, not_once, damaged].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::{
        AnnounceMount, Code, EpochState, OriginFailure,
        dashboard::{EpochProgress, JobDoing},
    };
    use fletch_core::{Domain, Hash, JobName, MountId, Root, Tenant};

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
            doing: JobDoing::new(state, waits_for, 0),
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
            counted: Some(Counted { recent: counts, disk: counts, hour: counts, datasets: Vec::new() }),
            ..Findings::default()
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
        let counted = |recent, hour| {
            let counted = Counted { recent, disk: recent, hour, datasets: Vec::new() };
            with(Findings { counted: Some(counted), ..Findings::default() })
        };
        let (none, burns) = (Counts::default(), Counts { requests: 1000, errors: 15, ..Counts::default() });
        assert_eq!(counted(burns, burns), [Alert::FletchErrorBudgetBurn]);
        assert_eq!(counted(burns, Counts { errors: 14, ..burns }), []);
        assert_eq!(counted(Counts { errors: 14, ..burns }, burns), [], "it is over");
        assert_eq!(counted(burns, Counts { requests: 49, ..burns }), [], "too few requests tell nothing");
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
        let read = |evicted_bytes, origin, avoided| {
            let bytes = Totals { delivered: 1000, origin, avoided };
            let name = DatasetName::new("set").expect("name");
            let datasets = vec![ReadDataset { name, version_bytes: 100, bytes }];
            let hour = Counts { evicted_bytes, ..none };
            let counted = Counted { recent: none, disk: none, hour, datasets };
            with(Findings { counted: Some(counted), ..Findings::default() })
        };
        assert_eq!(read(1, 121, 99), [Alert::FletchThrashing]);
        for (evicted, origin, avoided) in [(0, 121, 99), (1, 120, 99), (1, 121, 100)] {
            assert_eq!(read(evicted, origin, avoided), [], "{evicted} {origin} {avoided}");
        }
    }

    #[test]
    fn what_will_go_wrong_soon_is_a_problem() {
        let with = |f: Findings<'_>| found(&f);
        let host = |state_free, memory| {
            let (state_size, memory_limit) = (Some(1000), Some(1000));
            HostUsage { state_free: Some(state_free), state_size, memory: Some(memory), memory_limit }
        };
        let of_host = |host| with(Findings { host, ..Findings::default() });
        assert_eq!(of_host(host(50, 900)), []);
        assert_eq!(of_host(host(49, 900)), [Alert::FletchStateDiskFull]);
        assert_eq!(of_host(host(50, 901)), [Alert::FletchMemoryNearLimit]);
        assert_eq!(of_host(HostUsage { memory_limit: None, ..host(50, 5000) }), [], "no limit");
        let now_s: u64 = 1_000_000;
        let given = |expires_s: Option<u64>| GivenCredentials {
            origin: "s3://b".to_owned(),
            identity: "AKIA…7Q".to_owned(),
            given_ns: 1,
            expires_ns: expires_s.map(|s| s * 1_000_000_000),
        };
        let expire = |expires_s| {
            let (at_ns, credentials) = (now_s * 1_000_000_000, [given(expires_s)]);
            with(Findings { at_ns, credentials: &credentials, ..Findings::default() })
        };
        assert_eq!((expire(None), expire(Some(now_s + 900))), (vec![], vec![]));
        for soon in [now_s + 899, now_s, 1] {
            assert_eq!(expire(Some(soon)), [Alert::FletchCredentialsExpire], "{soon}");
        }
        let why = Problem::new(Code::OriginUnavailable, "no answer", "look");
        let refreshes = [(DatasetName::new("set").expect("name"), why)];
        let failed = with(Findings { refreshes: &refreshes, ..Findings::default() });
        assert_eq!(failed, [Alert::FletchRefreshFailed]);
        let certificate = |expires_s| {
            let at_ns = now_s * 1_000_000_000;
            with(Findings { at_ns, certificate_expires_s: Some(expires_s), ..Findings::default() })
        };
        assert_eq!(certificate(now_s + 7 * 86_400), []);
        assert_eq!(certificate(now_s + 7 * 86_400 - 1), [Alert::FletchCertificateExpires]);
    }

    #[test]
    fn jobs_that_wait_for_a_lost_server_are_one_problem() {
        let job = |name: &str, server: &str, is_gone| WaitingJob {
            id: name.to_owned(),
            name: JobName::new(name).expect("name"),
            dataset: DatasetName::new("set").expect("name"),
            root: Root(Hash::of(b"r")),
            server: server.to_owned(),
            is_gone,
            waits_for: Vec::new(),
        };
        let mut waiting = vec![job("alone", "srv-2", true), job("restarts", "srv-3", false)];
        waiting.extend((0..7).map(|i| job(&format!("run{i}"), "srv-1", true)));
        let all = problems(&Findings { waiting: &waiting, ..Findings::default() });
        let subjects: Vec<_> = all.iter().map(|p| (p.alert, p.subject.as_str())).collect();
        let alert = Alert::FletchJobWaitsForServer;
        assert_eq!(subjects, [(alert, "srv-1"), (alert, "srv-2")]);
        assert!(all[0].detail.contains("jobs wait") && all[0].detail.contains("run4, …"), "{all:?}");
        assert!(all[1].detail.contains("a job waits") && all[1].detail.contains("alone;"), "{all:?}");
    }

    #[test]
    fn a_job_that_waits_is_a_problem_when_it_is_slow_for_long() {
        let found = |speed, stall_part, since_s: u64| {
            let waits =
                DashboardJob { speed, stall_part, ..job(JobState::Waiting, Some(WaitsFor::Origin), None) };
            let since_ns = (10_000 - since_s) * 1_000_000_000;
            let doing = JobDoing { since_ns, ..waits.doing.clone() };
            let jobs = [DashboardJob { doing, ..waits }];
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
