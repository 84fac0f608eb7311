//! The commands of `fletch`. Each calls the code that does the work, and prints the result.

mod absent;
mod diff;
pub mod doctor;
mod index;
mod jobs;
mod list;
mod receipt;
mod server;
mod simulate;
mod source;
mod status;
mod tag;
mod verify;
mod warmup;

use crate::cli::{Cli, Command, Global, help};
use crate::failure::{Exit, Failure};
use crate::out::{Out, stdout_failed};
use crate::run::written::{self, WrittenTables};
use crate::tables_location::{TablesLocation, in_the_way};
use crate::target::{Select, Target};
use fletch_client::fallback::{RememberedVersion, RememberedVersionError};
use fletch_client::{Client, ClientConfig, ClientError, Endpoint, TokenSource};
use fletch_core::DatasetName;
use fletch_origin::{OriginConfig, OriginLimits, OriginUri, Origins};
use fletch_tables::{Fault, PartCache, Version};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
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
    origins: Origins,
    out: Out,
    global: Global,
}

/// A version that a command reads, and where it comes from.
struct OpenVersion {
    version: Version,
    /// The URI or name that was given.
    base: String,
    /// The location of its tables; `None` if the tables come from the server.
    location: Option<TablesLocation>,
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        let exit = if e.is_denied() {
            Exit::Denied
        } else if matches!(e, ClientError::LeaseExpired { .. }) {
            // The server answers, and the worker was too slow.
            Exit::Failed
        } else if e.is_unreachable() || e.kind().retryable() {
            Exit::Unreachable
        } else {
            Exit::Failed
        };
        let (what, hint) = e.parts();
        Failure { exit, hint: hint.map(str::to_owned), what }
    }
}

