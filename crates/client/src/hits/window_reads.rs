//! Reads of many chunks and files at once, into windows, for a caller that waits without holding a thread.

use super::{HitConnection, HitOutcome, HitServer};
use crate::Client;
use bytes::Bytes;
use fletch_api::hits::{HitRequest, Wanted};
use fletch_core::{Hash, Root, Verified};
use parking_lot::Mutex;
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// The longest window of a connection: four batches of 64 samples of 110 KB.
const WINDOW_BYTES_MAX: u32 = 32 << 20;
/// The connections that are kept: as many reads as one process has under way.
const IDLE_MAX: usize = 4;
/// The longest time for one read. A server that has everything at hand takes a few milliseconds.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest chunk or file that is asked for.
const BYTES_MAX: u32 = 4 << 20;

/// Who hashes bytes that a server of this machine put into a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// The client, as it hashes all other bytes.
    #[default]
    Client,
    /// The server alone: it hashed them after it last read them, and then copied them into the window.
    Server,
}

/// A chunk or a file that is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowRead {
    /// The path of the file. `None`: the whole chunk with this hash.
    pub path: Option<String>,
    /// BLAKE3 of the bytes.
    pub hash: Hash,
    /// The number of bytes.
    pub size: u32,
}

type Idle = Mutex<Vec<HitConnection>>;

/// The idle connections of every client of this process.
static OF_ALL_CLIENTS: Mutex<Vec<Weak<Idle>>> = Mutex::new(Vec::new());

/// Closes all idle connections of this process. Call it before a fork, so that no child inherits them.
///
/// Bytes in their windows stay as they are.
pub fn close_idle() {
    let of_all = OF_ALL_CLIENTS.lock();
    for idle in of_all.iter().filter_map(Weak::upgrade) {
        idle.lock().clear();
    }
}

/// The connections of a client that no read uses now. Clones share them.
#[derive(Clone)]
pub(crate) struct IdleConnections(Arc<Idle>);

impl IdleConnections {
    pub(crate) fn new() -> Self {
        let idle = Arc::new(Idle::default());
        let mut of_all = OF_ALL_CLIENTS.lock();
        of_all.retain(|idle| idle.strong_count() > 0);
        of_all.push(Arc::downgrade(&idle));
        IdleConnections(idle)
    }

    fn take(&self, server: &HitServer) -> HitConnection {
        let mut idle = self.0.lock();
        idle.pop().unwrap_or_else(|| server.connection(WINDOW_BYTES_MAX))
    }

    fn give_back(&self, connection: HitConnection) {
        let mut idle = self.0.lock();
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
    }
}

impl Client {
    /// Reads what the server of this machine has at hand, into windows.
    ///
    /// Returns one entry for each read: its bytes, or `None` if they are to be read another way. The bytes
    /// keep their place in a window until they are dropped. They were hashed here, or by the server alone if
    /// `verify` says so. A client that reaches no server by a unix socket returns `None` for each.
    pub async fn read_in_window(
        &self,
        root: Root,
        reads: Vec<WindowRead>,
        verify: Verify,
    ) -> Vec<Option<Bytes>> {
        let count = reads.len();
        let none = || vec![None; count];
        let Some(server) = self.hits().filter(|server| !server.rests(Instant::now())) else { return none() };
        let mut connection = self.idle_hits.take(server);
        let (client, until) = (self.clone(), Instant::now() + READ_TIMEOUT.min(self.io_timeout()));
        let reading = tokio::task::spawn_blocking(move || {
            let bytes = client.read_with(&mut connection, root, &reads, verify, until);
            client.idle_hits.give_back(connection);
            bytes
        });
        reading.await.unwrap_or_else(|_| none())
    }

    /// As [`Client::read_in_window`], with a connection, on the calling thread.
    fn read_with(
        &self,
        connection: &mut HitConnection,
        root: Root,
        reads: &[WindowRead],
        verify: Verify,
        until: Instant,
    ) -> Vec<Option<Bytes>> {
        let mut answers = Vec::new();
        let is_short = |read: &&WindowRead| read.size > 0 && read.size <= BYTES_MAX;
        let mut requests: Vec<HitRequest<'_>> = reads
            .iter()
            .filter(is_short)
            .map(|read| {
                let wanted = read.path.as_deref().map_or(Wanted::Chunk, Wanted::File);
                self.hit_request(root, wanted, read.hash, read.size)
            })
            .collect();
        let outcome = connection.ask_in_window(&mut requests, &mut answers, until);
        if outcome != HitOutcome::Here {
            return vec![None; reads.len()];
        }
        let mut answers = answers.into_iter();
        let mut checked = |read: &WindowRead| {
            let bytes = Bytes::from_owner(answers.next()??);
            match verify {
                Verify::Server => Some(bytes),
                Verify::Client => match Verified::check(read.hash, bytes) {
                    Ok(verified) => Some(verified.bytes().clone()),
                    Err(error) => {
                        tracing::warn!(%error, "wrong bytes in a window; they are read by HTTP");
                        None
                    }
                },
            }
        };
        reads.iter().map(|read| if is_short(&read) { checked(read) } else { None }).collect()
    }
}
