//! The parts that all mounts of a process share: memory, disk, and the tasks of their requests.

use crate::access::Access;
use crate::cli::ProcessSettings;
use crate::fs::read::{ChunkSource, ReadCounters};
use crate::metrics::{self, Snapshot};
use crate::node::chunk_source::NodeChunks;
use crate::node::own_versions::{OwnVersion, OwnVersions};
use crate::node::{Node, NodeContext, clients::NodeClients, node_store::NodeStore};
use crate::open_version::OpenVersion;
use crate::requests::{ReadParts, RequestContext, Timeouts};
use crate::server_watch::ServerWatch;
use crate::short_circuit::close_idle_slabs;
use fletch_api::node::MountedVersion;
use fletch_client::{Client, Servers};
use fletch_core::DatasetName;
use fletch_store::{DiskTier, Store, StoreLimits, disk::DiskEngine};
use fletch_tables::Version;
use std::{sync::Arc, time::Duration};
use tokio::{runtime::Handle, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How often the store fetches a chunk whose bytes were wrong. With a node store it tries the owner in
/// addition.
const FETCH_ATTEMPTS: u32 = 2;
/// The most bytes of chunks that wait for their append to disk. They count as part of `--memory`.
const APPEND_BYTES_MAX: u64 = 256 << 20;
/// How long the process waits for requests in flight after the unmount.
const DRAIN_WITHIN: Duration = Duration::from_secs(2);
/// How long the process waits for metrics and watches to end.
const BACKGROUND_WITHIN: Duration = Duration::from_millis(500);
/// How long the process waits for the node store to close.
const CLOSE_STORE_WITHIN: Duration = Duration::from_secs(2);

/// What all mounts of a process share.
pub struct SharedParts {
    /// The chunks in memory and on disk.
    pub store: Arc<Store>,
    /// This process's part in the node store, if the settings ask for one.
    pub node: Option<Arc<Node>>,
    /// Waiting requests, and fetches.
    pub tasks: TaskTracker,
    /// Metrics and watches, which `stop` ends.
    pub background: TaskTracker,
    /// Ends the tasks of `background`.
    pub stop: CancellationToken,
    /// The tasks of the node store. `stop_node` ends them, and so does `stop`.
    node_tasks: TaskTracker,
    stop_node: CancellationToken,
    timeouts: Timeouts,
}

impl SharedParts {
    /// Returns the parts, and starts the tasks of the node store on `runtime`.
    #[must_use]
    pub fn new(process: &ProcessSettings, client: Option<&Client>, runtime: &Handle) -> Self {
        let _context = runtime.enter();
        let (tasks, background, stop) = (TaskTracker::new(), TaskTracker::new(), CancellationToken::new());
        let cache = process.cache.as_ref().filter(|_| {
            let served = process.server.as_ref().is_some_and(Servers::is_unix);
            if served {
                tracing::info!("the server runs on this node and keeps the chunks: cache.size is not used");
            }
            !served
        });
        let limits = StoreLimits {
            memory_bytes: process.memory_bytes,
            deadline: process.io_timeout,
            attempts: FETCH_ATTEMPTS + u32::from(cache.is_some()),
        };
        let disk = cache.map(|_| DiskTier::new((process.memory_bytes / 4).min(APPEND_BYTES_MAX)));
        let store = Store::new(limits, disk, tasks.clone());
        let node = cache.and_then(|cache| {
            let own = Arc::<OwnVersions>::default();
            let (client, tasks) = (client.cloned(), background.clone());
            let clients = NodeClients::new(client.clone(), Arc::clone(&own), tasks, stop.clone());
            let node_store = NodeStore::new(
                Arc::clone(&store),
                clients.into(),
                client,
                process.memory_bytes,
                process.io_timeout,
            );
            Node::new(NodeContext {
                settings: cache.clone(),
                store: Arc::clone(&store),
                node_store,
                own,
                job: process.job.clone(),
                io_timeout: process.io_timeout,
            })
        });
        let (node_tasks, stop_node) = (TaskTracker::new(), stop.child_token());
        if let Some(node) = &node {
            node_tasks.spawn(Arc::clone(node).run(stop_node.clone()));
        }
        background.spawn(close_idle_slabs(stop.clone()));
        let timeouts = Timeouts { io: process.io_timeout, mapped: process.map_timeout };
        SharedParts { store, node, tasks, background, stop, node_tasks, stop_node, timeouts }
    }

    /// Returns the context of a mount of an open version. `reserves_disk` gives the version a share of the
    /// node store's disk before its first read.
    #[must_use]
    pub fn context(
        &self,
        opened: &OpenVersion,
        dataset: &DatasetName,
        reserves_disk: bool,
    ) -> Arc<RequestContext> {
        let (version, root) = (&opened.version, opened.version.root());
        let (access, counters) = (Arc::<Access>::default(), Arc::<ReadCounters>::default());
        // The owner of a node store knows chunks by their hashes, and those of a draft are not known.
        let source: Arc<dyn ChunkSource> = match self.node.as_ref().filter(|_| !version.is_draft()) {
            Some(node) => {
                node.add_version(OwnVersion {
                    mounted: MountedVersion { root, footprint: footprint_max(version) },
                    access: Arc::clone(&access),
                    reads: Arc::clone(&counters),
                    reserves_disk,
                });
                let (node, dataset) = (Arc::clone(node), dataset.clone());
                Arc::new(NodeChunks { node, root, dataset, beyond: opened.chunks() })
            }
            None => opened.chunks(),
        };
        let (store, dataset) = (Arc::clone(&self.store), Some(dataset.clone()));
        let parts = ReadParts { store, source, counters, access, dataset };
        RequestContext::new(version, parts, self.timeouts, self.tasks.clone())
    }

    /// Returns the counters of the shared parts.
    #[must_use]
    pub fn counters(&self, client: Option<&Client>, watch: Option<&ServerWatch>) -> Snapshot {
        let (store, client) = (self.store.stats(), client.map(Client::stats).unwrap_or_default());
        let (server_losses, server_refused) = watch.map_or((0, 0), ServerWatch::counts);
        Snapshot {
            fetches: store.fetches,
            fetched_bytes: store.fetched_bytes,
            corrupt: store.corrupt,
            memory_live_bytes: store.live_bytes,
            server_requests: client.requests,
            server_retries: client.retries,
            server_failovers: client.failovers,
            server_bytes: client.bytes,
            slab_bytes: client.hits.slab_bytes,
            hit_requests: metrics::hit_requests(client.hits),
            server_losses,
            server_refused,
            server_gone: watch.is_some_and(ServerWatch::is_gone),
            node: self.node.as_ref().map(|n| n.snapshot()),
            ..Snapshot::default()
        }
    }

    /// Ends the tasks, each group within a bound.
    pub async fn end(&self) {
        // First: clients of the node store that read on would keep this process busy.
        self.stop_node.cancel();
        self.tasks.close();
        if timeout(DRAIN_WITHIN, self.tasks.wait()).await.is_err() {
            tracing::warn!(left = self.tasks.len(), "requests in flight got no reply before the exit");
        }
        self.stop.cancel();
        self.background.close();
        self.node_tasks.close();
        drop(timeout(BACKGROUND_WITHIN, self.background.wait()).await);
        if timeout(CLOSE_STORE_WITHIN, self.node_tasks.wait()).await.is_err() {
            tracing::warn!("the node store is slow to close: the process exits without waiting for it");
        }
    }
}

/// Returns the most bytes that a version's chunks, or the files of its packed chunks, can take on disk.
fn footprint_max(version: &Version) -> u64 {
    let doc = version.layout_doc();
    let pieces = doc.chunks.max(version.manifest().entries);
    DiskEngine::footprint_max(doc.bytes, pieces)
}
