//! Opens the version to mount: resolves it at the server or, without the server, by `--tables` or by the
//! server's last answer.

use crate::chunk_sources::{FallbackChunks, ServerChunks};
use crate::cli::{FallbackSettings, ProcessSettings, Settings};
use crate::fs::read::ChunkSource;
use crate::restart::Restart;
use crate::server_watch::ServerWatch;
use anyhow::{Context, Result, anyhow};
use fletch_api::ResolvedVersion;
use fletch_client::fallback::{Fallback, RememberedVersion, resolve};
use fletch_client::{Client, ClientConfig, ClientError, Servers};
use fletch_core::{DatasetName, LayoutId, Root};
use fletch_origin::{Origin, OriginLimits, OriginUri, Origins};
use fletch_tables::{LayoutDoc, PartCache, Version, paths};
use std::{path::Path, sync::Arc, time::Duration};

/// How long a starting mount waits for its server.
const REACH_WITHIN: Duration = Duration::from_secs(5);
/// The most reads of the origin at once while the server is gone.
const ORIGIN_READS_MAX: usize = 16;

/// An open version, with the source of its chunks.
pub struct OpenVersion {
    /// The client of the server, if the mount has a server.
    pub client: Option<Client>,
    /// The way to the origin, if the mount may read it.
    pub fallback: Option<Fallback>,
    /// The watch of the server, unless the mount may read the origin instead.
    pub watch: Option<Arc<ServerWatch>>,
    pub version: Version,
    chunks: Arc<dyn ChunkSource>,
}

impl OpenVersion {
    /// Returns the source of the version's chunks.
    #[must_use]
    pub fn chunks(&self) -> Arc<dyn ChunkSource> {
        Arc::clone(&self.chunks)
    }
}

/// The URIs of a dataset.
struct DatasetUris {
    objects: String,
    tables: String,
}

/// Opens the version that the settings name.
///
/// # Errors
/// What failed, and what to do.
pub async fn open(settings: &Settings) -> Result<OpenVersion> {
    let client =
        settings.process.server.as_ref().map(|server| client(&settings.process, server)).transpose()?;
    let client = client.map(|c| c.for_dataset(Some(&settings.target.dataset)));
    let (root, layout, uris) = match (&client, &settings.fallback) {
        (None, None) => {
            return Err(anyhow!("neither a server nor tables were given: give --server or --tables"));
        }
        (Some(client), None) => {
            let resolved = match (resolve_at_server(settings, client).await, &settings.restart) {
                // Both may have died at once. No process of the mount runs yet that would start the server.
                (Err(error), Some(program)) if is_unreachable(&error) => {
                    Restart::with(program.clone()).run().await;
                    resolve_at_server(settings, client).await?
                }
                (resolved, _) => resolved?,
            };
            (resolved.root, resolved.layout, None)
        }
        (None, Some(fallback_settings)) => resolve_without_server(settings, fallback_settings).await?,
        (Some(client), Some(fallback_settings)) => match resolve_at_server(settings, client).await {
            Ok(resolved) => resolve_and_remember(settings, client, fallback_settings, &resolved).await?,
            Err(e) if is_unreachable(&e) => {
                tracing::warn!(error = format!("{e:#}"), "the server does not answer: mounting without it");
                match resolve_without_server(settings, fallback_settings).await {
                    Ok(found) => found,
                    // The silence of the server is the failure; the second error is its context.
                    Err(more) => return Err(e.context(format!("{more:#}"))),
                }
            }
            Err(e) => return Err(e),
        },
    };
    let fallback = match (&settings.fallback, uris) {
        (Some(fallback_settings), Some(uris)) => {
            Some(fallback(settings, fallback_settings, client.clone(), &uris)?)
        }
        _ => None,
    };
    let restart = settings.restart.clone().map(Restart::with);
    let watch = client.clone().filter(|_| fallback.is_none()).map(|client| ServerWatch::new(client, restart));
    let neither = || anyhow!("neither a server nor tables were given: give --server or --tables");
    let tables = match (&fallback, &client, &watch) {
        (Some(fallback), ..) => fallback.tables(root, layout),
        (None, Some(client), Some(watch)) => watch.tables(client.tables(root, layout)),
        (None, ..) => return Err(neither()),
    };
    let version = Version::open(tables, root, layout, settings.process.part_cache());
    let version = version.await.with_context(|| format!("opening version {root}"))?;
    let chunks: Arc<dyn ChunkSource> = match (&fallback, &client, &watch) {
        (Some(_), ..) if version.is_draft() => {
            return Err(anyhow!(
                "{} is a draft, of which only a server knows what was read: run `fletch seal {0}` first, or \
                 leave out --origin-fallback",
                settings.target.dataset
            ));
        }
        (Some(fallback), ..) => {
            Arc::new(FallbackChunks { fallback: fallback.clone(), root, lent: Arc::default() })
        }
        (None, Some(client), Some(watch)) => Arc::new(ServerChunks::new(client, watch, &version)),
        (None, ..) => return Err(neither()),
    };
    Ok(OpenVersion { client, fallback, watch, version, chunks })
}

/// Opens a version of a dataset through a client and a watch that other versions use, too.
///
/// # Errors
/// What failed, and what to do.
pub async fn open_shared(
    client: &Client,
    watch: &Arc<ServerWatch>,
    (dataset, root, layout): (&DatasetName, Root, LayoutId),
    parts: &PartCache,
) -> Result<OpenVersion> {
    let client = client.for_dataset(Some(dataset));
    let tables = watch.tables(client.tables(root, layout));
    let version = Version::open(tables, root, layout, parts.clone());
    let version = version.await.with_context(|| format!("opening version {root}"))?;
    let chunks = Arc::new(ServerChunks::new(&client, watch, &version));
    Ok(OpenVersion { client: Some(client), fallback: None, watch: Some(Arc::clone(watch)), version, chunks })
}

