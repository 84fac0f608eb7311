//! What is to be mounted: asked of the server or, without it, known from before or given.

use crate::chunk_sources::{FallbackChunks, ServerChunks};
use crate::cli::{FallbackSettings, Settings};
use crate::fs::read::ChunkSource;
use anyhow::{Context, Result, anyhow};
use fletch_api::ResolvedVersion;
use fletch_client::fallback::{Fallback, Known, resolve};
use fletch_client::{Client, ClientConfig, ClientError};
use fletch_core::{LayoutId, Root};
use fletch_origin::{Origin, OriginLimits, OriginUri, Origins};
use fletch_tables::{PartCache, Version};
use std::{path::Path, sync::Arc, time::Duration};

/// How long a mount that begins waits for its server.
const REACH_WITHIN: Duration = Duration::from_secs(5);
/// Reads of the origin under way at once while the server is gone.
const ORIGIN_READS_MAX: usize = 16;

/// A version, and how its bytes are had.
pub struct OpenVersion {
    /// The server, if there is one.
    pub client: Option<Client>,
    /// The origin behind it, where that may be read.
    pub fallback: Option<Fallback>,
    /// What is mounted.
    pub version: Version,
    chunks: Arc<dyn ChunkSource>,
}

impl OpenVersion {
    /// Where chunks come from.
    #[must_use]
    pub fn chunks(&self) -> Arc<dyn ChunkSource> {
        Arc::clone(&self.chunks)
    }
}

/// Where a dataset is: (its objects, its tables).
struct DatasetUris {
    uri: String,
    tables: String,
}

