//! `fletch index` and `fletch pack`: from arguments to options, and from reports to output.

use super::prepare::{earlier, note_left_out};
use super::{Context, fail, source};
use crate::cli::{IndexArgs, PackArgs, RuleArg};
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::pack::{PackOptions, PackReport};
use crate::run::learned::LearnedPages;
use crate::run::options::{OnFault, ParentChoice, RunFailure, RunOptions, RunReport};
use crate::run::renewed::RenewedPins;
use crate::run::{RunContext, state};
use crate::source::name_list::NameList;
use crate::source::shard_dirs::shard_directories;
use crate::target::Select;
use crate::{index, pack};
use async_trait::async_trait;
use fletch_api::LearnedFiles;
use fletch_client::Client;
use fletch_core::manifest::pack::PackParams;
use fletch_core::manifest::{KeyRule, LayoutKind, LayoutParams, SampleRule};
use fletch_core::{Root, TagName};
use fletch_settings::ByteSize;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::signal::unix::{SignalKind, signal};

pub fn index(ctx: &Context, args: IndexArgs) -> Exit {
    let note = |report: &RunReport| {
        ctx.out.note(format_args!(
            "{}, {}; {}",
            count(report.files, "file"),
            bytes(report.file_bytes),
            reads(report)
        ));
    };
    let options = run_options(ctx, args).map(|mut options| {
        options.learned = learned(ctx, &options);
        options
    });
    run(ctx, options, index::run, |report| report, note)
}

/// Returns what a server learned of the dataset, if its latest version there is a draft. Whatever is in the
/// way of that costs reading only.
fn learned(ctx: &Context, options: &RunOptions) -> Option<Arc<dyn LearnedPages>> {
    if options.draft.is_some() || earlier(ctx, &options.to)?.params.kind != LayoutKind::Draft {
        return None;
    }
    let (uri, tables) = (ctx.at_server(&options.uri).ok()?, ctx.at_server(&options.to).ok()?);
    let client = ctx.client().ok()?;
    let datasets = ctx.rt.block_on(client.datasets()).ok()?;
    let dataset = datasets.into_iter().find(|d| d.uri == uri && d.tables == tables)?;
    let client = client.for_dataset(Some(&dataset.name));
    let resolved = ctx.rt.block_on(client.resolve(&dataset.name, TagName::latest().as_str())).ok()?;
    Some(Arc::new(DraftAtServer { client, root: resolved.root }))
}

/// A draft, and the server that knows what was read of it.
#[derive(Debug)]
struct DraftAtServer {
    client: Client,
    root: Root,
}

#[async_trait]
impl LearnedPages for DraftAtServer {
    async fn page(&self, after: u64) -> Result<LearnedFiles, Failure> {
        Ok(self.client.learned_files(self.root, after).await?)
    }
}

pub fn pack(ctx: &Context, args: PackArgs) -> Exit {
    let note = |report: &PackReport| {
        ctx.out.note(format_args!(
            "{}, {}; wrote {}, {}; found {}; {}",
            count(report.run.files, "file"),
            bytes(report.run.file_bytes),
            count(report.chunks_written, "chunk"),
            bytes(report.chunk_bytes_written),
            count(report.chunks_found, "chunk"),
            reads(&report.run)
        ));
        if let Some(kept) = &report.kept {
            ctx.out.note(format_args!(
                "of the parent: kept {}, {}; outside the canonical grouping: {} of {}",
                count(kept.chunks, "chunk"),
                bytes(kept.bytes),
                kept.samples_outside,
                count(kept.samples, "sample")
            ));
        }
    };
    run(ctx, pack_options(ctx, args), pack::run, |report| &report.run, note)
}

