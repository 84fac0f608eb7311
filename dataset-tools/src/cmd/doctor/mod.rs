//! `fletch doctor`: looks for what stops Fletch on this machine, and names the fix of each finding.
//!
//! Each group of checks has a file. A group gathers facts, and a pure function makes findings from them. So a
//! test can pass any facts, and the files of `/etc`, `/proc` and `/sys` can come from another root.

pub mod args;
mod disk;
pub mod finding;
mod fuse;
mod limits;
mod mounts;
mod origin;
mod server;
mod service;

pub use fuse::cannot_mount;

use super::{Context, Settings};
use crate::failure::{Exit, Failure};
use args::DoctorArgs;
use finding::{Finding, Report};

/// The names of all checks, which `docs/howto/doctor.md` explains.
#[cfg(test)]
const CHECKS: &[&str] = &[
    fuse::DEVICE,
    fuse::FUSERMOUNT,
    fuse::ALLOW_OTHER,
    mounts::DEAD,
    mounts::UPDATEDB,
    disk::CACHE_PLACE,
    disk::CACHE_SPACE,
    disk::STATE,
    limits::MEMORY,
    limits::OPEN_FILES,
    limits::CLOCK,
    server::SERVER,
    server::PORT,
    service::OWN_SERVER,
    service::CREDENTIALS,
    service::PROBLEMS,
    origin::READ,
    origin::WRITE,
];

pub(super) fn run(ctx: &Context, args: &DoctorArgs) -> Result<Exit, Failure> {
    let settings: Settings = match &ctx.global.config {
        Some(path) => fletch_settings::load(path, fletch_origin::KEYS)
            .map_err(|e| Failure::new(e.to_string()).exit(Exit::Usage))?,
        None => Settings::default(),
    };
    // Says so if the environment names another store than the one that was read.
    for place in [&args.source, &args.tables].into_iter().flatten() {
        ctx.warn_of_another_folder(&ctx.uri(place)?);
    }
    let report = ctx.rt.block_on(examine(ctx, args, settings))?;
    ctx.out.result(&report, |w| report.write(w))?;
    Ok(report.exit())
}

async fn examine(ctx: &Context, args: &DoctorArgs, settings: Settings) -> Result<Report, Failure> {
    let root = &args.root;
    let mut report = Report::default();
    let fuse = fuse::Facts::gather(root, args.allow_other);
    report.add(&[fuse::DEVICE, fuse::FUSERMOUNT, fuse::ALLOW_OTHER], fuse.findings());
    report.add(&[mounts::DEAD, mounts::UPDATEDB], mounts::Facts::gather(root).findings());
    let server = server::Facts::gather(ctx, args).await?;
    let answers = server.answers();
    let disk = disk::Facts::gather(args, answers)?;
    report.add(&[disk::CACHE_PLACE, disk::CACHE_SPACE, disk::STATE], disk.findings());
    let limits = limits::Facts::gather(args);
    report.add(&[limits::MEMORY, limits::OPEN_FILES], limits.findings());
    let mut clocks: Vec<(String, i64)> = server.clock().into_iter().collect();
    report.add(&server.checks(), server.findings());
    let service = service::Facts::gather(ctx).await?;
    report.add(&service.checks(), service.findings());
    let origins = origin::Facts::gather(args, settings.origin).await?;
    for facts in &origins {
        report.add(&facts.checks(), facts.findings());
        clocks.extend(facts.clock());
    }
    if !clocks.is_empty() {
        report.add(&[limits::CLOCK], limits::clock_findings(&clocks));
    }
    Ok(report)
}

/// Returns the findings of one check, or none.
fn maybe(finding: Option<Finding>) -> Vec<Finding> {
    finding.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_is_explained_in_its_page() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/howto/doctor.md");
        let page = std::fs::read_to_string(page).expect("the page");
        let rows: Vec<&str> = page
            .lines()
            .filter_map(|l| l.strip_prefix("| `")?.split_once("` | ").map(|(name, _)| name))
            .filter(|name| CHECKS.contains(name))
            .collect();
        assert_eq!(rows.iter().collect::<std::collections::BTreeSet<_>>().len(), CHECKS.len(), "{rows:?}");
    }
}