/// Opens what the settings name.
///
/// # Errors
/// What went wrong, with what to do about it.
pub async fn open(settings: &Settings) -> Result<OpenVersion> {
    let client = settings.server.as_ref().map(|server| client(settings, server)).transpose()?;
    let (root, layout, uris) = match (&client, &settings.fallback) {
        (None, None) => return Err(anyhow!("neither a server nor tables were given")),
        (Some(client), None) => {
            let resolved = resolve_at_server(settings, client).await?;
            (resolved.root, resolved.layout, None)
        }
        (None, Some(fallback_settings)) => resolve_without_server(settings, fallback_settings).await?,
        (Some(client), Some(fallback_settings)) => match resolve_at_server(settings, client).await {
            Ok(resolved) => resolve_and_remember(settings, client, fallback_settings, &resolved).await?,
            Err(e) if is_unreachable(&e) => {
                tracing::warn!(error = format!("{e:#}"), "the server is gone: mounting without it");
                match resolve_without_server(settings, fallback_settings).await {
                    Ok(found) => found,
                    // The silence is the failure; what else was tried explains it.
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
    let (tables, chunks): (_, Arc<dyn ChunkSource>) = match (&fallback, &client) {
        (Some(fallback), _) => {
            (fallback.tables(root, layout), Arc::new(FallbackChunks { fallback: fallback.clone(), root }))
        }
        (None, Some(client)) => {
            (client.tables(root, layout), Arc::new(ServerChunks { client: client.clone(), root }))
        }
        (None, None) => return Err(anyhow!("neither a server nor tables were given")),
    };
    let version = Version::open(tables, root, layout, PartCache::new(settings.tables_bytes));
    let version = version.await.with_context(|| format!("opening version {root}"))?;
    Ok(OpenVersion { client, fallback, version, chunks })
}

fn client(settings: &Settings, server: &fletch_client::Endpoint) -> Result<Client> {
    let io_timeout = settings.io_timeout;
    Ok(Client::new(ClientConfig {
        token: settings.token.clone(),
        job: Some(settings.job.clone()),
        // A little less than the store's own deadline, so that the reason is known when it ends.
        io_timeout: io_timeout - (io_timeout / 20).min(Duration::from_millis(500)),
        ..ClientConfig::new(server.clone(), "mount")
    })?)
}

fn is_unreachable(e: &anyhow::Error) -> bool {
    e.chain().any(|c| c.downcast_ref::<ClientError>().is_some_and(ClientError::is_unreachable))
}

async fn resolve_at_server(settings: &Settings, client: &Client) -> Result<ResolvedVersion> {
    let first = client.within(REACH_WITHIN.min(settings.io_timeout));
    first.info().await?;
    let target = &settings.target;
    let resolved = first.resolve(&target.dataset, &target.version).await;
    resolved.with_context(|| format!("resolving {}@{}", target.dataset, target.version))
}

type Resolution = (Root, LayoutId, Option<DatasetUris>);

/// The server answers: what it says is kept for a time when it does not.
async fn resolve_and_remember(
    settings: &Settings,
    client: &Client,
    fallback_settings: &FallbackSettings,
    resolved: &ResolvedVersion,
) -> Result<Resolution> {
    let target = &settings.target;
    let dataset = client.dataset(&target.dataset).await?;
    let known = Known {
        server: client.endpoint().to_string(),
        dataset: target.dataset.clone(),
        version: target.version.clone(),
        root: resolved.root,
        layout: resolved.layout,
        uri: fallback_settings.uri.clone().unwrap_or(dataset.uri),
        tables: fallback_settings.tables.clone().unwrap_or(dataset.tables),
    };
    let kept = known_versions_dir(fallback_settings).and_then(|dir| Ok(known.keep(dir, client.endpoint())?));
    if let Err(error) = kept {
        let error = format!("{error:#}");
        tracing::warn!(error, "a later mount cannot begin while the server is gone");
    }
    Ok((known.root, known.layout, Some(DatasetUris { uri: known.uri, tables: known.tables })))
}

/// The server is silent, or there is none: by the tables that were given, or what it said before.
async fn resolve_without_server(
    settings: &Settings,
    fallback_settings: &FallbackSettings,
) -> Result<Resolution> {
    let target = &settings.target;
    if let Some(tables) = &fallback_settings.tables {
        let uris = DatasetUris {
            uri: fallback_settings.uri.clone().unwrap_or_else(|| tables.clone()),
            tables: tables.clone(),
        };
        let (_, place) = open_origins(&origins(settings, fallback_settings)?, &uris)?;
        let (root, layout) = resolve(&place, &target.version).await?;
        return Ok((root, layout, Some(uris)));
    }
    let server = settings.server.as_ref().context("no server")?;
    let known =
        Known::find(known_versions_dir(fallback_settings)?, server, &target.dataset, &target.version)?;
    tracing::warn!(root = %known.root, "mounting what the server said last; a tag may have moved since");
    let uri = fallback_settings.uri.clone().unwrap_or(known.uri);
    Ok((known.root, known.layout, Some(DatasetUris { uri, tables: known.tables })))
}

fn known_versions_dir(fallback_settings: &FallbackSettings) -> Result<&Path> {
    fallback_settings
        .known_versions_dir
        .as_deref()
        .context("no state directory: neither XDG_STATE_HOME nor HOME is set")
}

fn origins(settings: &Settings, fallback_settings: &FallbackSettings) -> Result<Origins> {
    let limits = OriginLimits {
        requests_max: ORIGIN_READS_MAX,
        // A server that hangs is given half of the time.
        io_timeout: settings.io_timeout / 2,
        ..OriginLimits::default()
    };
    Ok(Origins::new(fallback_settings.origins.clone(), limits)?)
}

fn open_origins(origins: &Origins, uris: &DatasetUris) -> Result<(Origin, Origin)> {
    let open = |text: &str| -> Result<Origin> { Ok(origins.open(&OriginUri::parse(text)?)?) };
    Ok((open(&uris.uri)?, open(&uris.tables)?))
}

fn fallback(
    settings: &Settings,
    fallback_settings: &FallbackSettings,
    client: Option<Client>,
    uris: &DatasetUris,
) -> Result<Fallback> {
    let origins = origins(settings, fallback_settings)?;
    let (data, tables) = open_origins(&origins, uris).context(
        "--origin-fallback needs access of its own to the dataset: an [[origin]] table in --config",
    )?;
    Ok(Fallback::new(client, origins, data, tables))
}
