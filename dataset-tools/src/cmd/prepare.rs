//! What `mount` and `refresh` share: a server that answers, credentials that it has, and a version that is
//! up to date.

use super::{Context, absent, index, source};
use crate::cli::{IndexArgs, PackArgs};
use crate::environment;
use crate::failure::{Exit, Failure};
use crate::out::count;
use crate::own_server::{OwnPaths, ends_with_the_session, start};
use crate::run::RunContext;
use crate::run::loss::Share;
use crate::run::options::{RunFailure, RunOptions, RunReport};
use crate::run::renewed::RenewedPins;
use crate::source::walk::Symlinks;
use crate::tables_location::TablesLocation;
use crate::target::{DatasetArg, Select};
use fletch_api::Code;
use fletch_client::server_choice::ServerChoice;
use fletch_client::{Client, Endpoint};
use fletch_core::manifest::{KeyRule, LayoutKind, LayoutParams, SampleRule};
use fletch_core::{Root, TagName};
use fletch_origin::OriginUri;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most pages of renewed pins that are read from a server: a million objects.
const RENEWED_PAGES_MAX: usize = 1_000;

/// A server that answered.
pub struct Connected {
    /// Calls it.
    pub client: Client,
    /// Which one it is.
    pub server: ServerChoice,
    /// Where the own server keeps its files; `None` for another server.
    pub own: Option<OwnPaths>,
    /// Whether this command started it.
    pub started: bool,
}

/// The version that was indexed last.
pub struct Earlier {
    rule: SampleRule,
    /// How it is laid out.
    pub params: LayoutParams,
    /// When it was indexed last, in nanoseconds since 1970.
    pub at_ns: u64,
}

/// What is to be indexed or packed.
pub struct Wanted<'a> {
    /// The dataset.
    pub uri: &'a OriginUri,
    /// Where its tables go.
    pub to: &'a OriginUri,
    /// The file with the names of its objects.
    pub list: Option<PathBuf>,
    /// Whether small files are packed.
    pub pack: bool,
    /// The version to go on from.
    pub earlier: Option<&'a Earlier>,
    /// What may be missing.
    pub missing: Missing,
    /// The objects that a server read under new entity tags.
    pub renewed: RenewedPins,
    /// Whether the files are only listed.
    pub draft: bool,
}

/// What a version may lack, by the options of `mount` and `refresh`.
#[derive(Debug, Clone, Copy)]
pub struct Missing {
    /// Whether entries that cannot be read are left out.
    pub skip_failed: bool,
    /// The share of its entries that a version may lose.
    pub allow_loss: Option<Share>,
}

/// Finds the server, and starts the user's own if none runs.
///
/// # Errors
/// The server does not start or answer, or the own one is older than this program.
pub fn connect(ctx: &Context) -> Result<Connected, Failure> {
    let (server, started) = match ctx.chosen()? {
        Some(server) if !server.is_own() => (server, false),
        // Also if it seemed to run: the socket of one that was killed a moment ago still takes connections.
        Some(_) | None => {
            let paths = OwnPaths::of_process()?;
            let started = ctx.rt.block_on(start::ensure(&paths))?;
            let server = ServerChoice::Own(Endpoint::Unix(paths.socket.clone()).into());
            ctx.ask(server.clone());
            if started {
                ctx.out
                    .note(format_args!("started your server; its log is {}", paths.server_log().display()));
            }
            if let Some(user) = ends_with_the_session(&paths).filter(|_| started) {
                ctx.out.note(format_args!(
                    "your server and its mounts end when you log out; to keep them: loginctl enable-linger \
                     {user}, copy packaging/systemd/user/fletch-server.service to ~/.config/systemd/user, \
                     and systemctl --user enable --now fletch-server.service"
                ));
            }
            (server, started)
        }
    };
    let again = "run `fletch down`, then this command again";
    let client = ctx.client().map_err(|e| match e.exit {
        Exit::Failed if server.is_own() => e.hint(again),
        _ => e,
    })?;
    let own = if server.is_own() { Some(OwnPaths::of_process()?) } else { None };
    if own.is_some() {
        let theirs = ctx.rt.block_on(client.info())?.version;
        let ours = env!("CARGO_PKG_VERSION");
        if is_older(&theirs, ours) {
            return Err(Failure::new(format!(
                "your server is fletch-server {theirs}, and this is fletch {ours}"
            ))
            .hint(again));
        }
    }
    Ok(Connected { client, server, own, started })
}

/// Whether a version is older than another. Text that is no version is not.
fn is_older(theirs: &str, ours: &str) -> bool {
    let numbers = |text: &str| -> Option<Vec<u64>> {
        let plain = text.split(['-', '+']).next().unwrap_or(text);
        plain.split('.').map(|part| part.parse().ok()).collect()
    };
    matches!((numbers(theirs), numbers(ours)), (Some(a), Some(b)) if a < b)
}

