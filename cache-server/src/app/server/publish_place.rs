//! The place for version tables of clients, and of datasets that are registered by their URIs alone.

use super::Server;
use crate::app::config::Config;
use fletch_indexer::default_tables;
use fletch_origin::OriginUri;
use std::path::PathBuf;

/// The directory of the state directory for version tables of clients on this machine.
pub(super) const TABLES_DIR: &str = "tables";

/// The place for version tables of clients that name none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishPlace {
    /// The place of the settings, for every client.
    Everywhere(OriginUri),
    /// A directory below the state directory, for clients on this machine.
    OwnMachine(PathBuf),
    /// None: with tokens, the domains have no directory in common.
    None,
}

impl PublishPlace {
    pub(super) fn new(config: &Config) -> Self {
        match &config.publish_uri {
            Some(uri) => PublishPlace::Everywhere(uri.clone()),
            None if config.auth_tokens.is_some() => PublishPlace::None,
            None => PublishPlace::OwnMachine(config.state_dir.join(TABLES_DIR)),
        }
    }
}

/// Why there is no place for the tables of a dataset that is registered by its URI alone.
#[derive(Debug, thiserror::Error)]
pub enum NoPlace {
    /// With tokens, the domains have no directory in common.
    #[error("the server has no place for the tables of datasets: publish.uri is not set")]
    Unset,
    /// The server's directory is on one machine, and a cluster has several.
    #[error("the servers of a cluster have no place in common for the tables of datasets")]
    Cluster,
    /// The place is no URI.
    #[error("the place for tables is wrong: {0}")]
    Bad(String),
}

impl Server {
    /// Returns where the tables of a dataset go that is registered by its URI alone: where clients put them.
    ///
    /// # Errors
    /// [`NoPlace`].
    pub fn place_of_tables(&self, dataset: &OriginUri) -> Result<OriginUri, NoPlace> {
        let place = match &self.publish {
            PublishPlace::Everywhere(place) => place.to_string(),
            PublishPlace::OwnMachine(_) if self.cluster.peers().is_some() => return Err(NoPlace::Cluster),
            PublishPlace::OwnMachine(dir) => dir.display().to_string(),
            PublishPlace::None => return Err(NoPlace::Unset),
        };
        default_tables::below(&place, dataset).map_err(|e| NoPlace::Bad(e.to_string()))
    }
}
