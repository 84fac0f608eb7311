//! `fletch mount --dry-run`: lists a source as a mount would, and keeps nothing of it.

use super::prepare::{Missing, Wanted, listed};
use super::{Context, source};
use crate::cli::MountArgs;
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::run::renewed::RenewedPins;
use serde::Serialize;

/// What a mount would show, and what finding that out took.
#[derive(Serialize)]
struct DryRun {
    source: String,
    files: u64,
    bytes: u64,
    /// Names that cannot be files of a mount.
    left_out: u64,
    /// Requests to the store; `None` for a directory.
    requests: Option<u64>,
    seconds: f64,
}

pub fn run(ctx: &Context, args: &MountArgs) -> Result<Exit, Failure> {
    let uri = source::find(ctx, &args.source.base)?.uri;
    let scratch = tempfile::tempdir().map_err(|e| Failure::io("a temporary directory", &e))?;
    let to = ctx.uri(&scratch.path().join("tables").display().to_string())?;
    let wanted = Wanted {
        uri: &uri,
        to: &to,
        list: args.list.clone(),
        pack: false,
        earlier: None,
        missing: Missing { skip_failed: true, allow_loss: None },
        renewed: RenewedPins::default(),
        draft: true,
    };
    let before = ctx.origins().stats().store_requests;
    let report = listed(ctx, &wanted, &scratch.path().join("state"))?;
    let is_local = uri.as_local().is_some();
    let dry_run = DryRun {
        source: uri.to_string(),
        files: report.files,
        bytes: report.file_bytes,
        left_out: report.skipped.len() as u64,
        requests: (!is_local).then(|| ctx.origins().stats().store_requests - before),
        seconds: report.seconds,
    };
    ctx.out.result(&dry_run, |w| {
        write!(w, "{}: {}, {}", dry_run.source, count(dry_run.files, "file"), bytes(dry_run.bytes))?;
        if dry_run.left_out > 0 {
            write!(w, "; {} left out", count(dry_run.left_out, "name"))?;
        }
        match dry_run.requests {
            Some(requests) => writeln!(w, "; {}, {:.1} s", count(requests, "request"), dry_run.seconds)?,
            None => writeln!(w, "; {:.1} s", dry_run.seconds)?,
        }
        writeln!(w, "nothing was read, written or mounted; the same command without --dry-run mounts it")
    })?;
    Ok(Exit::Ok)
}
