//! The commands: each parses nothing and decides little; it calls what does the work and
//! prints the result.

mod diff;
mod index;
mod list;
mod pack;
mod receipt;
mod server;
mod simulate;
mod tag;
mod verify;
mod warmup;

use crate::cli::{Cli, Command, Global};
use crate::failure::{Exit, Failure};
use crate::out::{Out, broken};
use crate::place::Place;
use crate::target::{Select, Target};
use clap::CommandFactory;
use fletch_client::fallback::{RememberedVersion, RememberedVersionError};
use fletch_client::{Client, ClientConfig, ClientError, Endpoint, TokenSource};
use fletch_core::DatasetName;
use fletch_origin::{OriginConfig, OriginLimits, OriginUri, Origins};
use fletch_tables::{Fault, PartCache, Version};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::Runtime;

/// One call to an origin, in all its attempts.
const IO_TIMEOUT: Duration = Duration::from_secs(60);
/// To find out whether the server is there at all.
const REACH_TIMEOUT: Duration = Duration::from_secs(3);
/// Parts of a served version held in memory, in bytes.
const PART_CACHE_BYTES: u64 = 32 << 20;

/// What `--config` may hold.
#[derive(Debug, Default, Deserialize)]
struct Settings {
    #[serde(default)]
    origin: Vec<OriginConfig>,
}

/// What every command needs.
struct Ctx {
    rt: Runtime,
    origins: Origins,
    out: Out,
    global: Global,
}

/// A version to look into, and how it was named.
struct Opened {
    version: Version,
    /// The URI or name that was given.
    base: String,
    /// The place of its tables, where there is access to it.
    place: Option<Place>,
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        let exit = if e.is_denied() {
            Exit::Denied
        } else if e.is_unreachable() || e.kind().retryable() {
            Exit::Unreachable
        } else {
            Exit::Failed
        };
        Failure { exit, what: e.to_string(), hint: e.hint().map(str::to_owned) }
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
        // When stdout is gone too there is nobody left to tell.
        let _told = out.result(&ErrorDoc { error, faults }, |_| Ok(()));
    }
    failure.exit
}

/// Runs a command line to its end.
#[must_use]
pub fn run(cli: Cli) -> Exit {
    let out = Out { json: cli.global.json, quiet: cli.global.quiet };
    if let Command::Completions { shell } = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "fletch", &mut std::io::stdout());
        return Exit::Ok;
    }
    let ctx = match Ctx::new(cli.global, out) {
        Ok(ctx) => ctx,
        Err(e) => return fail(out, &e, &[]),
    };
    let done = match cli.command {
        Command::Index(args) => return index::run(&ctx, args),
        Command::Pack(args) => return pack::run(&ctx, args),
        Command::Verify { target, threads } => verify::run(&ctx, &target, threads),
        Command::Ls { target, path, long } => list::ls(&ctx, &target, &path, long).map(|()| Exit::Ok),
        Command::Show { target, path } => list::show(&ctx, &target, path.as_deref()).map(|()| Exit::Ok),
        Command::Diff { a, b } => diff::run(&ctx, &a, &b).map(|()| Exit::Ok),
        Command::Tag { uri, tag, to, delete } => tag::run(&ctx, &uri, tag, to, delete).map(|()| Exit::Ok),
        Command::Register { name, uri, tables } => {
            server::register(&ctx, name, &uri, tables).map(|()| Exit::Ok)
        }
        Command::Warmup(args) => warmup::run(&ctx, &args),
        Command::Evict { name } => warmup::evict(&ctx, &name).map(|()| Exit::Ok),
        Command::Unregister { name } => server::unregister(&ctx, &name).map(|()| Exit::Ok),
        Command::Datasets => server::datasets(&ctx).map(|()| Exit::Ok),
        Command::Status => server::status(&ctx).map(|()| Exit::Ok),
        Command::Receipt { what } => receipt::run(&ctx, what),
        Command::Simulate(args) => simulate::run(&ctx, &args).map(|()| Exit::Ok),
        Command::Completions { .. } => Ok(Exit::Ok),
    };
    done.unwrap_or_else(|e| fail(out, &e, &[]))
}