/// Runs a command and prints its report.
fn run<O, R: Serialize>(
    ctx: &Context,
    options: Result<O, Failure>,
    command: impl FnOnce(&O, RunContext<'_>) -> Result<R, RunFailure>,
    common: impl FnOnce(&R) -> &RunReport,
    note: impl FnOnce(&R),
) -> Exit {
    let done = options.and_then(|options| Ok((options, stop_on_signal(ctx)?))).map_err(RunFailure::from);
    let done = done.and_then(|(options, stop)| {
        let (origins, rt, out) = (ctx.origins(), ctx.rt.handle(), ctx.out);
        command(&options, RunContext { origins: &origins, rt, out, stop: &stop, counters: &Arc::default() })
    });
    let report = match done {
        Ok(report) => report,
        Err(e) => return fail(ctx.out, &e.failure, &e.faults),
    };
    note(&report);
    let common = common(&report);
    if let Err(e) = ctx.out.result(&report, |w| writeln!(w, "{}", common.root)) {
        return fail(ctx.out, &e, &[]);
    }
    note_left_out(ctx, common)
}

fn reads(report: &RunReport) -> String {
    format!(
        "read {}, {}; reused {}, {}; {:.1} s",
        count(report.files_read, "file"),
        bytes(report.bytes_read),
        count(report.files_reused, "file"),
        bytes(report.bytes_reused),
        report.seconds
    )
}

pub(super) fn run_options(ctx: &Context, args: IndexArgs) -> Result<RunOptions, Failure> {
    let source::Source { uri, tables } = source::find(ctx, &args.uri.text)?;
    let to = match args.tables.as_deref() {
        Some(to) => ctx.uri(to)?,
        None => tables.map_or_else(|| source::default_tables(ctx, &uri), Ok)?,
    };
    let list = match &args.list {
        Some(_) if uri.as_local().is_some() => {
            return Err(Failure::usage("--list is for stores and servers; a directory is walked")
                .hint("leave --list out, or give a directory that holds only the files of the dataset"));
        }
        Some(file) => Some(NameList::read(file, &uri)?),
        None if uri.is_plain_http() => {
            return Err(Failure::usage(format!("{uri} is a plain HTTP server, which has no listing"))
                .hint("give the names of its files with --list FILE, one on each line"));
        }
        None => None,
    };
    if to.is_plain_http() {
        return Err(Failure::usage(format!("tables cannot be written to {to}"))
            .hint("Fletch only reads from plain HTTP servers; name another location with --tables URI"));
    }
    let shard_dirs = match args.sample_rule {
        // The shards of a draft are files: nobody has read their members.
        _ if args.draft => BTreeSet::new(),
        Some(RuleArg::File) => BTreeSet::new(),
        _ => shard_directories(ctx.rt.handle(), &ctx.origins(), &uri, list.as_ref())?,
    };
    let key = match args.sample_rule {
        Some(RuleArg::File) => KeyRule::File,
        Some(RuleArg::Stem) => KeyRule::Stem,
        None if shard_dirs.is_empty() => KeyRule::File,
        None => {
            ctx.out.note(
                "the dataset has tar shards: members with the same name up to the first dot are one sample, \
                 and no file beside a shard is one (--sample-rule stem; --samples names other files)",
            );
            KeyRule::Stem
        }
    };
    ctx.claim(&[&uri, &to])?;
    // Times and inodes of another folder prove nothing.
    let is_other_folder = ctx.another_folder(&uri).is_some();
    ctx.warn_of_another_folder(&uri);
    let parent = match args.parent.as_deref() {
        _ if is_other_folder => None,
        None => None,
        Some("auto") => Some(ParentChoice { select: Select::Tag(TagName::latest()), optional: true }),
        Some(other) => Some(ParentChoice { select: other.parse()?, optional: false }),
    };
    if args.threads == Some(0) {
        return Err(Failure::usage("--threads is at least 1, not 0"));
    }
    let state_dir = args.state_dir.map_or_else(state::default_dir, Ok)?;
    let at_server = ctx.at_server(&uri)?;
    Ok(RunOptions {
        uri,
        to,
        list,
        parent,
        renewed: RenewedPins::default(),
        learned: None,
        seal: None,
        draft: if args.draft { Some(at_server) } else { None },
        tag: (!args.no_tag).then_some(args.tag),
        rule: SampleRule::new(key, args.samples),
        shard_dirs,
        allow_empty: args.allow_empty,
        symlinks: args.symlinks,
        one_file_system: args.one_file_system,
        on_fault: match (args.keep_going, args.skip_failed) {
            (_, true) => OnFault::Skip,
            (true, _) => OnFault::Report,
            _ => OnFault::Stop,
        },
        allow_loss: args.allow_loss,
        threads: args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(2, usize::from)),
        state_dir: std::path::absolute(&state_dir).map_err(|e| Failure::io(state_dir.display(), &e))?,
        progress: ctx.global.progress,
    })
}

pub(super) fn pack_options(ctx: &Context, args: PackArgs) -> Result<PackOptions, Failure> {
    let mut group = PackParams::DEFAULT;
    if let Some(ByteSize(size)) = args.chunk_size {
        group.group_bytes = u32::try_from(size).unwrap_or(u32::MAX);
    }
    let params = LayoutParams { pack: Some(group), ..LayoutParams::PACK };
    params.check().map_err(|why| {
        Failure::usage(format!("--chunk-size: {why}"))
            .hint("give a size from 512 B to 16 MiB, or leave it out")
    })?;
    Ok(PackOptions { run: run_options(ctx, args.index)?, params, compact: args.compact })
}

/// Returns a flag that the first Ctrl-C or SIGTERM sets. The second ends the process.
pub(super) fn stop_on_signal(ctx: &Context) -> Result<Arc<AtomicBool>, Failure> {
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
                eprintln!("stopping; press Ctrl-C again to stop at once");
            }
        });
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).map_err(cannot)?;
    Ok(stop)
}
