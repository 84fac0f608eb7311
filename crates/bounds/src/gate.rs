//! The gates of a read, in the order in which a cold read passes them.

/// A place at which a read can wait.
///
/// The first ones are limits. [`Gate::Tables`], [`Gate::SharedFetch`], [`Gate::Disk`], [`Gate::Peer`] and
/// [`Gate::Origin`] are the work of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gate {
    /// Memory for the head of a request (a part of `memory.max`).
    RequestMemory,
    /// The rows of the version's tables that name the chunk.
    Tables,
    /// Memory of the tenant for what its replies hold and its reads fetch (a part of `memory.max`).
    ReplyMemory,
    /// The turn of the job's dataset among those that the tenant reads from the same store.
    StreamTurn,
    /// What the pace of the `[[origin]]` lets the tenant have under way.
    OriginRoom,
    /// The tenant's requests to the same store (`limits.origin_requests_per_origin`).
    TenantOriginRequests,
    /// The tenant's requests to all stores (`limits.origin_requests`).
    TenantRequests,
    /// Memory for reads that wait for other servers of the cluster.
    PeerMemory,
    /// Another reader fetches the same chunk.
    SharedFetch,
    /// Memory for the chunk (`memory.max`).
    ChunkMemory,
    /// Other reads of the disk.
    DiskQueue,
    Disk,
    /// Another server of the cluster.
    Peer,
    /// The pause before a member or a store that is at a limit, or failed, is asked again.
    Retry,
    /// A store that does not answer: only a few calls wait for it at a time.
    SilentOrigin,
    /// Objects of the store whose earlier reads brought no byte hold the permits that they may hold.
    HungObjects,
    /// All requests to the same store (`limits.origin_requests_per_origin`, `concurrency`).
    OriginRequests,
    /// The pace of requests to the store: configured, or learned from its answers 503 and 429.
    OriginPace,
    /// All requests to all stores (`limits.origin_requests`).
    AllRequests,
    /// The store.
    Origin,
    /// Space in the queue of the disk, before a chunk is fetched for it.
    DiskRoom,
}

impl Gate {
    /// All gates, in order.
    pub const ALL: [Gate; 21] = [
        Gate::RequestMemory,
        Gate::Tables,
        Gate::ReplyMemory,
        Gate::StreamTurn,
        Gate::OriginRoom,
        Gate::TenantOriginRequests,
        Gate::TenantRequests,
        Gate::PeerMemory,
        Gate::SharedFetch,
        Gate::ChunkMemory,
        Gate::DiskQueue,
        Gate::Disk,
        Gate::Peer,
        Gate::Retry,
        Gate::SilentOrigin,
        Gate::HungObjects,
        Gate::OriginRequests,
        Gate::OriginPace,
        Gate::AllRequests,
        Gate::Origin,
        Gate::DiskRoom,
    ];

    /// Returns the name of the gate in logs, metrics and the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Gate::RequestMemory => "request_memory",
            Gate::Tables => "tables",
            Gate::ReplyMemory => "reply_memory",
            Gate::StreamTurn => "turn",
            Gate::OriginRoom => "origin_room",
            Gate::TenantOriginRequests => "tenant_origin_requests",
            Gate::TenantRequests => "tenant_requests",
            Gate::PeerMemory => "peer_memory",
            Gate::SharedFetch => "shared_fetch",
            Gate::ChunkMemory => "chunk_memory",
            Gate::DiskQueue => "disk_queue",
            Gate::Disk => "disk",
            Gate::Peer => "peer",
            Gate::Retry => "retry",
            Gate::SilentOrigin => "silent_origin",
            Gate::HungObjects => "hung_objects",
            Gate::OriginRequests => "origin_requests",
            Gate::OriginPace => "origin_pace",
            Gate::AllRequests => "all_requests",
            Gate::Origin => "origin",
            Gate::DiskRoom => "disk_room",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_gate_is_listed_once_at_its_place() {
        for (i, gate) in Gate::ALL.into_iter().enumerate() {
            assert_eq!(gate as usize, i, "{}", gate.as_str());
        }
        let names: BTreeSet<_> = Gate::ALL.into_iter().map(Gate::as_str).collect();
        assert_eq!(names.len(), Gate::ALL.len());
    }
}
