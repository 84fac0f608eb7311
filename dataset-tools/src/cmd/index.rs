//! `fletch index`.

use super::{Ctx, fail};
use crate::cli::{IndexArgs, RuleArg};
use crate::failure::{Exit, Failure};
use crate::index::listed::{self, Names};
use crate::index::{self, IndexFailure, IndexOptions, OnFault, state};
use crate::out::bytes;
use crate::target::Select;
use fletch_core::TagName;
use fletch_core::manifest::{KeyRule, SampleRule};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::signal::unix::{SignalKind, signal};

pub fn run(ctx: &Ctx, args: IndexArgs) -> Exit {
    match options(ctx, args).map_err(IndexFailure::from).and_then(|options| {
        let stop = stop_on_signal(ctx)?;
        index::run(&options, &ctx.origins, ctx.rt.handle(), ctx.out, &stop)
    }) {
        Ok(report) => {
            ctx.out.note(format_args!(
                "{} entries, {}; read {} files, {}; reused {} files, {}; {:.1} s",
                report.entries,
                bytes(report.bytes),
                report.files_read,
                bytes(report.bytes_read),
                report.files_reused,
                bytes(report.bytes_reused),
                report.seconds
            ));
            if let Err(e) = ctx.out.result(&report, |w| writeln!(w, "{}", report.root)) {
                return fail(ctx.out, &e, &[]);
            }
            if report.skipped.is_empty() {
                return Exit::Ok;
            }
            ctx.out.warn(format_args!(
                "{} entries were left out; the manifest lists them",
                report.skipped.len()
            ));
            Exit::Partial
        }
        Err(e) => fail(ctx.out, &e.failure, &e.faults),
    }
}

pub(super) fn options(ctx: &Ctx, args: IndexArgs) -> Result<IndexOptions, Failure> {
    let uri = ctx.uri(&args.uri)?;
    let to = args.to.as_deref().map_or_else(|| Ok(uri.clone()), |to| ctx.uri(to))?;
    let list = match &args.list {
        Some(_) if uri.as_local().is_some() => {
            return Err(Failure::usage("--list is for stores and servers; a directory is walked")
                .hint("leave --list out, or index a directory that holds only what is wanted"));
        }
        Some(file) => Some(Names::read(file, &uri)?),
        None if uri.is_plain_http() => {
            return Err(Failure::usage(format!("{uri} is a plain HTTP server, which has no listing"))
                .hint("give the names of its files with --list FILE, one on each line"));
        }
        None => None,
    };
    if to.is_plain_http() {
        return Err(Failure::usage(format!("tables cannot be written to {to}"))
            .hint("a plain HTTP server is only read: name another place with --to URI"));
    }
    let key = match args.sample_rule {
        Some(RuleArg::File) => KeyRule::File,
        Some(RuleArg::Stem) => KeyRule::Stem,
        None if listed::begins_with_shards(ctx.rt.handle(), &ctx.origins, &uri, list.as_ref())? => {
            ctx.out.note("there are tar shards: samples are members that agree up to the first dot (--sample-rule stem)");
            KeyRule::Stem
        }
        None => KeyRule::File,
    };
    let (parent, parent_optional) = match args.parent.as_deref() {
        None => (None, false),
        Some("auto") => (Some(Select::Tag(TagName::latest())), true),
        Some(other) => (Some(other.parse()?), false),
    };
    if args.threads == Some(0) {
        return Err(Failure::usage("--threads is at least 1"));
    }
    let state_dir = args.state_dir.map_or_else(state::default_dir, Ok)?;
    Ok(IndexOptions {
        uri,
        to,
        list,
        parent,
        parent_optional,
        tag: (!args.no_tag).then_some(args.tag),
        rule: SampleRule::new(key, args.samples),
        symlinks: args.symlinks,
        on_fault: match (args.keep_going, args.skip_failed) {
            (_, true) => OnFault::Skip,
            (true, _) => OnFault::Report,
            _ => OnFault::Stop,
        },
        threads: args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(2, usize::from)),
        state_dir: std::path::absolute(&state_dir).map_err(|e| Failure::io(state_dir.display(), &e))?,
        progress: ctx.global.progress,
    })
}

/// The first Ctrl-C (or SIGTERM) sets the flag, the second ends the process.
pub(super) fn stop_on_signal(ctx: &Ctx) -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let cannot = |e: std::io::Error| Failure::io("cannot watch for Ctrl-C", &e);
    let _runtime = ctx.rt.enter();
    let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
    let handle = ctx.rt.handle().clone();
    let watch = move || {
        handle.block_on(async {
            loop {
                let got = tokio::select! { got = interrupt.recv() => got, got = terminate.recv() => got };
                if got.is_none() {
                    return;
                }
                if flag.swap(true, Relaxed) {
                    std::process::exit(Exit::Interrupted as i32);
                }
                eprintln!("stopping; again to stop at once");
            }
        });
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).map_err(cannot)?;
    Ok(stop)
}
