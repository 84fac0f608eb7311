//! `fletch jobs`: lists, shows, changes and deletes the jobs that the server remembers.

use super::Context;
use crate::cli::{JobsCommand, OrDefault};
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::status::span;
use fletch_api::{
    EpochState, GateWait, JobLine, JobLoaders, JobSettings, JobShare, ShareBasis, WaitingJob,
    benefit::{BenefitEstimate, JobBenefit},
    dashboard::{JobDoing, JobState, WaitsFor},
};
use fletch_client::Client;
use fletch_client::epochs::{JobHandle, JobsOfAll};
use fletch_core::delivery::Ledger;
use fletch_settings::ByteSize;
use serde::Serialize;
use std::{
    io::{self, Write},
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// What to do about a job whose server is away.
const WHAT_TO_DO: &str = "start that server again, or the training script with its last state \
    (`EpochDataset(…, state=…)`), or `fletch jobs restore JOB --state FILE`; if it waits for a rank whose \
    process is gone: `fletch jobs lost JOB --rank R`";
/// The most names that an error lists.
const NAMED_MAX: usize = 8;
/// The most gates that are shown.
const WAITS_SHOWN: usize = 4;
/// How often a probe's progress is asked for.
const PROBE_ASKED: Duration = Duration::from_millis(500);
/// A job that acknowledges nothing for as long does not train now.
const STANDS_STILL: Duration = Duration::from_secs(60);

pub fn run(ctx: &Context, what: JobsCommand) -> Result<Exit, Failure> {
    match what {
        JobsCommand::List => list(ctx),
        JobsCommand::Show { job } => show(ctx, &job),
        JobsCommand::Set { job, weight, min_share } => set(ctx, &job, weight, min_share),
        JobsCommand::Probe { job } => probe(ctx, &job),
        JobsCommand::Restore { job, state, replace } => restore(ctx, &job, &state, replace),
        JobsCommand::Move { job, to } => move_to(ctx, &job, &to),
        JobsCommand::Lost { job, rank } => lose(ctx, &job, rank),
        JobsCommand::Delete { jobs } => delete(ctx, &jobs),
    }
    .map(|()| Exit::Ok)
}

/// Returns a job by its name or id.
///
/// # Errors
/// [`Failure`] when the tenant has no such job.
pub async fn find(client: &Client, name: &str) -> Result<JobHandle, Failure> {
    let all = client.jobs_of_all().await?;
    let found = line_of(&all, name)?;
    match all.waiting.iter().find(|job| job.id == found.id) {
        None => Ok(client.job(&found.id).await?),
        Some(job) => {
            let told = format!("job {} {}", job.name, job.words());
            Err(Failure::new(told).hint(WHAT_TO_DO).exit(Exit::Unreachable))
        }
    }
}

/// What names a job.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FoundJob {
    id: String,
    name: String,
}

/// Returns a job by its name or id, also one whose server is away.
fn line_of(all: &JobsOfAll, name: &str) -> Result<FoundJob, Failure> {
    let served = all.jobs.iter().map(|job| (&job.id, &job.name));
    let jobs: Vec<_> = served.chain(all.waiting.iter().map(|job| (&job.id, &job.name))).collect();
    if let Some((id, of)) = jobs.iter().find(|(id, of)| of.as_str() == name || *id == name) {
        return Ok(FoundJob { id: (*id).clone(), name: of.to_string() });
    }
    if !all.silent.is_empty() {
        let told = format!("no server that answers has a job {name}; {} did not", all.silent.join(", "));
        let hint = "start these servers again; `fletch cluster status` shows all of them";
        return Err(Failure::new(told).hint(hint));
    }
    let mut names: Vec<&str> = jobs.iter().map(|(_, name)| name.as_str()).take(NAMED_MAX).collect();
    if jobs.len() > NAMED_MAX {
        names.push("…");
    }
    let hint = match &names[..] {
        [] => "the server has no job of this tenant; a training process declares its job".to_owned(),
        names => format!("the jobs are: {}; `fletch jobs list` lists all", names.join(", ")),
    };
    Err(Failure::new(format!("there is no job {name}")).hint(hint))
}

