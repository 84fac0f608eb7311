//! The cluster: which servers there are, which of them are up, and which view of them is in force.
//!
//! ```text
//! etcd ◀── etcd.rs ◀── member.rs (waits: leases, retries, stop) ──▶ ClusterView on a watch ──▶ http, metrics
//!                          └── steps.rs (decides the next write) ── core::cluster (ring, view, silence)
//! ```
//! I1. The view is immutable. Readers never wait for the coordinator.
//! I2. Without the coordinator the last view stays in force, also over a restart.
//! I3. The number of the view changes with the ring only. A restart within `cluster.forget_after` keeps it.
//! I4. `peers.rs` asks other members for chunks, by the view. It decides nothing: `chunk_reads` does.
//! I5. `tenure.rs` says until when this server may act as a primary. It never asks etcd for that.
//! I6. `refusals.rs` and `follower.rs` say aloud what does not pass by itself.
//! I7. `recovery.rs` writes the keys of the cluster into an etcd that has none of them, and into no other.
//! I8. Without `cluster.coordinator = "etcd"` the server is the only member, and this room does nothing.
//!
//! Its folder has two rooms of their own: `catalog` changes registered datasets for all servers of the
//! cluster, and `groups` decides which server has which job.

pub mod catalog;
mod embedded;
mod etcd;
mod follower;
pub mod groups;
mod history;
mod identity;
mod member;
mod orders;
mod peers;
mod records;
mod recovery;
mod refusals;
mod settings;
mod steps;
mod tenure;
mod view;

pub use etcd::{EtcdError, Event, KeyValue, Op, Page};
pub use follower::Follower;
pub use member::{DrainError, SharedKeys};
pub use orders::PeerOrder;
pub use peers::{PeerAddress, PeerAnswer, PeerCall, PeerRequest, Peers, PinOrder, is_safe};
pub use records::{Keyed, Keys, PEER_PROTOCOL, from_text, to_text};
pub use recovery::{RecoverError, RecoveryMark};
pub use settings::{ClusterConfig, EtcdConfig, PeerConfig};
pub use tenure::Tenure;
pub use view::ClusterView;

use fletch_core::{MemberId, cluster::Weight};
use member::EtcdMember;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use steps::Refusal;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Why a server cannot be a member of its cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A file cannot be read or written.
    #[error("{path}: {error}; fix the file, or the setting of [cluster] or state.dir that names it")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The certificates cannot be used.
    #[error("the client for etcd cannot be made: {0}; check cluster.ca_file, cert_file and key_file")]
    Tls(String),
    /// The client for other members cannot be made.
    #[error("the client for other servers of the cluster cannot be made: {0}; install TLS certificates")]
    Peers(String),
    /// The state directory belongs to another member.
    #[error(
        "the state directory {dir} belongs to {known}, and the settings say {wanted}; set cluster.name and \
         cluster.id as before, or give an empty directory with --state-dir"
    )]
    OtherName {
        /// The state directory.
        dir: PathBuf,
        /// The member that it belongs to.
        known: String,
        /// The member of the settings.
        wanted: String,
    },
    /// The cluster does not take the server.
    #[error("cluster: {0}")]
    Refused(#[from] Refusal),
}

/// Why a server is not ready as a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotReady {
    /// What is missing. It names no host.
    pub what: &'static str,
    /// The last failure of the coordinator, which may name hosts.
    pub failure: String,
}

/// Numbers for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterStats {
    /// Whether the last contact with the coordinator succeeded.
    pub is_coordinator_up: bool,
    /// Calls to the coordinator that failed at one endpoint.
    pub failed_calls: u64,
    /// How often the coordinator went back in time, because a backup of it was restored.
    pub history_losses: u64,
}

/// The two coordinators.
enum Coordinator {
    /// This server is alone. Its one view is never replaced.
    Embedded { _views: watch::Sender<Arc<ClusterView>> },
    /// etcd.
    Etcd(Box<EtcdMember>),
}

/// A server's part of its cluster.
pub struct ClusterState {
    own_id: MemberId,
    own_url: String,
    views: watch::Receiver<Arc<ClusterView>>,
    coordinator: Coordinator,
    peers: Option<Peers>,
}

