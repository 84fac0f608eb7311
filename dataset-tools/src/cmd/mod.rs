//! The commands of `fletch`. Each calls the code that does the work, and prints the result.

mod absent;
mod cluster;
mod cluster_check;
mod cost;
mod diff;
pub mod doctor;
mod down;
mod dry_run;
mod erase;
mod gc;
mod index;
mod jobs;
mod list;
mod mount;
mod mount_point;
mod prepare;
mod receipt;
mod refresh;
mod s3;
mod seal;
mod server;
mod simulate;
mod source;
mod status;
mod stores;
mod tag;
mod up;
mod verify;
mod warmup;

use crate::cli::{Cli, Command, Global, help};
use crate::failure::{Exit, Failure};
use crate::out::{Notes, Out, stdout_failed};
use crate::own_server::OwnPaths;
use crate::run::written::{self, WrittenTables};
use crate::tables_location::{TablesLocation, in_the_way};
use crate::target::{Select, Target};
use fletch_client::fallback::RememberedVersion;
use fletch_client::server_choice::{ServerChoice, choose};
use fletch_client::{Client, ClientConfig, Servers, TokenSource};
use fletch_core::{DatasetName, LayoutId, Root};
use fletch_origin::{OriginConfig, OriginLimits, OriginUri, Origins};
use fletch_tables::{Fault, PartCache, Version};
use parking_lot::Mutex;
use prepare::Missing;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::Runtime;

/// The longest time of one call to an origin, with all its attempts.
const IO_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time to find out whether the server answers.
const REACH_TIMEOUT: Duration = Duration::from_secs(3);
/// The part cache of a version from a server, in bytes.
const PART_CACHE_BYTES: u64 = 32 << 20;

/// The settings in the `--config` file.
#[derive(Debug, Default, Deserialize)]
struct Settings {
    #[serde(default)]
    origin: Vec<OriginConfig>,
}

/// The state that every command uses.
struct Context {
    rt: Runtime,
    /// The state directory of the command; `None` if there is no home directory.
    state_dir: Option<PathBuf>,
    /// The buckets and folders of which a note said that they are others than before.
    noted: Mutex<BTreeSet<OriginUri>>,
    /// The origins that can be opened so far.
    reach: Mutex<Reach>,
    out: Out,
    global: Global,
    /// The server that is asked, or why none can be chosen.
    chosen: Mutex<Result<Option<ServerChoice>, Failure>>,
}

/// The origins that can be opened: those of the settings, and those that the environment's credentials reach.
struct Reach {
    configs: Vec<OriginConfig>,
    origins: Origins,
}

/// A version that a command reads, and where it comes from.
struct OpenVersion {
    version: Version,
    /// The URI or name that was given.
    base: String,
    /// The location of its tables; `None` if the tables come from the server.
    location: Option<TablesLocation>,
}

#[derive(Serialize)]
struct ErrorDoc<'a> {
    error: ErrorBody<'a>,
    #[serde(skip_serializing_if = "<[Fault]>::is_empty")]
    faults: &'a [Fault],
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    code: &'static str,
    message: &'a str,
    hint: Option<&'a str>,
}

/// Prints a failure.
fn fail(out: Out, failure: &Failure, faults: &[Fault]) -> Exit {
    eprintln!("error: {failure}");
    if out.json {
        let error =
            ErrorBody { code: failure.exit.as_str(), message: &failure.what, hint: failure.hint.as_deref() };
        // A failure to print the failure cannot be reported.
        let _unreported = out.result(&ErrorDoc { error, faults }, |_| Ok(()));
    }
    failure.exit
}