fn list(ctx: &Context) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct All {
        jobs: Vec<JobLine>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        waiting: Vec<WaitingJob>,
    }
    let client = ctx.client()?;
    let JobsOfAll { jobs, waiting, silent } = ctx.rt.block_on(client.jobs_of_all())?;
    let all = All { jobs, waiting };
    if !all.waiting.is_empty() {
        let wait = if all.waiting.len() == 1 { "waits" } else { "wait" };
        let jobs = count(all.waiting.len(), "job");
        ctx.out.note(format_args!("{jobs} {wait} for a server: {WHAT_TO_DO}"));
    }
    if !silent.is_empty() {
        ctx.out.warn(format_args!("the jobs of {} are missing: no answer", silent.join(", ")));
    }
    ctx.out.result(&all, |w| {
        for j in &all.jobs {
            writeln!(w, "{}\t{}@{}", j.name, j.dataset, j.root.0.short())?;
        }
        for j in &all.waiting {
            writeln!(w, "{}\t{}@{}\t{}", j.name, j.dataset, j.root.0.short(), j.words())?;
        }
        Ok(())
    })
}

fn state_word(state: EpochState) -> &'static str {
    match state {
        EpochState::Open => "open",
        EpochState::Finished => "finished",
        EpochState::Abandoned => "abandoned",
        EpochState::Damaged => "damaged",
    }
}

fn show(ctx: &Context, job: &str) -> Result<(), Failure> {
    let client = ctx.client()?;
    let job = ctx.rt.block_on(find(&client, job))?;
    let at = job.server();
    let server = client.members().into_iter().find(|member| member.1 == at);
    let job = job.info();
    ctx.out.result(job, |w| {
        writeln!(w, "name\t{}\nid\t{}", job.name, job.id)?;
        if let Some((id, url)) = &server {
            writeln!(w, "server\t{id} at {url}")?;
        }
        writeln!(w, "dataset\t{}@{}", job.dataset, job.root)?;
        writeln!(w, "order\t{}\nseed\t{}", job.order.as_str(), job.seed)?;
        let world = &job.world;
        writeln!(w, "world\t{}, batch {}", count(world.ranks, "rank"), world.batch)?;
        writeln!(w, "epoch\t{} of {}", count(job.entries, "sample"), count(job.steps, "step"))?;
        if let Some(doing) = &job.doing {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let since = now.saturating_sub(Duration::from_nanos(doing.since_ns));
            writeln!(w, "now\tit {}, for {}", doing.words, span(since))?;
        }
        if let Some(benefit) = &job.benefit {
            write_benefit(w, benefit, job.doing.as_ref())?;
        }
        if let Some(share) = &job.share {
            let estimate = job.benefit.as_ref().and_then(|b| b.estimate.as_ref());
            write_share(w, share, estimate, job.doing.as_ref())?;
        }
        write_settings(w, &job.settings)?;
        write_waits(w, &job.waits)?;
        if let Some(loaders) = &job.loaders {
            write_loaders(w, loaders)?;
        }
        for e in &job.epochs {
            let state = state_word(e.state);
            write!(w, "{}\t{state}\t{} of {} acknowledged", e.epoch, e.acked, e.planned)?;
            for (what, n) in [("held", e.held), ("redelivered", e.redelivered)] {
                if n > 0 {
                    write!(w, ", {n} {what}")?;
                }
            }
            if !e.commits.is_empty() {
                let commits: Vec<String> = e.commits.iter().map(ToString::to_string).collect();
                write!(w, ", commits {}", commits.join(" "))?;
            }
            writeln!(w, ", ledger {}", bytes(e.ledger_bytes))?;
        }
        Ok(())
    })
}

/// Writes where the job's reads waited longest.
fn write_waits(w: &mut dyn Write, waits: &[GateWait]) -> io::Result<()> {
    if waits.is_empty() {
        return Ok(());
    }
    let shown = |wait: &GateWait| {
        let time = Duration::try_from_secs_f64(wait.seconds).unwrap_or_default();
        format!("{} {time:.1?}", wait.gate)
    };
    let longest: Vec<String> = waits.iter().take(WAITS_SHOWN).map(shown).collect();
    writeln!(w, "waited\t{}", longest.join(", "))
}

