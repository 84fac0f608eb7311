//! What a SOURCE on the command line names: a directory, a URI, or a dataset that the server has registered.

use super::Context;
use super::absent;
use crate::failure::Failure;
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

/// Finds the dataset that a text names.
///
/// # Errors
/// [`Failure`] when the text is no URI, or the server has no dataset of this name.
pub fn find(ctx: &Context, text: &str) -> Result<Source, Failure> {
    let name = name_of(text).filter(|_| ctx.global.server.is_some());
    let Some(name) = name else { return Ok(Source { uri: ctx.uri(text)?, tables: None }) };
    let client = ctx.client()?;
    let datasets = ctx.rt.block_on(client.datasets())?;
    let found = datasets.iter().find(|d| d.name == name);
    let dataset = found.ok_or_else(|| {
        absent::unregistered(&name, &datasets, &client.endpoint().to_string())
            .hint(format!("there is no directory {text} here either; give a directory, a URI or a name"))
    })?;
    Ok(Source { uri: ctx.uri(&dataset.uri)?, tables: Some(ctx.uri(&dataset.tables)?) })
}

/// Returns the name under which a directory or URI is registered.
///
/// # Errors
/// [`Failure`] when the text is no URI, or the server has no dataset there.
pub fn registered(ctx: &Context, text: &str, datasets: &[Dataset]) -> Result<DatasetName, Failure> {
    let uri = ctx.uri(text)?.to_string();
    let found = datasets.iter().find(|d| d.uri == uri);
    found.map(|d| d.name.clone()).ok_or_else(|| {
        Failure::new(format!("no dataset of the server is {uri}"))
            .hint(format!("run `fletch register NAME {text}`; `fletch datasets` lists the datasets"))
    })
}
