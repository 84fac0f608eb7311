//! `fletch seal`: makes a version of a draft, and reads what nobody has read of it.

use super::Context;
use super::prepare::{Missing, Prepared, Wanted, note_left_out, prepare, prepared};
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::run::learned::LearnedDraft;
use crate::run::renewed::RenewedPins;
use fletch_core::TagName;
use fletch_core::manifest::LayoutKind;

pub fn run(ctx: &Context, text: &str, missing: Missing) -> Result<Exit, Failure> {
    let Prepared { connected, dataset, uri, tables, latest: before } = prepared(ctx, text)?;
    let client = connected.client.for_dataset(Some(&dataset.name));
    let latest = TagName::latest();
    let resolved = ctx.rt.block_on(client.resolve(&dataset.name, latest.as_str()))?;
    let learned = match before.params.kind {
        LayoutKind::Draft => Some(LearnedDraft { client: client.clone(), root: resolved.root }),
        LayoutKind::Index | LayoutKind::Pack => {
            let name = &dataset.name;
            ctx.out.note(format_args!("{name} is no draft: every file of it is known by its hash"));
            return Ok(Exit::Ok);
        }
    };
    let wanted = Wanted {
        uri: &uri,
        to: &tables,
        list: None,
        pack: false,
        // The rule of a draft says nothing: nobody has read its shards.
        earlier: None,
        missing,
        renewed: RenewedPins::default(),
        draft: false,
        learned,
    };
    let report = prepare(ctx, &wanted)?;
    if let Err(e) = ctx.rt.block_on(client.resolve(&dataset.name, latest.as_str())) {
        ctx.out.warn(format_args!("the server cannot open the version of {}: {e}", dataset.name));
    }
    ctx.out.result(&report, |w| {
        writeln!(
            w,
            "{}: {}, {}; {} known, read {}, {}; {:.1} s",
            dataset.name,
            count(report.entries, "file"),
            bytes(report.bytes),
            bytes(report.bytes_reused),
            count(report.files_read, "file"),
            bytes(report.bytes_read),
            report.seconds
        )?;
        writeln!(w, "mounts that exist show the draft: mount again to see the version")
    })?;
    Ok(note_left_out(ctx, &report))
}
