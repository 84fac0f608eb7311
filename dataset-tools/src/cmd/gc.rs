//! `fletch gc`: shows the versions and chunks at a tables location that nobody uses, and deletes them.

use super::{Context, absent};
use crate::failure::{Exit, Failure};
use crate::garbage::{Garbage, Keep};
use crate::out::{bytes, count};
use crate::progress::{Done, Progress, Total, of_work};
use crate::run::{mark::Mark, now_ns, written};
use crate::tables_location::TablesLocation;
use crate::target::Target;
use fletch_client::epochs::JobsOfAll;
use fletch_core::Root;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What `fletch gc` found.
#[derive(Serialize)]
struct Report {
    uri: String,
    #[serde(flatten)]
    garbage: Garbage,
    /// The bytes of all of it.
    bytes: u64,
    deleted: bool,
}

pub fn run(ctx: &Context, text: &str, unused_for: Duration, yes: bool) -> Result<Exit, Failure> {
    let location = location(ctx, text)?;
    let garbage = if yes {
        let marks = ctx.rt.block_on(Mark::of_collection(&location, ctx.out))?;
        let garbage = find(ctx, &location, unused_for).and_then(|garbage| {
            delete(ctx, &location, &garbage)?;
            Ok(garbage)
        });
        ctx.rt.block_on(async {
            for mark in marks {
                mark.remove(ctx.out).await;
            }
        });
        garbage?
    } else {
        find(ctx, &location, unused_for)?
    };
    let report = Report { uri: location.uri(), bytes: garbage.bytes(), garbage, deleted: yes };
    ctx.out.result(&report, |w| {
        let garbage = &report.garbage;
        for version in &garbage.versions {
            writeln!(w, "{}\t{}\t{}", version.root, version.unused_since, bytes(version.bytes))?;
        }
        let of =
            format!("{} and {}", count(garbage.versions.len(), "version"), count(garbage.chunks, "chunk"));
        let kept = count(garbage.kept_versions, "version");
        let did = if yes { "deleted" } else { "unused" };
        writeln!(w, "{}: {did}: {of}, {}; {kept} kept", report.uri, bytes(report.bytes))
    })?;
    if !yes && report.garbage.files() > 0 {
        ctx.out.note("nothing was deleted; the same command with --yes deletes it");
    }
    Ok(Exit::Ok)
}

/// Returns the tables location of a registered dataset, or of a dataset or tables at a URI.
fn location(ctx: &Context, text: &str) -> Result<TablesLocation, Failure> {
    let target = Target { base: text.to_owned(), select: None, note: None };
    if let Some(name) = ctx.name(&target) {
        let (client, server) = ctx.reached()?;
        let datasets = ctx.rt.block_on(client.datasets())?;
        let registered = datasets.iter().find(|dataset| dataset.name == name);
        let tables = &registered.ok_or_else(|| absent::unregistered(&name, &datasets, &server))?.tables;
        return TablesLocation::open(&ctx.origins(), &ctx.registered_uri(tables)?);
    }
    let location = ctx.location(text)?;
    if ctx.rt.block_on(location.has_no_tags())
        && let Some(place) = written::best(&ctx.written(location.origin().uri()))
    {
        return ctx.remembered_location(&place.tables);
    }
    Ok(location)
}

fn find(ctx: &Context, location: &TablesLocation, unused_for: Duration) -> Result<Garbage, Failure> {
    let tags = ctx.rt.block_on(location.tags())?;
    if tags.is_empty() {
        return Err(Failure::new(format!("{}: no tag names a version; nothing was deleted", location.uri()))
            .hint(
                "give the URI of the tables; to delete all of a dataset's tables, delete `fletch/` there",
            ));
    }
    let mut in_use = roots_at_server(ctx)?;
    in_use.extend(tags.iter().map(|(_, doc)| doc.root));
    let keep = Keep { in_use, unused_for, now_ns: now_ns() };
    ctx.rt.block_on(Garbage::find(location, &keep))
}

/// Returns the roots that the mounts and jobs of the server use.
fn roots_at_server(ctx: &Context) -> Result<BTreeSet<Root>, Failure> {
    if ctx.chosen()?.is_none() {
        ctx.out.note(
            "no server was asked which versions its mounts and jobs use; give --server URL, if there is one",
        );
        return Ok(BTreeSet::new());
    }
    let client = ctx.client()?;
    let (mounts, away) = ctx.rt.block_on(client.mounts_of_all())?;
    let JobsOfAll { jobs, waiting, silent: more_away } = ctx.rt.block_on(client.jobs_of_all())?;
    let away: BTreeSet<String> = away.into_iter().chain(more_away).collect();
    if !away.is_empty() {
        let away = away.into_iter().collect::<Vec<_>>().join(", ");
        return Err(Failure::new(format!("{away}: no answer, so its mounts and jobs are not known"))
            .hint("look at `fletch cluster status`; nothing was deleted")
            .exit(Exit::Unreachable));
    }
    let jobs = jobs.iter().map(|job| job.root).chain(waiting.iter().map(|job| job.root));
    Ok(mounts.iter().map(|mount| mount.announced.root).chain(jobs).collect())
}

fn delete(ctx: &Context, location: &TablesLocation, garbage: &Garbage) -> Result<(), Failure> {
    let deleted = Arc::new(AtomicU64::new(0));
    let total = Arc::new(Total::default());
    total.files.store(garbage.files(), Relaxed);
    let done: Done = {
        let deleted = Arc::clone(&deleted);
        Arc::new(move || (deleted.load(Relaxed), 0))
    };
    let _shown = Progress::start(ctx.out, ctx.global.progress, "deleting", of_work(done, total), None);
    ctx.rt.block_on(garbage.delete(location, &deleted))
}