impl From<RememberedVersionError> for Failure {
    fn from(e: RememberedVersionError) -> Self {
        Failure::new(e.to_string())
    }
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
    let out = Out { json: cli.global.json, quiet: cli.global.quiet };
    if let Command::Completions { shell } = cli.command {
        clap_complete::generate(shell, &mut help::command(), "fletch", &mut std::io::stdout());
        return Exit::Ok;
    }
    let ctx = match Context::new(cli.global, out) {
        Ok(ctx) => ctx,
        Err(e) => return fail(out, &e, &[]),
    };
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
        Command::Tag { uri, tag, to, delete } => tag::run(&ctx, &uri, tag, to, delete).map(|()| Exit::Ok),
        Command::Register { name, uri, tables, replace } => {
            server::register(&ctx, name, &uri, tables, replace).map(|()| Exit::Ok)
        }
        Command::Jobs { what } => jobs::run(&ctx, what),
        Command::Warmup(args) => warmup::run(&ctx, &args),
        Command::Evict { name } => warmup::evict(&ctx, &name).map(|()| Exit::Ok),
        Command::Unregister { name } => server::unregister(&ctx, &name).map(|()| Exit::Ok),
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
    fn new(global: Global, out: Out) -> Result<Self, Failure> {
        let settings: Settings = match &global.config {
            Some(path) => fletch_settings::load(path, fletch_origin::KEYS)
                .map_err(|e| Failure::new(e.to_string()).exit(Exit::Usage))?,
            None => Settings::default(),
        };
        let rt = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|e| Failure::io("cannot start the runtime", &e))?;
        let limits = OriginLimits { io_timeout: IO_TIMEOUT, ..OriginLimits::default() };
        let origins = Origins::new(settings.origin, limits)?;
        Ok(Context { rt, origins, out, global })
    }

    fn uri(&self, text: &str) -> Result<OriginUri, Failure> {
        OriginUri::from_arg(text).map_err(|e| Failure::usage(e.to_string()))
    }

    fn location(&self, text: &str) -> Result<TablesLocation, Failure> {
        TablesLocation::open(&self.origins, &self.uri(text)?)
    }

    fn endpoint(&self) -> Result<Endpoint, Failure> {
        let server = self.global.server.as_deref().ok_or_else(|| {
            Failure::usage("no server was given")
                .hint("give --server http://HOST:PORT or unix:PATH, or set FLETCH_SERVER")
        })?;
        server.parse().map_err(|e: fletch_client::BadEndpoint| Failure::usage(e.to_string()))
    }

    fn client(&self) -> Result<Client, Failure> {
        let endpoint = self.endpoint()?;
        let token = TokenSource::of(self.global.token.clone(), self.global.token_file.clone())
            .map_err(|e| Failure::usage(e.to_string()))?;
        let config = ClientConfig { token, ..ClientConfig::new(endpoint, "cli") };
        let client = Client::new(config)?;
        // A server that is away or speaks another API version must be reported within seconds.
        self.rt.block_on(client.within(REACH_TIMEOUT).info())?;
        Ok(client)
    }

    /// Returns the registered name of a target. With `--server`, a target without a slash is a registered
    /// name.
    fn name(&self, target: &Target) -> Option<DatasetName> {
        self.global.server.as_ref()?;
        DatasetName::new(&target.base).ok()
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
                server: client.endpoint().to_string(),
                dataset: name.clone(),
                version: select.to_string(),
                root: resolved.root,
                layout: resolved.layout,
                uri: dataset.uri,
                tables: dataset.tables,
            };
            if let Err(e) = known_dir().and_then(|dir| Ok(known.save(&dir, client.endpoint())?)) {
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
        let server = self.endpoint()?;
        let known = RememberedVersion::load(&known_dir()?, &server, &name, &select.to_string());
        let known = known.map_err(|e| Failure { what: format!("{}; {e}", gone.what), ..gone })?;
        self.out
            .warn(format!("{server} does not answer; this is version {}, which it named last", known.root));
        let location = self.location(&known.tables)?;
        let version = location.version(known.root, known.layout).await?;
        Ok(OpenVersion { version, base: name.to_string(), location: Some(location) })
    }

    /// Returns whether this account knows a version that a server named last.
    fn is_known(&self, name: &DatasetName, target: &Target) -> bool {
        let version = target.select().to_string();
        let known = self
            .endpoint()
            .and_then(|server| Ok(RememberedVersion::load(&known_dir()?, &server, name, &version)?));
        known.is_ok()
    }

    /// Returns where this account wrote the tables of a dataset.
    fn written(&self, uri: &OriginUri) -> Vec<WrittenTables> {
        state_dir().map(|dir| written::places(&dir, uri)).unwrap_or_default()
    }

    /// Returns the failure of a version that is not at a location.
    async fn unresolved(&self, target: &Target, location: &TablesLocation, error: Failure) -> Failure {
        let source = &target.base;
        let is_gone = location.origin().local_dir().is_some_and(|dir| !dir.exists());
        if is_gone && self.global.server.is_none() && DatasetName::new(source).is_ok() {
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
        let location = self.location(&target.base)?;
        let (root, layout) = match location.resolve(&select).await {
            Ok(found) => found,
            Err(e) => return Err(self.unresolved(target, &location, e).await),
        };
        let version = location.version(root, layout).await?;
        Ok(OpenVersion { version, base: location.uri(), location: Some(location) })
    }
}

/// Returns the state directory of commands without `--state-dir`.
fn state_dir() -> Option<PathBuf> {
    let given = std::env::var_os("FLETCH_STATE_DIR").map(PathBuf::from);
    given.or_else(|| fletch_settings::state_dir(nix::unistd::geteuid().is_root()))
}

/// Returns the directory of the versions that a server named last. This command and mounts share it.
fn known_dir() -> Result<PathBuf, Failure> {
    let dir = state_dir().map(|d| d.join("known"));
    dir.ok_or_else(|| Failure::usage("neither HOME nor XDG_STATE_HOME is set"))
}

/// Streams a result to stdout, which is locked and buffered.
fn streamed(write: impl FnOnce(&mut dyn std::io::Write) -> std::io::Result<()>) -> Result<(), Failure> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    write(&mut out).and_then(|()| std::io::Write::flush(&mut out)).map_err(|e| stdout_failed(&e))
}
