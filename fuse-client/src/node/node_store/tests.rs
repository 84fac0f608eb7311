//! What clients may hold, and for how long.

use super::*;
use crate::node::own_versions::{OwnVersion, OwnVersions};
use fletch_client::{ClientConfig, Endpoint};
use fletch_core::{Hash, JobName};
use fletch_store::StoreLimits;
use std::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const MIB: u32 = 1 << 20;

fn node_store(memory: u32, client: Option<Client>) -> (Arc<NodeStore>, NodeClient) {
    let limits = StoreLimits { memory_bytes: memory.into(), deadline: Duration::from_secs(20), attempts: 1 };
    let store = Store::new(limits, None, TaskTracker::new());
    let root = Root(Hash::of(b"a version"));
    let own = Arc::<OwnVersions>::default();
    own.add(OwnVersion {
        mounted: MountedVersion { root, footprint: u64::MAX },
        access: Arc::default(),
        reads: Arc::default(),
        reserves_disk: false,
    });
    let clients = NodeClients::new(client.clone(), own, TaskTracker::new(), CancellationToken::new());
    let node_store = NodeStore::new(store, clients.into(), client, memory.into(), limits.deadline);
    (node_store, NodeClient { root, job: JobName::new("client-job").expect("a name"), dataset: None })
}

fn chunk(seed: u8) -> Bytes {
    vec![seed; MIB as usize].into()
}

fn request(bytes: &Bytes) -> FetchRequest {
    FetchRequest::Chunk { hash: Hash::of(bytes), len: MIB }
}

fn key(bytes: &Bytes) -> StoreKey {
    StoreKey { domain: Domain::default_domain(), hash: Hash::of(bytes) }
}

fn fetching(bytes: &Bytes) -> Fetch {
    let bytes = bytes.clone();
    Arc::new(move |_| {
        let bytes = bytes.clone();
        async move { Ok(bytes) }.boxed()
    })
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    for _ in 0..20_000 {
        if is() {
            return;
        }
        sleep(Duration::from_millis(1)).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn i6_clients_hold_at_most_half_of_the_owners_memory() {
    let (node_store, reader) = node_store(8 * MIB, None);
    let bytes = chunk(1);
    let set = dataset_id(reader.root);
    node_store.store.read(key(&bytes), MIB, set, fetching(&bytes)).await.expect("the owner's own read");
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(node_store.serve(reader.clone(), request(&bytes)).await.expect("its part"));
    }
    assert!(node_store.serve(reader.clone(), request(&bytes)).await.is_err(), "the fifth MiB of eight");
    // The owner's own reads have the other half.
    let own = [chunk(2), chunk(3), chunk(4), chunk(5)];
    let own = own.iter().map(|b| node_store.store.read(key(b), MIB, set, fetching(b)));
    let own = futures::future::try_join_all(own).await.expect("room for the owner");
    assert_eq!(own.len(), 4);
    held.pop();
    node_store.serve(reader, request(&bytes)).await.expect("what was sent is free again");
}

#[tokio::test]
async fn i6_a_client_that_leaves_frees_no_memory_of_its_fetch() {
    // It takes connections and never answers.
    let server = TcpListener::bind("127.0.0.1:0").expect("bind");
    let endpoint = format!("http://{}", server.local_addr().expect("address"));
    let endpoint: Endpoint = endpoint.parse().expect("endpoint");
    let client = Client::new(ClientConfig::new(endpoint, "mount")).expect("client");
    let (node_store, reader) = node_store(8 * MIB, Some(client));
    let before = node_store.memory.available_permits();
    let bytes = chunk(1);
    let reading = {
        let (node_store, bytes) = (Arc::clone(&node_store), bytes.clone());
        TaskTracker::new().spawn(async move { node_store.serve(reader, request(&bytes)).await.is_ok() })
    };
    until("its fetch is under way", || node_store.store.stats().fetches == 1).await;
    reading.abort();
    assert!(reading.await.expect_err("it went").is_cancelled());
    assert_eq!(before - node_store.memory.available_permits(), MIB as usize);
    // The owner's own reader joins, and does not inherit what becomes of it.
    let root = Root(Hash::of(b"a version"));
    let own = node_store.store.read(key(&bytes), MIB, dataset_id(root), fetching(&bytes));
    let joins = async {
        until("it joined", || node_store.store.stats().hits_flight == 1).await;
        drop(server);
    };
    let (own, ()) = tokio::join!(own, joins);
    assert_eq!(own.expect("by its own fetch").tier, Tier::Origin);
    until("the client's memory is free", || node_store.memory.available_permits() == before).await;
    assert!(*node_store.server_silent.borrow(), "and no client waits for that server");
}
