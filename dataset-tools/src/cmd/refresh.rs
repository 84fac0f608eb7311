//! `fletch refresh`: indexes what is new or changed of a registered dataset, as it was indexed before.

use super::Context;
use super::prepare::{
    Missing, Registered, Wanted, latest, note_left_out, prepare, registered_dataset, renewed_pins,
};
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::run::options::RunReport;
use fletch_core::TagName;
use fletch_core::manifest::LayoutKind;

pub fn run(ctx: &Context, text: &str, missing: Missing) -> Result<Exit, Failure> {
    let registered = registered_dataset(ctx, text)?;
    let report = refresh(ctx, &registered, missing)?;
    ctx.out.result(&report, |w| {
        writeln!(
            w,
            "{}: {}, {}; read {}, {}; {:.1} s",
            registered.dataset.name,
            count(report.files, "file"),
            bytes(report.file_bytes),
            count(report.files_read, "file"),
            bytes(report.bytes_read),
            report.seconds
        )?;
        writeln!(w, "mounts that exist show what they showed: mount again to see the result")
    })?;
    Ok(note_left_out(ctx, &report))
}

/// Makes the next version of a registered dataset, and tells the server of it.
///
/// # Errors
/// As `fletch index`.
pub fn refresh(ctx: &Context, registered: &Registered, missing: Missing) -> Result<RunReport, Failure> {
    let before = latest(ctx, registered)?;
    let Registered { connected, dataset, uri, tables } = registered;
    let pack = before.params.kind == LayoutKind::Pack;
    let draft = before.params.kind == LayoutKind::Draft;
    let renewed = renewed_pins(ctx, &connected.client, dataset);
    let earlier = Some(&before);
    let wanted = Wanted { uri, to: tables, list: None, pack, earlier, missing, renewed, draft };
    let report = prepare(ctx, &wanted)?;
    // The server learns of the new version, and forgets which objects differed from the old one.
    let tag = TagName::latest();
    if let Err(e) = ctx.rt.block_on(connected.client.resolve(&dataset.name, tag.as_str())) {
        ctx.out.warn(format_args!("the server cannot open the new version of {}: {e}", dataset.name));
    }
    Ok(report)
}
