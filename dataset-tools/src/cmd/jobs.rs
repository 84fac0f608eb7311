//! `fletch jobs`: lists, shows and deletes the jobs that the server remembers.

use super::Context;
use crate::cli::JobsCommand;
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use fletch_api::{EpochState, JobLine, benefit::JobBenefit};
use fletch_client::Client;
use fletch_client::epochs::JobHandle;
use serde::Serialize;
use std::io::{self, Write};

/// The most names that an error lists.
const NAMED_MAX: usize = 8;

pub fn run(ctx: &Context, what: JobsCommand) -> Result<Exit, Failure> {
    match what {
        JobsCommand::List => list(ctx),
        JobsCommand::Show { job } => show(ctx, &job),
        JobsCommand::Delete { jobs } => delete(ctx, &jobs),
    }
    .map(|()| Exit::Ok)
}

/// Returns a job by its name or id.
///
/// # Errors
/// [`Failure`] when the tenant has no such job.
pub async fn find(client: &Client, name: &str) -> Result<JobHandle, Failure> {
    let jobs = client.jobs().await?;
    Ok(client.job(&line_of(&jobs, name)?.id).await?)
}

fn line_of<'a>(jobs: &'a [JobLine], name: &str) -> Result<&'a JobLine, Failure> {
    let found = jobs.iter().find(|j| j.name.as_str() == name || j.id == name);
    found.ok_or_else(|| {
        let mut names: Vec<&str> = jobs.iter().map(|j| j.name.as_str()).take(NAMED_MAX).collect();
        if jobs.len() > NAMED_MAX {
            names.push("…");
        }
        let hint = match &names[..] {
            [] => "the server has no job of this tenant; a training process declares its job".to_owned(),
            names => format!("the jobs are: {}; `fletch jobs list` lists all", names.join(", ")),
        };
        Failure::new(format!("there is no job {name}")).hint(hint)
    })
}

fn list(ctx: &Context) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct All {
        jobs: Vec<JobLine>,
    }
    let client = ctx.client()?;
    let all = All { jobs: ctx.rt.block_on(client.jobs())? };
    ctx.out.result(&all, |w| {
        all.jobs.iter().try_for_each(|j| writeln!(w, "{}\t{}@{}", j.name, j.dataset, j.root.0.short()))
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
    let job = job.info();
    ctx.out.result(job, |w| {
        writeln!(w, "name\t{}\nid\t{}", job.name, job.id)?;
        writeln!(w, "dataset\t{}@{}", job.dataset, job.root)?;
        writeln!(w, "order\t{}\nseed\t{}", job.order.as_str(), job.seed)?;
        let world = &job.world;
        writeln!(w, "world\t{}, batch {}", count(world.ranks, "rank"), world.batch)?;
        writeln!(w, "epoch\t{} of {}", count(job.entries, "sample"), count(job.steps, "step"))?;
        if let Some(benefit) = &job.benefit {
            write_benefit(w, benefit)?;
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

/// Writes what cache is worth to a job.
fn write_benefit(w: &mut dyn Write, benefit: &JobBenefit) -> io::Result<()> {
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
        estimate.verdict.words()
    )?;
    write!(w, "cached\t{} of its bytes", percent(estimate.cached))?;
    for what_if in &estimate.what_if {
        write!(w, "; with {} {:.2} x the speed", percent(what_if.cached), what_if.rate / estimate.rate)?;
    }
    writeln!(w)
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
        let jobs = client.jobs().await?;
        // A name that is wrong deletes none of the others.
        let mut lines =
            names.iter().map(|name| line_of(&jobs, name).cloned()).collect::<Result<Vec<_>, _>>()?;
        lines.sort_by(|a, b| a.id.cmp(&b.id));
        lines.dedup_by(|a, b| a.id == b.id);
        for line in &lines {
            client.delete_job(&line.id).await?;
        }
        Ok::<_, Failure>(lines)
    })?;
    let deleted = lines.iter().map(|j| Deleted { id: &j.id, name: j.name.as_str() }).collect();
    let all = All { deleted };
    ctx.out.result(&all, |w| all.deleted.iter().try_for_each(|j| writeln!(w, "{}", j.name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::benefit::{BenefitEstimate, BenefitVerdict, WhatIf};

    fn text(benefit: &JobBenefit) -> String {
        let mut out = Vec::new();
        write_benefit(&mut out, benefit).expect("memory");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_job_says_what_it_waits_for_or_why_nobody_knows() {
        let why = "not measured yet: 3 of 8 steps";
        let few = JobBenefit { steps: 3, not_measured: Some(why.to_owned()), estimate: None };
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
            what_if: vec![WhatIf { cached: 0.6, rate: 87.5 }, WhatIf { cached: 1.0, rate: 200.0 }],
        };
        let waits = JobBenefit { steps: 256, not_measured: None, estimate: Some(estimate) };
        assert_eq!(
            text(&waits),
            "speed\t50 samples/s, 200 at most, if it never waited\n\
             time\t25 % computing, 0 % preparing batches, 75 % waiting for data: it waits for the origin\n\
             cached\t30 % of its bytes; with 60 % 1.75 x the speed; with 100 % 4.00 x the speed\n"
        );
    }
}