/// Writes which processes read as the job's ranks.
fn write_loaders(w: &mut dyn Write, loaders: &JobLoaders) -> io::Result<()> {
    for of in &loaders.ranks {
        if let Some(loader) = &of.loader {
            write!(w, "rank {}\t{loader}", of.rank)?;
            match (of.has_left, of.silent_ms) {
                (true, _) => write!(w, ", ended")?,
                (false, Some(ms)) => write!(w, ", seen {} ago", span(Duration::from_millis(ms)))?,
                (false, None) => {}
            }
            if let Some(waiting) = &of.waiting {
                write!(w, "; {waiting} waits for the rank")?;
            }
            writeln!(w)?;
        }
        if let Some(ms) = of.unnamed_ms {
            writeln!(
                w,
                "warning\trank {}: a client that does not name its process asked {} ago: nobody can tell \
                 whether two processes share this rank; update the client",
                of.rank,
                span(Duration::from_millis(ms))
            )?;
        }
    }
    let more = loaders.total.saturating_sub(loaders.ranks.len() as u64);
    if more > 0 {
        writeln!(w, "ranks\tand {more} more")?;
    }
    Ok(())
}

/// Returns what the job waits for. Where the server's verdict of now is known, no other one is printed.
fn verdict_words<'a>(estimate: &BenefitEstimate, doing: Option<&'a JobDoing>) -> &'a str {
    match doing {
        Some(doing) if doing.state == JobState::Idle || doing.waits_for != WaitsFor::of(estimate.verdict) => {
            &doing.words
        }
        _ => estimate.verdict.words(),
    }
}

/// Writes what cache is worth to a job.
fn write_benefit(w: &mut dyn Write, benefit: &JobBenefit, doing: Option<&JobDoing>) -> io::Result<()> {
    let Some(estimate) = &benefit.estimate else {
        return writeln!(w, "speed\t{}", benefit.not_measured.as_deref().unwrap_or("not measured yet"));
    };
    let percent = |part: f64| format!("{:.0} %", part * 100.0);
    let most = if estimate.is_sure { "if it never waited" } else { "at most, if it never waited" };
    writeln!(w, "speed\t{:.0} samples/s, {:.0} {most}", estimate.rate, estimate.most_rate)?;
    let [compute, preparation, fetch] = [estimate.compute, estimate.preparation, estimate.fetch].map(percent);
    writeln!(
        w,
        "time\t{compute} computing, {preparation} preparing batches, {fetch} waiting for data: it {}",
        verdict_words(estimate, doing)
    )?;
    write!(w, "cached\t{} of its bytes", percent(estimate.cached))?;
    for what_if in &estimate.what_if {
        write!(w, "; with {} {:.2} x the speed", percent(what_if.cached), what_if.rate / estimate.rate)?;
    }
    if estimate.slows_with_cache() {
        write!(w, ", because the server's disk is the limit then")?;
    }
    writeln!(w)
}

/// Writes what a job has of the disk, and why.
fn write_share(
    w: &mut dyn Write,
    share: &JobShare,
    estimate: Option<&BenefitEstimate>,
    doing: Option<&JobDoing>,
) -> io::Result<()> {
    let (Some(has), Some(size), Some(basis)) = (share.share_bytes, share.size_bytes, share.basis) else {
        return writeln!(w, "share\tnone: the disk is not divided among datasets");
    };
    let others = match share.others {
        0 => String::new(),
        n => format!(", with {}", count(n, "other job")),
    };
    writeln!(w, "share\t{} of the {} of its dataset{others}", bytes(has), bytes(size))?;
    let why = match (basis, share.rank, share.gain_per_gib) {
        (ShareBasis::Benefit, Some(rank), Some(gain)) => {
            format!("by what it is worth: place {rank} of {}, {}", share.ranks, gain_words(gain))
        }
        (ShareBasis::Idle, ..) => "what others leave: no job reads it now".to_owned(),
        _ if estimate.is_some() => {
            "by what is read of it: others read it too, or the rate of its link is not known yet".to_owned()
        }
        _ => "by what is read of it: the job is not measured yet".to_owned(),
    };
    writeln!(w, "why\t{why}")?;
    if let (Some(bound), Some(now)) = (share.bound_rate, estimate) {
        let why = if now.rate >= 0.95 * bound {
            "and it is there".to_owned()
        } else {
            format!("and it {}", verdict_words(now, doing))
        };
        writeln!(w, "bound\t{bound:.0} samples/s with this share once it is filled, {why}")?;
    }
    Ok(())
}

