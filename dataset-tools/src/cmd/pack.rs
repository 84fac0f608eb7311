//! `fletch pack`.

use super::index::{options as index_options, stop_on_signal};
use super::{Ctx, fail};
use crate::cli::PackArgs;
use crate::failure::{Exit, Failure};
use crate::index::{IndexFailure, IndexOptions};
use crate::out::bytes;
use crate::pack::{self, PackOptions};
use fletch_core::manifest::LayoutParams;
use fletch_core::manifest::pack::PackParams;
use fletch_settings::ByteSize;

pub fn run(ctx: &Ctx, args: PackArgs) -> Exit {
    match options(ctx, args).map_err(IndexFailure::from).and_then(|options| {
        let stop = stop_on_signal(ctx)?;
        pack::run(&options, &ctx.origins, ctx.rt.handle(), ctx.out, &stop)
    }) {
        Ok(report) => {
            ctx.out.note(format_args!(
                "{} entries, {}; wrote {} chunks, {}; found {} chunks; read {} files, {}; reused {} files, {}; {:.1} s",
                report.entries,
                bytes(report.bytes),
                report.chunks_written,
                bytes(report.chunk_bytes_written),
                report.chunks_found,
                report.files_read,
                bytes(report.bytes_read),
                report.files_reused,
                bytes(report.bytes_reused),
                report.seconds
            ));
            if let Some(kept) = &report.kept {
                ctx.out.note(format_args!(
                    "of the parent: kept {} chunks, {}; {} of {} samples lie outside the canonical grouping",
                    kept.chunks,
                    bytes(kept.bytes),
                    kept.samples_outside,
                    kept.samples
                ));
            }
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

fn options(ctx: &Ctx, args: PackArgs) -> Result<PackOptions, Failure> {
    let group = match args.chunk_size {
        None => PackParams::DEFAULT,
        Some(ByteSize(size)) => {
            let group_bytes = u32::try_from(size).unwrap_or(u32::MAX);
            PackParams { group_bytes, ..PackParams::DEFAULT }
        }
    };
    let params = LayoutParams { pack: Some(group), ..LayoutParams::PACK };
    params.check().map_err(|why| {
        Failure::usage(format!("--chunk-size: {why}"))
            .hint("give a size from 512 B to 16 MiB, or leave it out")
    })?;
    let IndexOptions {
        uri,
        to,
        list,
        parent,
        parent_optional,
        tag,
        rule,
        symlinks,
        on_fault,
        threads,
        state_dir,
        progress,
    } = index_options(ctx, args.index)?;
    Ok(PackOptions {
        uri,
        to,
        list,
        parent,
        parent_optional,
        compact: args.compact,
        tag,
        rule,
        params,
        symlinks,
        on_fault,
        threads,
        state_dir,
        progress,
    })
}
