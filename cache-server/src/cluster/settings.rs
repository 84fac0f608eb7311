//! The settings of the section `[cluster]`.

use fletch_client::TlsOptions;
use fletch_core::MemberId;
use std::{path::PathBuf, time::Duration};
use url::Url;

/// The settings of a server in its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Its name in the cluster.
    pub id: MemberId,
    /// The settings of the coordinator, or `None` for a single server.
    pub etcd: Option<EtcdConfig>,
}

/// The settings of a server whose cluster etcd coordinates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdConfig {
    /// The name of the cluster, below which its keys lie.
    pub cluster: String,
    /// The endpoints of etcd.
    pub endpoints: Vec<Url>,
    /// The URL by which clients reach this server, or `None` for that of its listener.
    pub advertise_url: Option<String>,
    /// The URL by which other servers reach this one, if it differs.
    pub peer_url: Option<String>,
    /// Where this server runs.
    pub zone: Option<String>,
    /// Its share of the chunks, or `None` for the size of its cache in MiB.
    pub weight: Option<u32>,
    /// After how long without a sign of life a member counts as down.
    pub member_ttl: Duration,
    /// After how long a member that is down loses its chunks.
    pub forget_after: Duration,
    /// How long the server stays ready without etcd, or `None` for ever.
    pub stale_max: Option<Duration>,
    /// The user of etcd, and the file with the password.
    pub user: Option<(String, PathBuf)>,
    /// The certificates that sign etcd's, in PEM. `None`: those of the system.
    pub ca_file: Option<PathBuf>,
    /// The client certificate and its key, in PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// How this server asks other members for chunks.
    pub peers: PeerConfig,
    /// Whether this server asks for tokens.
    pub needs_token: bool,
}

/// The settings by which a server asks other members for chunks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerConfig {
    /// The file with the token of the role `peer` that this server sends, or `None` for no token.
    pub token_file: Option<PathBuf>,
    /// Whether the token may go over plain HTTP to other machines.
    pub allows_insecure: bool,
    /// The CAs of the members' certificates, and the certificate that this server shows them.
    pub tls: TlsOptions,
}
