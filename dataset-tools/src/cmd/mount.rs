//! `fletch mount`: from a source to files in a directory, with all that is missing on the way.

use super::cost::Cost;
use super::mount_point::{self, ShownMount};
use super::prepare::{self, Connected, Missing, Wanted, connect, earlier, note_left_out};
use super::{Context, absent, dry_run, seal, source};
use crate::cli::MountArgs;
use crate::default_tables::name_in;
use crate::environment;
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::own_server::records::{self, MadeMount};
use crate::own_server::{OwnPaths, program};
use crate::run::now_ns;
use crate::run::written;
use crate::source::name_list::NameList;
use crate::status::span;
use crate::target::Target;
use fletch_api::{Code, Dataset, RegisterDataset, RegisteredDataset};
use fletch_client::ClientError;
use fletch_core::DatasetName;
use fletch_core::manifest::LayoutKind;
use fletch_origin::OriginUri;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// What was mounted, and where everything lives.
#[derive(Serialize)]
struct Mounted<'a> {
    name: &'a DatasetName,
    dir: &'a Path,
    source: String,
    server: String,
    files: u64,
    bytes: u64,
    /// When the dataset was read last.
    as_of_ns: u64,
    /// Whether the files were only listed.
    draft: bool,
    /// Whether the directory showed it before.
    already: bool,
    started_server: bool,
    #[serde(flatten)]
    own: Option<OwnPlaces>,
}

/// The places of the own server.
#[derive(Serialize)]
struct OwnPlaces {
    cache: PathBuf,
    state: PathBuf,
    logs: [PathBuf; 2],
}

pub fn run(ctx: &Context, args: &MountArgs) -> Result<Exit, Failure> {
    let target = &args.source;
    check_source(ctx, args, target)?;
    if args.dry_run {
        return dry_run::run(ctx, args);
    }
    let mount = program("fletch-mount").ok_or_else(|| {
        Failure::new("there is no program fletch-mount beside fletch or on the PATH")
            .hint("install it beside fletch")
    })?;
    let shown = mount_point::check(&args.dir, args.allow_non_empty)?;
    let connected = connect(ctx)?;
    if let Some(shown) = &shown {
        refuse_another(ctx, args, &connected, shown)?;
    }
    let dataset = dataset(ctx, args, target, &connected)?;
    let dir = match &shown {
        Some(shown) => shown.dir.clone(),
        None => mount_point::create(ctx, &args.dir)?,
    };
    let (uri, tables) = (ctx.registered_uri(&dataset.uri)?, ctx.registered_uri(&dataset.tables)?);
    connected.give_credentials(ctx, &[&uri, &tables])?;
    if args.index && target.select.is_none() {
        seal::make_version(ctx, &connected, &dataset.name)?;
    }
    let version = prepare::version_of(target.select.as_ref());
    let resolved = match ctx.rt.block_on(connected.client.resolve(&dataset.name, &version)) {
        Ok(resolved) => resolved,
        Err(e) => {
            let (client, select) = (&connected.client, target.select());
            return Err(ctx.rt.block_on(absent::at_server(ctx, client, &dataset.name, &select, e)));
        }
    };
    if let Some(shown) = &shown
        && let Some(root) = shown.root().filter(|root| *root != resolved.root)
    {
        let dir = shown.dir.display();
        if prepare::is_draft_at(ctx, &tables, root) {
            ctx.out.note(format_args!(
                "{dir} shows a draft of {}, and there is a version now; to see that one: \
                 fusermount3 -u {dir}, then run this again",
                dataset.name
            ));
        } else {
            return Err(Failure::new(format!("{dir} shows an older version of {}", dataset.name))
                .hint(format!("unmount it first: fusermount3 -u {dir}; then run this again")));
        }
    }
    let latest = earlier(ctx, &tables);
    let draft = target.select.is_none()
        && latest.as_ref().is_some_and(|latest| latest.params.kind == LayoutKind::Draft);
    let as_of_ns = latest.map_or(resolved.created_ns, |latest| latest.at_ns);
    let own = connected.own.as_ref().map(|own| OwnPlaces {
        cache: own.cache.clone(),
        state: own.state.clone(),
        logs: [own.server_log(), own.mount_log()],
    });
    let source = uri.as_local().map_or_else(|| dataset.uri.clone(), |dir| dir.display().to_string());
    let mounted = Mounted {
        name: &dataset.name,
        dir: &dir,
        source,
        server: connected.server.servers().to_string(),
        files: resolved.files.unwrap_or(resolved.entries),
        bytes: resolved.bytes,
        as_of_ns,
        draft,
        already: shown.is_some(),
        started_server: connected.started,
        own,
    };
    if shown.is_some() {
        ctx.out.result(&mounted, |w| told(w, &mounted))?;
        return Ok(Exit::Ok);
    }
    let mut command = Command::new(mount);
    command.args(words(&format!("{}@{version}", dataset.name), &dir, &connected));
    if let Some(token) = &ctx.global.token {
        command.env("FLETCH_TOKEN", token);
    }
    let tls = ctx.global.tls();
    let files = [("--ca-file", tls.ca_file), ("--cert-file", tls.cert_file), ("--key-file", tls.key_file)];
    for (flag, file) in files.into_iter().filter_map(|(flag, file)| Some((flag, file?))) {
        command.arg(flag).arg(file);
    }
    // Also a mount of another server is one that `fletch down` ends.
    let places = OwnPaths::of_process();
    let made =
        MadeMount { dir: dir.clone(), dataset: dataset.name.to_string(), is_own: connected.own.is_some() };
    let remembered = match &places {
        // Below `/tmp` another user may have made the directory first.
        Ok(own) => own
            .create_dir()
            .map_err(|e| e.to_string())
            .and_then(|()| records::remember(own, &made).map_err(|e| e.to_string())),
        Err(e) => Err(e.to_string()),
    };
    if let Err(why) = remembered {
        let shown = dir.display();
        ctx.out.warn(format_args!("`fletch down` will not find a killed mount at {shown}: {why}"));
    }
    if args.foreground {
        ctx.out.result(&mounted, |w| told(w, &mounted))?;
        let failed = command.arg("--foreground").exec();
        return Err(Failure::io("cannot start fletch-mount", &failed));
    }
    let log = connected.own.as_ref().map(OwnPaths::mount_log);
    if let Err(e) = background(command, log.as_deref()) {
        if let Ok(own) = &places {
            records::forget(own, &dir);
        }
        return Err(e);
    }
    ctx.out.result(&mounted, |w| told(w, &mounted))?;
    Ok(Exit::Ok)
}