/// Runs a command and returns its exit code.
#[must_use]
pub fn run(cli: Cli) -> Exit {
    let out = Out { json: cli.global.json, quiet: cli.global.quiet, notes: Notes::Stderr };
    if let Command::Completions { shell } = cli.command {
        clap_complete::generate(shell, &mut help::command(), "fletch", &mut std::io::stdout());
        return Exit::Ok;
    }
    let state_dir = match &cli.command {
        Command::Index(args) => args.state_dir.clone(),
        Command::Pack(args) => args.index.state_dir.clone(),
        _ => None,
    };
    let ctx = match Context::new(cli.global, out, state_dir.or_else(state_dir_of_process)) {
        Ok(ctx) => ctx,
        Err(e) => return fail(out, &e, &[]),
    };
    for note in cli.command.notes() {
        out.note(note);
    }
    let done = match cli.command {
        Command::Index(args) => return index::index(&ctx, args),
        Command::Pack(args) => return index::pack(&ctx, args),
        Command::Verify { target, threads, one_file_system, tables } => {
            verify::run(&ctx, &target.at(tables), threads, one_file_system)
        }
        Command::Ls { target, path, long, tables } => {
            list::ls(&ctx, &target.at(tables), &path, long).map(|()| Exit::Ok)
        }
        Command::Show { target, path, tables } => {
            list::show(&ctx, &target.at(tables), path.as_deref()).map(|()| Exit::Ok)
        }
        Command::Diff { a, b } => diff::run(&ctx, &a, &b).map(|()| Exit::Ok),
        Command::Tag { uri, tag, to, delete } => {
            tag::run(&ctx, &uri.text, tag, to, delete).map(|()| Exit::Ok)
        }
        Command::Erase { source, path, yes } => erase::run(&ctx, &source.text, &path, yes),
        Command::Gc { uri, older_than, yes } => gc::run(&ctx, &uri.text, older_than.0, yes),
        Command::Register { name, uri, tables, replace } => {
            server::register(&ctx, name, &uri.text, tables, replace).map(|()| Exit::Ok)
        }
        Command::Mount(args) => mount::run(&ctx, &args),
        Command::Seal { source } => seal::run(&ctx, &source.text),
        Command::Refresh { source, skip_failed, allow_loss } => {
            refresh::run(&ctx, &source.text, Missing { skip_failed, allow_loss })
        }
        Command::Up => up::run(&ctx),
        Command::Down => down::run(&ctx),
        Command::Jobs { what } => jobs::run(&ctx, what),
        Command::Cluster { what } => cluster::run(&ctx, what),
        Command::S3 { what } => s3::run(&ctx, what).map(|()| Exit::Ok),
        Command::Warmup(args) => warmup::run(&ctx, &args),
        Command::Evict { name } => warmup::evict(&ctx, &name).map(|()| Exit::Ok),
        Command::Unregister { name } => server::unregister(&ctx, &name),
        Command::Datasets => server::datasets(&ctx).map(|()| Exit::Ok),
        Command::Status => status::status(&ctx).map(|()| Exit::Ok),
        Command::Top { once, interval } => status::top(&ctx, once, interval),
        Command::Doctor(args) => doctor::run(&ctx, &args),
        Command::Receipt { what } => receipt::run(&ctx, what),
        Command::Simulate(args) => simulate::run(&ctx, &args).map(|()| Exit::Ok),
        Command::Completions { .. } => Ok(Exit::Ok),
    };
    done.unwrap_or_else(|e| fail(out, &e, &[]))
}