/// Returns what one GiB more is worth, for people.
pub fn gain_words(gain_per_gib: f64) -> String {
    // The gain is a slope, so a GiB that is more than the dataset needs would be too long a step.
    let of_100_mib = gain_per_gib * 100.0 / 1024.0;
    if of_100_mib < 0.0005 {
        return "and more would hardly help".to_owned();
    }
    format!("and 100 MiB more would give {:.1} % more speed", of_100_mib * 100.0)
}

/// Writes what users set of a job, if they set anything.
fn write_settings(w: &mut dyn Write, settings: &JobSettings) -> io::Result<()> {
    if let Some(weight) = settings.weight {
        writeln!(w, "weight\t{weight} beside the tenant's other jobs")?;
    }
    match settings.min_share_bytes {
        Some(least) => writeln!(w, "min-share\t{} of its dataset while it runs", bytes(least)),
        None => Ok(()),
    }
}

fn set(
    ctx: &Context,
    job: &str,
    weight: Option<OrDefault<f64>>,
    min_share: Option<OrDefault<ByteSize>>,
) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Set<'a> {
        id: &'a str,
        name: &'a str,
        settings: JobSettings,
    }
    let client = ctx.client()?;
    let job = ctx.rt.block_on(async {
        let job = find(&client, job).await?;
        let mut settings = job.info().settings;
        if let Some(weight) = weight {
            settings.weight = weight.0;
        }
        if let Some(min_share) = min_share {
            settings.min_share_bytes = min_share.0.map(|size| size.0);
        }
        Ok::<_, Failure>(job.set_settings(&settings).await?)
    })?;
    let set = Set { id: &job.id, name: job.name.as_str(), settings: job.settings };
    ctx.out.result(&set, |w| {
        writeln!(w, "name\t{}", set.name)?;
        writeln!(w, "weight\t{}", set.settings.weight())?;
        writeln!(w, "min-share\t{}", set.settings.min_share_bytes.map_or("none".to_owned(), bytes))
    })
}

fn probe(ctx: &Context, name: &str) -> Result<(), Failure> {
    let client = ctx.client()?;
    let found = ctx.rt.block_on(async {
        let job = find(&client, name).await?;
        let mut shown = job.probe().await?;
        let (mut acked, mut since) = (0, Instant::now());
        loop {
            let Some(probe) = shown.benefit.and_then(|b| b.probe) else {
                return Err(Failure::new("the server began anew, and the probe with it").hint("probe again"));
            };
            if probe.is_over {
                return Ok(probe);
            }
            if probe.entries > acked {
                (acked, since) = (probe.entries, Instant::now());
            } else if since.elapsed() >= STANDS_STILL {
                let at = format!("{} of {} samples", probe.entries, probe.of_entries);
                return Err(Failure::new(format!("the job stands still since {at} of the probe"))
                    .hint("does it train? the probe goes on with it: `fletch jobs show` tells its result"));
            }
            tokio::time::sleep(PROBE_ASKED).await;
            shown = job.current().await?;
        }
    })?;
    ctx.out.result(&found, |w| match found.most_rate {
        Some(most) => writeln!(w, "most\t{most:.0} samples/s if it never waited"),
        None => writeln!(w, "most\tnot known: the disk or the server was the limit"),
    })
}

/// Continues a job from a saved state. If its server is away, the state moves the job to another one.
fn restore(ctx: &Context, name: &str, file: &Path, replace: bool) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Restored<'a> {
        id: &'a str,
        name: &'a str,
        epoch: u64,
        acked: u64,
    }
    let state = std::fs::read(file).map_err(|e| Failure::io(file.display(), &e))?;
    let header = Ledger::read(&state).map_err(|e| {
        let hint = "give the bytes of `state_dict()[\"state\"]`, or of `GET /v1/jobs/ID/epochs/N/state`";
        Failure::new(format!("{} is no state: {e}", file.display())).hint(hint)
    })?;
    let epoch = header.header.epoch;
    let client = ctx.client()?;
    let (job, there) = ctx.rt.block_on(async {
        let all = client.jobs_of_all().await?;
        let job = line_of(&all, name)?;
        if !replace && all.waiting.iter().all(|waiting| waiting.id != job.id) {
            let told = format!("job {} is served: a state would discard what it delivered since", job.name);
            return Err(Failure::new(told).hint("end its ranks, and give --replace"));
        }
        let there = client.move_job(&job.id, epoch, state.into()).await?;
        Ok::<_, Failure>((job, there))
    })?;
    let restored = Restored { id: &job.id, name: &job.name, epoch, acked: there.acked };
    ctx.out.result(&restored, |w| {
        let samples = count(there.acked, "sample");
        writeln!(w, "{}: epoch {epoch} goes on after {samples}; start its ranks again", job.name)
    })
}