/// Checks what can be checked before a server is started for it.
fn check_source(ctx: &Context, args: &MountArgs, target: &Target) -> Result<(), Failure> {
    if source::name_of(&target.base).is_some() {
        return Ok(());
    }
    let uri = ctx.uri(&target.base)?;
    if uri.as_local().is_some_and(|dir| !dir.is_dir()) {
        return Err(Failure::new(format!("there is no directory {}", target.base))
            .hint("give an existing directory, s3://…, az://…, gs://…, https://… with --list, or a name"));
    }
    if uri.as_local().is_none() && ctx.origin_config(&uri).is_none() {
        return Err(Failure::usage(format!("this terminal has no credentials for {uri}"))
            .hint(environment::what_to_set(&uri)));
    }
    if matches!(args.pack, Some(None)) && uri.as_local().is_none() {
        let name = name_in(&uri);
        return Err(Failure::usage("--pack needs a place for the copies of a dataset in a store")
            .hint(format!("name one that you may write, such as --pack s3://your-bucket/{name}-packed")));
    }
    if uri.is_plain_http() && args.list.is_none() && !is_registered(ctx, &target.base) {
        return Err(Failure::usage(format!("{uri} is a plain HTTP server, which has no listing"))
            .hint("give the names of its files with --list FILE, one on each line"));
    }
    Ok(())
}

/// Whether a server that runs already knows a dataset.
fn is_registered(ctx: &Context, source: &str) -> bool {
    let datasets = ctx.client().and_then(|client| Ok(ctx.rt.block_on(client.datasets())?));
    let known = datasets.and_then(|datasets| prepare::registered(ctx, source, &datasets));
    matches!(known, Ok(Some(_)))
}

/// Refuses a directory that shows something else than what was asked for. Nothing was read yet.
fn refuse_another(
    ctx: &Context,
    args: &MountArgs,
    connected: &Connected,
    shown: &ShownMount,
) -> Result<(), Failure> {
    let datasets = ctx.rt.block_on(connected.client.datasets())?;
    let known = prepare::registered(ctx, &args.source.base, &datasets)?;
    let is_same = |known: &Dataset| {
        known.name.as_str() == shown.dataset && args.name.as_ref().is_none_or(|name| *name == known.name)
    };
    // A mount shows one version: to see another one, it is made anew.
    let is_plain = !args.refresh && args.pack.is_none() && args.source.select.is_none();
    if is_plain && known.as_ref().is_some_and(is_same) {
        return Ok(());
    }
    let dir = shown.dir.display();
    Err(Failure::new(format!("{dir} shows {} already", shown.dataset))
        .hint(format!("unmount it first: fusermount3 -u {dir}")))
}