impl Context {
    fn new(global: Global, out: Out, state_dir: Option<PathBuf>) -> Result<Self, Failure> {
        let settings: Settings = match &global.config {
            Some(path) => fletch_settings::load(path, fletch_origin::KEYS)
                .map_err(|e| Failure::new(e.to_string()).exit(Exit::Usage))?,
            None => Settings::default(),
        };
        let rt = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|e| Failure::io("cannot start the runtime", &e))?;
        let origins = opened(&settings.origin)?;
        let reach = Mutex::new(Reach { configs: settings.origin, origins });
        let chosen = Mutex::new(chosen(&rt, global.server.as_deref()));
        Ok(Context { rt, state_dir, noted: Mutex::default(), reach, out, global, chosen })
    }

    /// Returns the origins that can be opened: those of the settings, and those of URIs that were parsed.
    fn origins(&self) -> Origins {
        self.reach.lock().origins.clone()
    }

    /// Returns how an origin is reached; `None` for a directory.
    fn origin_config(&self, uri: &OriginUri) -> Option<OriginConfig> {
        let reach = self.reach.lock();
        let holds = |config: &&OriginConfig| {
            OriginUri::parse(&config.prefix).is_ok_and(|prefix| prefix.contains(uri))
        };
        let longest = reach.configs.iter().filter(holds).max_by_key(|config| config.prefix.len());
        longest.filter(|_| uri.as_local().is_none()).cloned()
    }

    fn location(&self, text: &str) -> Result<TablesLocation, Failure> {
        let uri = self.uri(text)?;
        TablesLocation::open(&self.origins(), &uri)
    }

    /// As [`Context::location`], for a place that was remembered.
    fn remembered_location(&self, text: &str) -> Result<TablesLocation, Failure> {
        let uri = self.remembered_uri(text)?;
        TablesLocation::open(&self.origins(), &uri)
    }

    /// Returns the server that is asked, if there is one.
    fn chosen(&self) -> Result<Option<ServerChoice>, Failure> {
        self.chosen.lock().clone()
    }

    /// Asks this server from now on.
    fn ask(&self, server: ServerChoice) {
        *self.chosen.lock() = Ok(Some(server));
    }

    fn servers(&self) -> Result<Servers, Failure> {
        let chosen = self.chosen()?.ok_or_else(|| {
            Failure::usage("no server was given, and none runs on this machine").hint(
                "give --server http(s)://HOST:PORT or unix:PATH, or set FLETCH_SERVER; `fletch mount` starts \
                 one of yours",
            )
        })?;
        Ok(chosen.servers().clone())
    }

    fn client(&self) -> Result<Client, Failure> {
        self.reached().map(|(client, _)| client)
    }

    /// As [`Context::client`], with the address of the server that answered.
    fn reached(&self) -> Result<(Client, String), Failure> {
        let servers = self.servers()?;
        let token = TokenSource::of(self.global.token.clone(), self.global.token_file.clone())
            .map_err(|e| Failure::usage(e.to_string()))?;
        let tls = self.global.tls();
        let config = ClientConfig { token, tls, ..ClientConfig::of(servers, "cli") };
        let client = Client::new(config)?;
        // A server that is away or speaks another API version must be reported within seconds.
        let (address, _) = self.rt.block_on(client.within(REACH_TIMEOUT).info_at())?;
        Ok((client, address))
    }

    /// Returns the registered name of a target: one without a slash, if a server is asked. An existing path
    /// of that name comes first, and a note says so if a server was named.
    fn name(&self, target: &Target) -> Option<DatasetName> {
        let chosen = self.chosen().ok()??;
        let name = DatasetName::new(&target.base).ok()?;
        if !Path::new(&target.base).exists() {
            return Some(name);
        }
        if chosen.is_named() {
            self.out.note(format_args!(
                "{name} is the path of that name here, and not the dataset {name} of the server"
            ));
        }
        None
    }

    /// Opens the version that a target names.
    fn open(&self, target: &Target) -> Result<OpenVersion, Failure> {
        let Some(name) = self.name(target) else { return self.rt.block_on(self.open_at_location(target)) };
        match self.client() {
            Ok(client) => self.rt.block_on(self.open_served(name, &target.select(), client)),
            Err(e) if e.exit == Exit::Unreachable && self.global.origin_fallback => {
                self.rt.block_on(self.open_known(name, &target.select(), e))
            }
            Err(e) if e.exit == Exit::Unreachable && self.is_known(&name, target) => {
                Err(e.hint("--origin-fallback reads the last known version of this name from the origin"))
            }
            Err(e) => Err(e),
        }
    }

    async fn open_served(
        &self,
        name: DatasetName,
        select: &Select,
        client: Client,
    ) -> Result<OpenVersion, Failure> {
        let resolved = match client.resolve(&name, &select.to_string()).await {
            Ok(resolved) => resolved,
            Err(e) => return Err(absent::at_server(self, &client, &name, select, e).await),
        };
        if self.global.origin_fallback {
            let dataset = client.dataset(&name).await?;
            let known = RememberedVersion {
                server: client.servers().to_string(),
                dataset: name.clone(),
                version: select.to_string(),
                root: resolved.root,
                layout: resolved.layout,
                uri: dataset.uri,
                tables: dataset.tables,
            };
            if let Err(e) = known_dir().and_then(|dir| Ok(known.save(&dir, client.servers())?)) {
                self.out
                    .warn(format!("--origin-fallback cannot use this version when the server is gone: {e}"));
            }
        }
        let source = client.for_dataset(Some(&name)).tables(resolved.root, resolved.layout);
        let cache = PartCache::new(PART_CACHE_BYTES);
        let version = Version::open(source, resolved.root, resolved.layout, cache).await?;
        Ok(OpenVersion { version, base: name.to_string(), location: None })
    }

    /// Opens the version that the server named last, from the location of its tables, because the server is
    /// gone.
    async fn open_known(
        &self,
        name: DatasetName,
        select: &Select,
        gone: Failure,
    ) -> Result<OpenVersion, Failure> {
        let server = self.servers()?;
        let known = RememberedVersion::load(&known_dir()?, &server, &name, &select.to_string());
        let known = known.map_err(|e| Failure { what: format!("{}; {e}", gone.what), ..gone })?;
        self.out
            .warn(format!("{server} does not answer; this is version {}, which it named last", known.root));
        let location = TablesLocation::open(&self.origins(), &self.registered_uri(&known.tables)?)?;
        let version = location.version(known.root, known.layout).await?;
        Ok(OpenVersion { version, base: name.to_string(), location: Some(location) })
    }

    /// Returns whether this account knows a version that a server named last.
    fn is_known(&self, name: &DatasetName, target: &Target) -> bool {
        let version = target.select().to_string();
        let known = self
            .servers()
            .and_then(|server| Ok(RememberedVersion::load(&known_dir()?, &server, name, &version)?));
        known.is_ok()
    }

    /// Returns where this account wrote the tables of a dataset.
    fn written(&self, uri: &OriginUri) -> Vec<WrittenTables> {
        self.state_dir.as_deref().map(|dir| written::places(dir, uri)).unwrap_or_default()
    }

    /// Returns the failure of a version that is not at a location.
    async fn unresolved(&self, target: &Target, location: &TablesLocation, error: Failure) -> Failure {
        let source = &target.base;
        let is_gone = location.origin().local_dir().is_some_and(|dir| !dir.exists());
        if is_gone && matches!(self.chosen(), Ok(None)) && DatasetName::new(source).is_ok() {
            return Failure::new(format!("there is no directory {source}"))
                .hint("for a registered name give --server URL, or set FLETCH_SERVER");
        }
        if is_gone {
            return Failure::new(format!("there is no directory {source}"))
                .hint("give an existing directory, or a URI");
        }
        // Of a named root only its own message helps.
        if matches!(target.select(), Select::Root(_)) || error.exit != Exit::Failed {
            return error;
        }
        let in_the_way = location.origin().local_dir().and_then(in_the_way);
        if in_the_way.is_some() || !location.has_no_tags().await {
            return error;
        }
        let places = self.written(location.origin().uri());
        let tables = (!places.is_empty()).then(|| location.uri());
        absent::not_indexed(source, tables.as_deref(), &places, None)
    }

    async fn open_at_location(&self, target: &Target) -> Result<OpenVersion, Failure> {
        let select = target.select();
        let mut location = self.location(&target.base)?;
        let (root, layout) = match location.resolve(&select).await {
            Ok(found) => found,
            // This account may have written the tables elsewhere.
            Err(e) => match self.resolve_written(&location, &select).await {
                Some((place, found)) => {
                    location = place;
                    found?
                }
                None => return Err(self.unresolved(target, &location, e).await),
            },
        };
        let version = location.version(root, layout).await?;
        Ok(OpenVersion { version, base: location.uri(), location: Some(location) })
    }
}