/// Moves a job to another server.
fn move_to(ctx: &Context, name: &str, to: &str) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Moved<'a> {
        id: &'a str,
        name: &'a str,
        to: &'a str,
        jobs: u64,
    }
    let client = ctx.client()?;
    let (job, answer) = ctx.rt.block_on(async {
        let all = client.jobs_of_all().await?;
        let job = line_of(&all, name)?;
        let answer = client.move_to(&job.id, to).await?;
        Ok::<_, Failure>((job, answer))
    })?;
    let moved = Moved { id: &job.id, name: &job.name, to, jobs: answer.jobs };
    ctx.out.result(&moved, |w| match answer.jobs {
        0 | 1 => writeln!(w, "{}: server {to} has it now", job.name),
        all => writeln!(w, "{}: server {to} has it now, with {}", job.name, count(all - 1, "other job")),
    })
}

/// Gives up a rank of a job that waits for what its ranks know.
fn lose(ctx: &Context, name: &str, rank: u32) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Lost<'a> {
        id: &'a str,
        name: &'a str,
        rank: u32,
        waits_for: &'a [u32],
    }
    let client = ctx.client()?;
    let (job, answer) = ctx.rt.block_on(async {
        let all = client.jobs_of_all().await?;
        let job = line_of(&all, name)?;
        let answer = client.lose_rank(&job.id, rank).await?;
        Ok::<_, Failure>((job, answer))
    })?;
    let waits_for = answer.waits_for.as_slice();
    let lost = Lost { id: &job.id, name: &job.name, rank, waits_for };
    ctx.out.result(&lost, |w| match waits_for {
        [] => writeln!(w, "{}: it goes on without what the process of rank {rank} knew", job.name),
        more => {
            let ranks: Vec<String> = more.iter().map(u32::to_string).collect();
            writeln!(w, "{}: it still waits for rank {}", job.name, ranks.join(", "))
        }
    })
}