impl Connected {
    /// Gives the own server the credentials of this terminal for the stores of a dataset.
    ///
    /// # Errors
    /// A file with credentials cannot be read, or the server refuses them.
    pub fn give_credentials(&self, ctx: &Context, uris: &[&OriginUri]) -> Result<(), Failure> {
        if self.own.is_some() {
            return give_credentials(ctx, &self.client, uris);
        }
        for origin in stores_of(uris).into_keys() {
            ctx.out.note(format_args!(
                "{} reads {origin} with its own credentials, at the store that its settings name; those of \
                 this terminal do not count there",
                self.server.servers()
            ));
        }
        Ok(())
    }
}

/// Returns the buckets, containers and servers of URIs, each with one URI there.
fn stores_of<'a>(uris: &[&'a OriginUri]) -> BTreeMap<String, &'a OriginUri> {
    let mut stores = BTreeMap::new();
    for uri in uris {
        if let Some(origin) = environment::origin_of(uri) {
            stores.entry(origin).or_insert(*uri);
        }
    }
    stores
}

/// Gives the own server the credentials of this terminal for the stores of these URIs.
///
/// # Errors
/// A file with credentials cannot be read, or the server refuses them.
pub fn give_credentials(ctx: &Context, client: &Client, uris: &[&OriginUri]) -> Result<(), Failure> {
    // A login of a profile needs it.
    let _runtime = ctx.rt.enter();
    for uri in stores_of(uris).into_values() {
        let Some(config) = ctx.origin_config(uri) else { continue };
        let Some(given) = environment::to_give(&config, uri, &environment::of_process)? else { continue };
        match ctx.rt.block_on(client.give_credentials(&given)) {
            // The settings of the server name this store: those count.
            Err(e) if e.code() == Some(Code::Conflict) => {}
            Err(e) => return Err(e.into()),
            Ok(_) => {}
        }
    }
    Ok(())
}

/// Returns the objects of a dataset that the server read under new entity tags, and found unchanged.
///
/// Without an answer, these objects are read again.
pub fn renewed_pins(ctx: &Context, client: &Client, dataset: &fletch_api::Dataset) -> RenewedPins {
    let (mut pins, mut after) = (RenewedPins::default(), None);
    for _ in 0..RENEWED_PAGES_MAX {
        match ctx.rt.block_on(client.renewed_pins(&dataset.name, after.as_deref())) {
            Ok(page) => {
                pins.extend(page.objects);
                // A page that does not go on is the last one.
                if page.next.is_none() || page.next <= after {
                    break;
                }
                after = page.next;
            }
            // A server of an older release has no such list.
            Err(e) if e.code() == Some(Code::NotFound) => break,
            Err(e) => {
                ctx.out.note(format_args!(
                    "objects with new entity tags are read again: the server's list of them failed: {e}"
                ));
                break;
            }
        }
    }
    pins
}

/// Reads the version that the tag `latest` names; `None` if there is none, or it cannot be read from here.
pub fn earlier(ctx: &Context, tables: &OriginUri) -> Option<Earlier> {
    let location = TablesLocation::open(&ctx.origins(), tables).ok()?;
    ctx.rt.block_on(async {
        let doc = location.tag(&TagName::latest()).await.ok()??;
        let version = location.version(doc.root, doc.layout).await.ok()?;
        let at_ns = fletch_tables::documents::unix_ns(&doc.created).unwrap_or(0);
        let rule = version.manifest().sample_rule.clone();
        Some(Earlier { rule, params: version.layout_doc().params, at_ns })
    })
}

/// Whether a version at a tables location is a draft. A version that cannot be read is none.
pub fn is_draft_at(ctx: &Context, tables: &OriginUri, root: Root) -> bool {
    let Ok(location) = TablesLocation::open(&ctx.origins(), tables) else { return false };
    let layouts = ctx.rt.block_on(location.layouts(root)).unwrap_or_default();
    layouts.iter().any(|layout| layout.params.kind == LayoutKind::Draft)
}

/// Indexes or packs a dataset, and moves its tag.
///
/// # Errors
/// As `fletch index`.
pub fn prepare(ctx: &Context, wanted: &Wanted<'_>) -> Result<RunReport, Failure> {
    let args = index_args(wanted, ctx.state_dir.clone());
    let as_before = |options: &mut RunOptions| {
        if let Some(earlier) = wanted.earlier {
            options.rule = earlier.rule.clone();
            if options.rule.key == KeyRule::File {
                options.shard_dirs = BTreeSet::new();
            }
        }
    };
    let (origins, stop) = (ctx.origins(), index::stop_on_signal(ctx)?);
    let (rt, counters) = (ctx.rt.handle(), Arc::default());
    let run = RunContext { origins: &origins, rt, out: ctx.out, stop: &stop, counters: &counters };
    let again = |run: RunFailure| {
        let mut failure = run.failure;
        if failure.exit == Exit::Interrupted {
            failure.hint = Some("give the same command again: it goes on where it stopped".to_owned());
        }
        failure
    };
    if wanted.pack {
        let mut options =
            index::pack_options(ctx, PackArgs { index: args, compact: false, chunk_size: None })?;
        as_before(&mut options.run);
        options.run.renewed = wanted.renewed.clone();
        if let Some(earlier) = wanted.earlier.filter(|earlier| earlier.params.kind == LayoutKind::Pack) {
            options.params = earlier.params;
        }
        return crate::pack::run(&options, run).map(|report| report.run).map_err(again);
    }
    let mut options = index::run_options(ctx, args)?;
    as_before(&mut options);
    options.renewed = wanted.renewed.clone();
    crate::index::run(&options, run).map_err(again)
}