/// Returns the client of a process of mounts.
///
/// # Errors
/// The token cannot be read, or TLS cannot be set up.
pub fn client(process: &ProcessSettings, servers: &Servers) -> Result<Client, ClientError> {
    let io_timeout = process.io_timeout;
    Client::new(ClientConfig {
        token: process.token.clone(),
        tls: process.tls.clone(),
        job: Some(process.job.clone()),
        // A little less than the store's own deadline, so that the client reports its reason first.
        io_timeout: io_timeout - (io_timeout / 20).min(Duration::from_millis(500)),
        ..ClientConfig::of(servers.clone(), "mount")
    })
}

fn is_unreachable(e: &anyhow::Error) -> bool {
    e.chain().any(|c| c.downcast_ref::<ClientError>().is_some_and(ClientError::is_unreachable))
}

async fn resolve_at_server(settings: &Settings, client: &Client) -> Result<ResolvedVersion> {
    let first = client.within(REACH_WITHIN.min(settings.process.io_timeout));
    first.info().await?;
    let target = &settings.target;
    let resolved = first.resolve(&target.dataset, &target.version).await;
    resolved.with_context(|| format!("cannot resolve {}@{}", target.dataset, target.version))
}

type Resolution = (Root, LayoutId, Option<DatasetUris>);

/// Asks the server where the dataset is, and saves the answer for a mount that starts without the server.
async fn resolve_and_remember(
    settings: &Settings,
    client: &Client,
    fallback_settings: &FallbackSettings,
    resolved: &ResolvedVersion,
) -> Result<Resolution> {
    let target = &settings.target;
    let dataset = client.dataset(&target.dataset).await?;
    let remembered = RememberedVersion {
        server: client.servers().to_string(),
        dataset: target.dataset.clone(),
        version: target.version.clone(),
        root: resolved.root,
        layout: resolved.layout,
        uri: fallback_settings.uri.clone().unwrap_or(dataset.uri),
        tables: fallback_settings.tables.clone().unwrap_or(dataset.tables),
    };
    let saved = remembered_dir(fallback_settings).and_then(|dir| Ok(remembered.save(dir, client.servers())?));
    if let Err(error) = saved {
        let error = format!("{error:#}");
        tracing::warn!(
            error,
            "cannot save the server's answer: a later mount cannot start without the server"
        );
    }
    let uris = DatasetUris { objects: remembered.uri, tables: remembered.tables };
    Ok((remembered.root, remembered.layout, Some(uris)))
}

/// Resolves the version without the server: by `--tables` if given, else by the server's last answer.
async fn resolve_without_server(
    settings: &Settings,
    fallback_settings: &FallbackSettings,
) -> Result<Resolution> {
    let target = &settings.target;
    if let Some(tables) = &fallback_settings.tables {
        let origin = origins(settings, fallback_settings)?.open(&OriginUri::parse(tables)?)?;
        let (root, layout) = resolve(&origin, &target.version).await?;
        let objects = match &fallback_settings.uri {
            Some(uri) => uri.clone(),
            // A run that wrote its tables elsewhere recorded where the objects are.
            None => objects_of(&origin, root, layout).await?.unwrap_or_else(|| tables.clone()),
        };
        return Ok((root, layout, Some(DatasetUris { objects, tables: tables.clone() })));
    }
    let server = settings
        .process
        .server
        .as_ref()
        .context("neither a server nor tables were given: give --server or --tables")?;
    let remembered = RememberedVersion::load(
        remembered_dir(fallback_settings)?,
        server,
        &target.dataset,
        &target.version,
    )?;
    tracing::warn!(
        root = %remembered.root,
        "mounting the version that the server named last; its tag may have moved since"
    );
    let objects = fallback_settings.uri.clone().unwrap_or(remembered.uri);
    Ok((remembered.root, remembered.layout, Some(DatasetUris { objects, tables: remembered.tables })))
}

/// Returns where the tables say that the objects are; `None` if they are beside the tables.
async fn objects_of(tables: &Origin, root: Root, layout: LayoutId) -> Result<Option<String>> {
    let got = tables.get(&paths::layout(root, layout), None, None).await?;
    Ok(LayoutDoc::parse_any(&got.bytes)?.origin)
}

fn remembered_dir(fallback_settings: &FallbackSettings) -> Result<&Path> {
    fallback_settings
        .remembered_dir
        .as_deref()
        .context("no state directory: XDG_STATE_HOME and HOME are not set; give --state-dir")
}

fn origins(settings: &Settings, fallback_settings: &FallbackSettings) -> Result<Origins> {
    let limits = OriginLimits {
        requests_max: ORIGIN_READS_MAX,
        // The other half of the time goes to a server that hangs.
        io_timeout: settings.process.io_timeout / 2,
        ..OriginLimits::default()
    };
    Ok(Origins::new(fallback_settings.origins.clone(), limits)?)
}

fn open_origins(origins: &Origins, uris: &DatasetUris) -> Result<(Origin, Origin)> {
    let open = |text: &str| -> Result<Origin> { Ok(origins.open(&OriginUri::parse(text)?)?) };
    Ok((open(&uris.objects)?, open(&uris.tables)?))
}

fn fallback(
    settings: &Settings,
    fallback_settings: &FallbackSettings,
    client: Option<Client>,
    uris: &DatasetUris,
) -> Result<Fallback> {
    let origins = origins(settings, fallback_settings)?;
    let (data, tables) = open_origins(&origins, uris).context(
        "--origin-fallback needs its own access to the dataset: give an [[origin]] table in --config",
    )?;
    Ok(Fallback::new(client, origins, data, tables))
}