/// Returns the dataset, indexed and registered, and brought up to date if that was asked for.
fn dataset(
    ctx: &Context,
    args: &MountArgs,
    target: &Target,
    connected: &Connected,
) -> Result<Dataset, Failure> {
    let datasets = ctx.rt.block_on(connected.client.datasets())?;
    let known = prepare::registered(ctx, &target.base, &datasets)?;
    if known.is_none()
        && let Some(name) = source::name_of(&target.base)
    {
        let server = connected.server.servers().to_string();
        return Err(absent::unregistered(&name, &datasets, &server)
            .hint(format!("there is no directory {name} here either; give a directory, a URI or a name")));
    }
    let uri = match &known {
        Some(known) => ctx.registered_uri(&known.uri)?,
        None => ctx.uri(&target.base)?,
    };
    let at_server = match &known {
        Some(known) => known.uri.clone(),
        None => ctx.uri_at_server(&target.base)?,
    };
    let names = || taken(args.name.as_ref(), &uri, &at_server, &datasets);
    let packed_at = match &args.pack {
        Some(Some(place)) => Some(ctx.uri(place)?),
        Some(None) | None => None,
    };
    let place = match (&packed_at, &known) {
        (Some(place), _) => place.clone(),
        (None, Some(known)) => ctx.registered_uri(&known.tables)?,
        (None, None) => match written_place(ctx, &uri) {
            Some(place) => place,
            None => source::default_tables(ctx, &uri)?,
        },
    };
    if connected.own.is_some() {
        ctx.claim(&[&uri, &place])?;
    }
    let before = earlier(ctx, &place);
    let is_other_folder = ctx.another_folder(&uri).is_some();
    ctx.warn_of_another_folder(&uri);
    let is_packed = before.as_ref().is_some_and(|b| b.params.kind == LayoutKind::Pack);
    let pack = args.pack.is_some() || is_packed;
    let is_draft = before.as_ref().is_some_and(|b| b.params.kind == LayoutKind::Draft);
    let is_new = before.is_none() || is_other_folder;
    let draft = !pack && (is_draft || (is_new && !args.index));
    if is_new || args.refresh || (pack && !is_packed) {
        if is_new || (pack && !is_packed) {
            let names = args.list.as_deref().map(|file| NameList::read(file, &uri)).transpose()?;
            if !draft {
                let cost = Cost::of(ctx, &uri, names.as_ref())?;
                cost.check_room(&place)?;
                ctx.out.note(cost.text(&place_for_people(connected, &place), pack));
            } else {
                // Nothing is counted before a listing, but a full disk is full for it, too.
                Cost::least().check_room(&place)?;
            }
        }
        // A version that the server alone can read is not indexed again from here.
        if known.is_none() || before.is_some() || packed_at.is_some() {
            let list = args.list.clone();
            let renewed = known.as_ref().map(|known| prepare::renewed_pins(ctx, &connected.client, known));
            // A draft is none of what a version goes on from, and a version none of what a draft does.
            let earlier = before.as_ref().filter(|_| is_draft == draft);
            let renewed = renewed.unwrap_or_default();
            // What cannot be an entry is listed, and stops nobody who only wants to look.
            let skip_failed = args.skip_failed || (draft && !args.index);
            let missing = Missing { skip_failed, allow_loss: args.allow_loss };
            let wanted = Wanted { uri: &uri, to: &place, list, pack, earlier, missing, renewed, draft };
            let report = prepare::prepare(ctx, &wanted)?;
            // The mount works, so that this is no failure of the command.
            note_left_out(ctx, &report);
        } else if args.refresh || is_other_folder {
            return Err(Failure::new(format!("what was indexed of {uri} cannot be read from here"))
                .hint("run `fletch index` where its tables can be written"));
        }
    }
    ctx.adopt_folder(&uri);
    let tables = ctx.at_server(&place)?;
    let is_same = |d: &Dataset| d.tables == tables && args.name.as_ref().is_none_or(|name| d.name == *name);
    if let Some(known) = known.filter(is_same) {
        return Ok(known);
    }
    let request = RegisterDataset {
        name: names()?,
        tables: (tables != at_server).then_some(tables),
        uri: at_server,
        replace: false,
        check: true,
    };
    connected.give_credentials(ctx, &[&uri, &place])?;
    register(ctx, connected, &request)
}

/// Returns where this account wrote what it indexed of a dataset, if it is there.
fn written_place(ctx: &Context, uri: &OriginUri) -> Option<OriginUri> {
    let places = ctx.written(uri);
    let place = ctx.remembered_uri(&written::best(&places)?.tables).ok()?;
    earlier(ctx, &place).map(|_| place)
}