impl Ctx {
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
        Ok(Ctx { rt, origins, out, global })
    }

    fn uri(&self, text: &str) -> Result<OriginUri, Failure> {
        OriginUri::from_arg(text).map_err(|e| Failure::usage(e.to_string()))
    }

    fn place(&self, text: &str) -> Result<Place, Failure> {
        Place::open(&self.origins, &self.uri(text)?)
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
        // A server that is away, or of another major, is told within seconds.
        self.rt.block_on(client.within(REACH_TIMEOUT).info())?;
        Ok(client)
    }

    /// The registered name that a target is, with a server and without a slash.
    fn name(&self, target: &Target) -> Option<DatasetName> {
        self.global.server.as_ref()?;
        DatasetName::new(&target.base).ok()
    }

    /// Opens what a target names.
    fn open(&self, target: &Target) -> Result<Opened, Failure> {
        let Some(name) = self.name(target) else { return self.rt.block_on(self.open_place(target)) };
        match self.client() {
            Ok(client) => self.rt.block_on(self.open_served(name, &target.select(), client)),
            Err(e) if e.exit == Exit::Unreachable && self.global.origin_fallback => {
                self.rt.block_on(self.open_known(name, &target.select(), e))
            }
            Err(e) if e.exit == Exit::Unreachable => {
                Err(e.hint("--origin-fallback looks into what the server said last, at the origin itself"))
            }
            Err(e) => Err(e),
        }
    }

    async fn open_served(
        &self,
        name: DatasetName,
        select: &Select,
        client: Client,
    ) -> Result<Opened, Failure> {
        let resolved = client.resolve(&name, &select.to_string()).await?;
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
                self.out.warn(format!("this will not be known when the server is gone: {e}"));
            }
        }
        let source = client.tables(resolved.root, resolved.layout);
        let cache = PartCache::new(PART_CACHE_BYTES);
        let version = Version::open(source, resolved.root, resolved.layout, cache).await?;
        Ok(Opened { version, base: name.to_string(), place: None })
    }

    /// The server is gone: what it said last, from the place of its tables.
    async fn open_known(&self, name: DatasetName, select: &Select, gone: Failure) -> Result<Opened, Failure> {
        let server = self.endpoint()?;
        let known = RememberedVersion::load(&known_dir()?, &server, &name, &select.to_string());
        let known = known.map_err(|e| Failure { what: format!("{}; {e}", gone.what), ..gone })?;
        self.out.warn(format!("{server} does not answer: this is {}, what it said last", known.root));
        let place = self.place(&known.tables)?;
        let version = place.version(known.root, known.layout).await?;
        Ok(Opened { version, base: name.to_string(), place: Some(place) })
    }

    async fn open_place(&self, target: &Target) -> Result<Opened, Failure> {
        let select = target.select();
        let place = self.place(&target.base)?;
        let (root, layout) = place.resolve(&select).await.map_err(|e| match &select {
            Select::Tag(_) if self.global.server.is_none() && DatasetName::new(&target.base).is_ok() => {
                e.hint("for a registered name give --server URL; for a place, the one that --to named")
            }
            _ => e,
        })?;
        let version = place.version(root, layout).await?;
        Ok(Opened { version, base: place.uri(), place: Some(place) })
    }
}

/// Where what a server said last is kept, by this command and by mounts.
fn known_dir() -> Result<PathBuf, Failure> {
    let given = std::env::var_os("FLETCH_STATE_DIR").map(PathBuf::from);
    let dir = given.or_else(|| fletch_settings::state_dir(nix::unistd::geteuid().is_root()));
    dir.map(|d| d.join("known")).ok_or_else(|| Failure::usage("neither HOME nor XDG_STATE_HOME is set"))
}

/// Stdout, locked and buffered, for results that are streamed.
fn streamed(write: impl FnOnce(&mut dyn std::io::Write) -> std::io::Result<()>) -> Result<(), Failure> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    write(&mut out).and_then(|()| std::io::Write::flush(&mut out)).map_err(|e| broken(&e))
}