impl Context {
    /// Finds a version where this account wrote the tables of a dataset, if no tables are at the dataset.
    async fn resolve_written(
        &self,
        dataset: &TablesLocation,
        select: &Select,
    ) -> Option<(TablesLocation, Result<(Root, LayoutId), Failure>)> {
        if !dataset.has_no_tags().await {
            return None;
        }
        let places = self.written(dataset.origin().uri());
        let place = written::best(&places)?;
        let location = self.remembered_location(&place.tables).ok()?;
        if location.has_no_tags().await {
            return None;
        }
        self.warn_of_another_folder(dataset.origin().uri());
        let found = location.resolve(select).await;
        Some((location, found))
    }
}

/// Chooses the server that is asked.
fn chosen(rt: &Runtime, named: Option<&str>) -> Result<Option<ServerChoice>, Failure> {
    match (OwnPaths::of_process(), named) {
        (Ok(own), _) => Ok(rt.block_on(choose(named, &own.socket, own.uid))?),
        // A named server needs no home directory.
        (Err(_), Some(named)) => {
            let at = named.parse().map_err(|e: fletch_client::BadEndpoint| Failure::usage(e.to_string()))?;
            Ok(Some(ServerChoice::Named(at)))
        }
        (Err(_), None) => Ok(None),
    }
}

fn opened(configs: &[OriginConfig]) -> Result<Origins, Failure> {
    let limits = OriginLimits { io_timeout: IO_TIMEOUT, ..OriginLimits::default() };
    Ok(Origins::new(configs.to_vec(), limits)?)
}

/// Returns the state directory of commands without `--state-dir`.
fn state_dir_of_process() -> Option<PathBuf> {
    let given = std::env::var_os("FLETCH_STATE_DIR").map(PathBuf::from);
    given.or_else(|| fletch_settings::state_dir(nix::unistd::geteuid().is_root()))
}

/// Returns the directory of the versions that a server named last. This command and mounts share it.
fn known_dir() -> Result<PathBuf, Failure> {
    let dir = state_dir_of_process().map(|d| d.join("known"));
    dir.ok_or_else(|| Failure::usage("neither HOME nor XDG_STATE_HOME is set"))
}

/// Streams a result to stdout, which is locked and buffered.
fn streamed(write: impl FnOnce(&mut dyn std::io::Write) -> std::io::Result<()>) -> Result<(), Failure> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    write(&mut out).and_then(|()| std::io::Write::flush(&mut out)).map_err(|e| stdout_failed(&e))
}
