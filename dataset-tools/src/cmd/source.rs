//! What a SOURCE on the command line names: a directory, a URI, or a dataset that the server has registered.

use super::Context;
use super::absent;
use crate::default_tables;
use crate::failure::Failure;
use crate::own_server::OwnPaths;
use fletch_api::Dataset;
use fletch_core::DatasetName;
use fletch_origin::OriginUri;
use std::path::Path;

/// A dataset on the command line.
pub struct Source {
    /// Where its objects are.
    pub uri: OriginUri,
    /// Where its registration says that the tables are; `None` for a directory or a URI.
    pub tables: Option<OriginUri>,
}

/// Returns the registered name that a text can be. A directory of that name comes first.
pub fn name_of(text: &str) -> Option<DatasetName> {
    if Path::new(text).exists() { None } else { DatasetName::new(text).ok() }
}

/// Returns where the tables of a dataset go when no place was named: never into the dataset.
///
/// # Errors
/// The server does not answer, or is elsewhere and names no place.
pub fn default_tables(ctx: &Context, uri: &OriginUri) -> Result<OriginUri, Failure> {
    let own = || {
        let place = OwnPaths::of_process()?.tables();
        default_tables::below(&place.display().to_string(), uri)
    };
    let Some(server) = ctx.chosen()? else { return own() };
    let info = ctx.rt.block_on(ctx.client()?.info())?;
    let to = match info.publish {
        Some(place) => default_tables::below(&place.uri, uri)?,
        // A server of this machine that another user runs can read what this user lets it read.
        None if server.servers().is_local() => own()?,
        None => return Err(default_tables::unknown(&server.servers().to_string())),
    };
    // A store is opened as the environment says.
    ctx.uri(&to.to_string())
}

/// Finds the dataset that a text names.
///
/// # Errors
/// [`Failure`] when the text is no URI, or the server has no dataset of this name.
pub fn find(ctx: &Context, text: &str) -> Result<Source, Failure> {
    let name = match name_of(text) {
        Some(name) if ctx.chosen()?.is_some() => Some(name),
        _ => None,
    };
    let Some(name) = name else { return Ok(Source { uri: ctx.uri(text)?, tables: None }) };
    let client = ctx.client()?;
    let datasets = ctx.rt.block_on(client.datasets())?;
    let found = datasets.iter().find(|d| d.name == name);
    let dataset = found.ok_or_else(|| {
        absent::unregistered(&name, &datasets, &client.servers().to_string())
            .hint(format!("there is no directory {text} here either; give a directory, a URI or a name"))
    })?;
    Ok(Source { uri: ctx.registered_uri(&dataset.uri)?, tables: Some(ctx.registered_uri(&dataset.tables)?) })
}

/// Returns the name under which a directory or URI is registered.
///
/// # Errors
/// [`Failure`] when the text is no URI, or the server has no dataset there.
pub fn registered(ctx: &Context, text: &str, datasets: &[Dataset]) -> Result<DatasetName, Failure> {
    let uri = ctx.uri_at_server(text)?;
    let found = datasets.iter().find(|d| d.uri == uri);
    found.map(|d| d.name.clone()).ok_or_else(|| {
        Failure::new(format!("no dataset of the server is {uri}"))
            .hint(format!("run `fletch register NAME {text}`; `fletch datasets` lists the datasets"))
    })
}