fn delete(ctx: &Context, names: &[String]) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Deleted<'a> {
        id: &'a str,
        name: &'a str,
    }
    #[derive(Serialize)]
    struct All<'a> {
        deleted: Vec<Deleted<'a>>,
    }
    let client = ctx.client()?;
    let lines = ctx.rt.block_on(async {
        let all = client.jobs_of_all().await?;
        // A name that is wrong deletes none of the others.
        let mut lines = names.iter().map(|name| line_of(&all, name)).collect::<Result<Vec<_>, _>>()?;
        lines.sort_by(|a, b| a.id.cmp(&b.id));
        lines.dedup_by(|a, b| a.id == b.id);
        for line in &lines {
            client.delete_job(&line.id).await?;
        }
        Ok::<_, Failure>(lines)
    })?;
    let deleted = lines.iter().map(|j| Deleted { id: &j.id, name: &j.name }).collect();
    let all = All { deleted };
    ctx.out.result(&all, |w| all.deleted.iter().try_for_each(|j| writeln!(w, "{}", j.name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::benefit::{BenefitEstimate, BenefitVerdict, WhatIf};

    fn text(benefit: &JobBenefit) -> String {
        let mut out = Vec::new();
        write_benefit(&mut out, benefit, None).expect("memory");
        String::from_utf8(out).expect("text")
    }

    fn share(json: &str) -> JobShare {
        let base = r#"{"id":"j","name":"n","tenant":"t","dataset":"d","ranks":3,"others":1"#;
        serde_json::from_str(&format!("{base},{json}}}")).expect("a share")
    }

    #[test]
    fn a_job_says_what_it_has_of_the_disk_and_why() {
        let text = |share: &JobShare| {
            let mut out = Vec::new();
            write_share(&mut out, share, None, None).expect("memory");
            String::from_utf8(out).expect("text")
        };
        let sizes = r#""share_bytes":1024,"size_bytes":4096"#;
        let worth = share(&format!(r#"{sizes},"basis":"benefit","rank":2,"gain_per_gib":0.2"#));
        assert_eq!(
            text(&worth),
            "share\t1.00 KiB of the 4.00 KiB of its dataset, with 1 other job\n\
             why\tby what it is worth: place 2 of 3, and 100 MiB more would give 2.0 % more speed\n"
        );
        let reads = share(&format!(r#"{sizes},"basis":"reads""#));
        assert!(text(&reads).ends_with("by what is read of it: the job is not measured yet\n"));
        assert!(text(&share(r#""speed":1.0"#)).contains("not divided"));
        assert_eq!(gain_words(0.0), "and more would hardly help");
    }

    #[test]
    fn one_verdict_is_printed() {
        let estimate = BenefitEstimate {
            rate: 50.0,
            most_rate: 200.0,
            is_sure: true,
            origin_rate: None,
            disk_rate: None,
            compute: 0.25,
            preparation: 0.0,
            fetch: 0.75,
            verdict: BenefitVerdict::Origin,
            cached: 0.3,
            sample_bytes: 8192.0,
            what_if: Vec::new(),
        };
        let words =
            |state, waits_for| verdict_words(&estimate, Some(&JobDoing::new(state, waits_for, 0))).to_owned();
        assert_eq!(words(JobState::Waiting, Some(WaitsFor::Origin)), "waits for the origin");
        let fails = Some(WaitsFor::FailingOrigin);
        assert_eq!(words(JobState::Stalled, fails), "stands still: waits for the origin, which fails");
        assert_eq!(words(JobState::Idle, None), "asks for nothing", "its epoch is over");
        assert_eq!(words(JobState::Running, None), "runs");
        assert_eq!(verdict_words(&estimate, None), "waits for the origin", "an older server");
    }

    #[test]
    fn a_setting_is_a_value_or_its_default() {
        assert_eq!("default".parse(), Ok(OrDefault::<f64>(None)));
        assert_eq!("0.5".parse(), Ok(OrDefault(Some(0.5))));
        assert_eq!("20GiB".parse::<OrDefault<ByteSize>>().ok(), Some(OrDefault(Some(ByteSize(20 << 30)))));
        assert!("much".parse::<OrDefault<f64>>().is_err());
    }

    #[test]
    fn a_job_says_what_it_waits_for_or_why_nobody_knows() {
        let why = "not measured yet: 3 of 8 steps";
        let few = JobBenefit { steps: 3, not_measured: Some(why.to_owned()), estimate: None, probe: None };
        assert_eq!(text(&few), format!("speed\t{why}\n"));
        let estimate = BenefitEstimate {
            rate: 50.0,
            most_rate: 200.0,
            is_sure: false,
            origin_rate: Some(35.0),
            disk_rate: None,
            compute: 0.25,
            preparation: 0.0,
            fetch: 0.75,
            verdict: BenefitVerdict::Origin,
            cached: 0.3,
            sample_bytes: 8192.0,
            what_if: vec![WhatIf { cached: 0.6, rate: 87.5 }, WhatIf { cached: 1.0, rate: 200.0 }],
        };
        let slow_disk = BenefitEstimate {
            what_if: vec![WhatIf { cached: 0.6, rate: 87.5 }, WhatIf { cached: 1.0, rate: 40.0 }],
            ..estimate.clone()
        };
        let waits = JobBenefit { steps: 256, not_measured: None, estimate: Some(estimate), probe: None };
        assert_eq!(
            text(&waits),
            "speed\t50 samples/s, 200 at most, if it never waited\n\
             time\t25 % computing, 0 % preparing batches, 75 % waiting for data: it waits for the origin\n\
             cached\t30 % of its bytes; with 60 % 1.75 x the speed; with 100 % 4.00 x the speed\n"
        );
        let slows = text(&JobBenefit { estimate: Some(slow_disk), ..waits });
        assert!(
            slows.ends_with("; with 100 % 0.80 x the speed, because the server's disk is the limit then\n")
        );
    }
}
