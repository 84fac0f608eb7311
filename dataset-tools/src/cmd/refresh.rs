//! `fletch refresh`: indexes what is new or changed of a registered dataset, as it was indexed before.

use super::prepare::{Missing, Wanted, connect, earlier, note_left_out, prepare, registered, renewed_pins};
use super::{Context, absent, source};
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use fletch_core::TagName;
use fletch_core::manifest::LayoutKind;

pub fn run(ctx: &Context, text: &str, missing: Missing) -> Result<Exit, Failure> {
    let connected = connect(ctx)?;
    let datasets = ctx.rt.block_on(connected.client.datasets())?;
    let Some(dataset) = registered(ctx, text, &datasets)? else {
        let server = connected.server.servers().to_string();
        return Err(match source::name_of(text) {
            Some(name) => absent::unregistered(&name, &datasets, &server),
            None => Failure::new(format!("{text} was never mounted or registered at {server}"))
                .hint(format!("run `fletch mount {text} DIR`")),
        });
    };
    let (uri, tables) = (ctx.registered_uri(&dataset.uri)?, ctx.registered_uri(&dataset.tables)?);
    ctx.warn_of_another_folder(&uri);
    connected.give_credentials(ctx, &[&uri, &tables])?;
    let before = earlier(ctx, &tables);
    let before = before.ok_or_else(|| {
        Failure::new(format!("what was indexed of {} cannot be read from here", dataset.name))
            .hint(format!("run `fletch index {uri}` as the user that indexed it"))
    })?;
    let pack = before.params.kind == LayoutKind::Pack;
    let draft = before.params.kind == LayoutKind::Draft;
    let renewed = renewed_pins(ctx, &connected.client, &dataset);
    let earlier = Some(&before);
    let wanted =
        Wanted { uri: &uri, to: &tables, list: None, pack, earlier, missing, renewed, draft, learned: None };
    let report = prepare(ctx, &wanted)?;
    // The server learns of the new version, and forgets which objects differed from the old one.
    let latest = TagName::latest();
    if let Err(e) = ctx.rt.block_on(connected.client.resolve(&dataset.name, latest.as_str())) {
        ctx.out.warn(format_args!("the server cannot open the new version of {}: {e}", dataset.name));
    }
    ctx.out.result(&report, |w| {
        writeln!(
            w,
            "{}: {}, {}; read {}, {}; {:.1} s",
            dataset.name,
            count(report.entries, "file"),
            bytes(report.bytes),
            count(report.files_read, "file"),
            bytes(report.bytes_read),
            report.seconds
        )?;
        writeln!(w, "mounts that exist show what they showed: mount again to see the result")
    })?;
    Ok(note_left_out(ctx, &report))
}