impl ClusterState {
    /// Opens the state of a server. `url` is that of its listener. Blocking.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn open(config: &ClusterConfig, dir: &Path, url: &str) -> Result<Self, ClusterError> {
        let own_id = config.id.clone();
        let Some(etcd) = &config.etcd else { return Ok(embedded::open(own_id, url)) };
        let own_url = etcd.advertise_url.clone().unwrap_or_else(|| url.to_owned());
        let (member, views) = EtcdMember::open(&config.id, etcd, dir, &own_url)?;
        let peers = Peers::new(&etcd.peers, views.clone())?;
        let state = ClusterState::new(own_id, own_url, views, Coordinator::Etcd(Box::new(member)));
        Ok(ClusterState { peers: Some(peers), ..state })
    }

    fn new(
        own_id: MemberId,
        own_url: String,
        views: watch::Receiver<Arc<ClusterView>>,
        coordinator: Coordinator,
    ) -> Self {
        ClusterState { own_id, own_url, views, coordinator, peers: None }
    }

    /// Returns the name of this server in its cluster.
    #[must_use]
    pub fn own_id(&self) -> &MemberId {
        &self.own_id
    }

    /// Returns the other members, or `None` for a server that is alone.
    #[must_use]
    pub fn peers(&self) -> Option<&Peers> {
        self.peers.as_ref()
    }

    /// Returns what the members share by etcd, or `None` for a server that is alone.
    #[must_use]
    pub fn shared_keys(&self) -> Option<SharedKeys> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => None,
            Coordinator::Etcd(member) => Some(member.shared_keys()),
        }
    }

    /// Returns the uid of the cluster that this server has joined. `None` before that, and for a server that
    /// is alone.
    #[must_use]
    pub fn uid(&self) -> Option<String> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => None,
            Coordinator::Etcd(member) => member.uid(),
        }
    }

    /// Returns the random number of this server's state directory. `None` for a server that is alone.
    #[must_use]
    pub fn incarnation(&self) -> Option<String> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => None,
            Coordinator::Etcd(member) => Some(member.incarnation()),
        }
    }

    /// Returns the tenure of this server, if it may act as a primary now. `None` for a server that is alone:
    /// it has no group.
    #[must_use]
    pub fn tenure(&self) -> Option<Tenure> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => None,
            Coordinator::Etcd(member) => member.tenure(),
        }
    }

    /// Returns the numbers of this server's tenures as they begin. `None` for a server that is alone.
    #[must_use]
    pub fn tenures(&self) -> Option<watch::Receiver<u64>> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => None,
            Coordinator::Etcd(member) => Some(member.tenures()),
        }
    }

    /// Returns the URL by which clients reach this server.
    #[must_use]
    pub fn own_url(&self) -> &str {
        &self.own_url
    }

    /// Returns the view in force.
    #[must_use]
    pub fn view(&self) -> Arc<ClusterView> {
        Arc::clone(&self.views.borrow())
    }

    /// Returns the number of the view in force.
    #[must_use]
    pub fn view_number(&self) -> u64 {
        self.views.borrow().core.number()
    }

    /// Returns the views as they come.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<ClusterView>> {
        self.views.clone()
    }

    /// Returns why the server is not ready as a member, if it is not.
    #[must_use]
    pub fn not_ready(&self) -> Option<NotReady> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => None,
            Coordinator::Etcd(member) => member.not_ready(),
        }
    }

    /// Returns whether this server had no contact with etcd for `cluster.stale_max`. It may have missed that
    /// something was revoked.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        match &self.coordinator {
            Coordinator::Embedded { .. } => false,
            Coordinator::Etcd(member) => member.is_stale(),
        }
    }

    /// Notes that etcd lost changes, for metrics.
    fn note_history_loss(&self) {
        if let Coordinator::Etcd(member) = &self.coordinator {
            member.note_history_loss();
        }
    }

    /// Returns numbers for metrics.
    #[must_use]
    pub fn stats(&self) -> ClusterStats {
        match &self.coordinator {
            Coordinator::Embedded { .. } => {
                ClusterStats { is_coordinator_up: true, failed_calls: 0, history_losses: 0 }
            }
            Coordinator::Etcd(member) => member.stats(),
        }
    }

    /// Tries once to join the cluster. Without an answer of etcd the server goes on, and [`Self::run`] joins.
    ///
    /// # Errors
    /// [`ClusterError::Refused`].
    pub async fn join_first(&self, weight: Weight) -> Result<(), ClusterError> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => Ok(()),
            Coordinator::Etcd(member) => Ok(member.join_first(weight).await?),
        }
    }

    /// Keeps the membership until `stop`, then leaves as a member that will be back.
    pub async fn run(&self, stop: CancellationToken) {
        match &self.coordinator {
            Coordinator::Embedded { .. } => stop.cancelled().await,
            Coordinator::Etcd(member) => {
                let compare = async {
                    match &self.peers {
                        Some(peers) => peers.compare_tokens(&self.own_id).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = member.run(stop) => {}
                    () = compare => {}
                }
            }
        }
    }

    /// Takes a member out of the ring. It stays up, and joins again when it starts.
    ///
    /// # Errors
    /// [`DrainError`].
    pub async fn drain(&self, id: &MemberId) -> Result<(), DrainError> {
        match &self.coordinator {
            Coordinator::Embedded { .. } => Err(DrainError::Embedded),
            Coordinator::Etcd(member) => member.drain(id).await,
        }
    }
}