/// Returns a place in the words of this command: the state directory for what lies below it.
fn place_for_people(connected: &Connected, place: &OriginUri) -> String {
    match (&connected.own, place.as_local()) {
        (Some(own), Some(dir)) if dir.starts_with(&own.state) => own.state.display().to_string(),
        _ => place.to_string(),
    }
}

/// Returns the name to register a dataset under: the given one, else one from its URI that is free. `text` is
/// the URI as the server knows it.
fn taken(
    given: Option<&DatasetName>,
    uri: &OriginUri,
    text: &str,
    datasets: &[Dataset],
) -> Result<DatasetName, Failure> {
    let of = |name: &str| datasets.iter().find(|d| d.name.as_str() == name).map(|d| d.uri.as_str());
    if let Some(name) = given {
        return match of(name.as_str()) {
            Some(other) if other != text => Err(Failure::usage(format!("{name} is the name of {other}"))
                .hint("give another --name, or leave it out")),
            _ => Ok(name.clone()),
        };
    }
    let word = name_in(uri);
    let free = |name: &String| of(name).is_none_or(|other| other == text);
    let names = std::iter::once(word.clone()).chain((2..1000).map(|n| format!("{word}-{n}")));
    let name = names.into_iter().find(free).unwrap_or(word);
    DatasetName::new(&name).map_err(|e| Failure::usage(e.to_string()).hint("give one with --name"))
}

fn register(ctx: &Context, connected: &Connected, request: &RegisterDataset) -> Result<Dataset, Failure> {
    let registered: Result<RegisteredDataset, ClientError> =
        ctx.rt.block_on(connected.client.register(request));
    registered.map(|registered| registered.dataset).map_err(|e| {
        let refused = e.code() == Some(Code::UriNotAllowed);
        let failure = Failure::from(e);
        if refused && !connected.server.is_own() {
            return failure.hint("ask who runs that server for an [[origin]] of it, or unset FLETCH_SERVER");
        }
        failure
    })
}

/// Returns the words of `fletch-mount`.
fn words(version: &str, dir: &Path, connected: &Connected) -> Vec<OsString> {
    let server = connected.server.servers().to_string();
    let mut words: Vec<OsString> = vec![version.into(), dir.into(), "--server".into(), server.into()];
    if let Some(own) = &connected.own {
        words.extend(["--state-dir".into(), own.state.join("mount").into()]);
        // Without the path of this program, `fletch up` is left to the user.
        if let Ok(fletch) = std::env::current_exe() {
            words.extend(["--restart-with".into(), fletch.into()]);
        }
    }
    words
}

/// Starts the mount in the background, and waits until it is usable.
fn background(mut command: Command, log: Option<&Path>) -> Result<(), Failure> {
    command.arg("--daemon");
    if let Some(log) = log {
        command.arg("--log-file").arg(log);
    }
    let done = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).output();
    let done = done.map_err(|e| Failure::io("cannot start fletch-mount", &e))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let said = said.trim();
    let said = said.strip_prefix("error: ").unwrap_or(said);
    let exit = match done.status.code() {
        Some(2) => Exit::Usage,
        Some(4) => Exit::Unreachable,
        Some(5) => Exit::Denied,
        _ => Exit::Failed,
    };
    Err(Failure::new(format!("the mount failed: {said}")).exit(exit))
}

/// Says what was mounted, where everything lives, and how to stop it.
fn told(w: &mut dyn Write, mounted: &Mounted<'_>) -> io::Result<()> {
    let age = span(Duration::from_nanos(now_ns().saturating_sub(mounted.as_of_ns)));
    let (name, dir) = (mounted.name, mounted.dir.display());
    let already = if mounted.already { " already" } else { "" };
    writeln!(
        w,
        "{name} is at {dir}{already}: {}, {}, as it was {age} ago",
        count(mounted.files, "file"),
        bytes(mounted.bytes)
    )?;
    writeln!(w, "  source   {}", mounted.source)?;
    match &mounted.own {
        None => writeln!(w, "  server   {}", mounted.server)?,
        Some(own) => {
            writeln!(w, "  server   {} (yours; it ends 10 minutes after its last mount)", mounted.server)?;
            writeln!(w, "  cache    {}", own.cache.display())?;
            writeln!(w, "  state    {}", own.state.display())?;
            let [server, mount] = &own.logs;
            writeln!(w, "  logs     {}, {}", server.display(), mount.display())?;
        }
    }
    if mounted.draft {
        writeln!(w, "draft:  files are read when programs read them; to read the rest: fletch seal {name}")?;
    }
    writeln!(w, "update: fletch refresh {name}, then mount again")?;
    let all = if mounted.own.is_some() { "; or all of yours: fletch down" } else { "" };
    writeln!(w, "stop:   fusermount3 -u {dir}{all}")
}