/// Lists a dataset into its draft, without a tag.
///
/// # Errors
/// As `fletch index --draft`.
pub fn listed(ctx: &Context, wanted: &Wanted<'_>, state_dir: &Path) -> Result<RunReport, Failure> {
    let args = IndexArgs { no_tag: true, ..index_args(wanted, Some(state_dir.into())) };
    let options = index::run_options(ctx, args)?;
    let (origins, stop) = (ctx.origins(), index::stop_on_signal(ctx)?);
    let (rt, counters) = (ctx.rt.handle(), Arc::default());
    let run = RunContext { origins: &origins, rt, out: ctx.out, stop: &stop, counters: &counters };
    crate::index::run(&options, run).map_err(|run| run.failure)
}

/// Returns the options of `fletch index` that say the same.
fn index_args(wanted: &Wanted<'_>, state_dir: Option<PathBuf>) -> IndexArgs {
    IndexArgs {
        uri: DatasetArg { text: wanted.uri.to_string(), note: None },
        tables: Some(wanted.to.to_string()),
        list: wanted.list.clone(),
        draft: wanted.draft,
        // The version before a draft is no parent of it, and a draft is none of a version.
        parent: wanted.earlier.filter(|_| !wanted.draft).map(|_| "auto".to_owned()),
        tag: TagName::latest(),
        no_tag: false,
        samples: Vec::new(),
        sample_rule: None,
        symlinks: Symlinks::Keep,
        one_file_system: false,
        keep_going: false,
        skip_failed: wanted.missing.skip_failed,
        allow_loss: wanted.missing.allow_loss,
        allow_empty: false,
        threads: None,
        state_dir,
    }
}

/// Says how many entries were left out, and returns the exit code for it.
pub fn note_left_out(ctx: &Context, report: &RunReport) -> Exit {
    if report.skipped.is_empty() {
        return Exit::Ok;
    }
    ctx.out
        .warn(format_args!("left out, and listed in the manifest: {}", count(report.skipped.len(), "entry")));
    Exit::Partial
}

/// A dataset that was mounted or registered.
pub struct Registered {
    /// Its server, which has the credentials of this terminal if it is the user's own.
    pub connected: Connected,
    /// The registration.
    pub dataset: fletch_api::Dataset,
    /// Where the objects are.
    pub uri: OriginUri,
    /// Where the tables are.
    pub tables: OriginUri,
}

/// Finds the dataset that a text names: a name, or the place of its objects.
///
/// # Errors
/// No server answers, or the dataset was never registered there.
pub fn registered_dataset(ctx: &Context, text: &str) -> Result<Registered, Failure> {
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
    Ok(Registered { connected, dataset, uri, tables })
}

/// Returns the latest version of a registered dataset.
///
/// # Errors
/// Its tables cannot be read from here.
pub fn latest(ctx: &Context, registered: &Registered) -> Result<Earlier, Failure> {
    let Registered { dataset, uri, tables, .. } = registered;
    earlier(ctx, tables).ok_or_else(|| {
        Failure::new(format!("what was indexed of {} cannot be read from here", dataset.name))
            .hint(format!("run `fletch index {uri}` as the user that indexed it"))
    })
}

/// Returns the registered dataset that a text names: a name, or the place of its objects.
///
/// # Errors
/// The text is neither a registered name nor a path or URI.
pub fn registered(
    ctx: &Context,
    text: &str,
    datasets: &[fletch_api::Dataset],
) -> Result<Option<fletch_api::Dataset>, Failure> {
    if let Some(name) = source::name_of(text) {
        return Ok(datasets.iter().find(|d| d.name == name).cloned());
    }
    let uri = ctx.uri_at_server(text)?;
    Ok(datasets.iter().find(|d| d.uri == uri).cloned())
}

/// Returns the version of a mount on the command line.
#[must_use]
pub fn version_of(select: Option<&Select>) -> String {
    select.map_or_else(|| TagName::latest().to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (theirs, ours, older) in [
            ("0.9.0", "0.10.0", true),
            ("0.10.0", "0.10.0", false),
            ("0.10.1", "0.10.0", false),
            ("1.0.0-rc.1", "1.0.0", false),
            ("?", "1.0.0", false),
        ] {
            assert_eq!(is_older(theirs, ours), older, "{theirs} {ours}");
        }
    }
}
