//! Writes the keys of a cluster back to an etcd that lost them: the part that knows etcd.
//!
//! ```text
//! begin ─▶ key `recovering` ─▶ the servers write jobs, groups and datasets ─▶ commit: `cluster` and `ring`
//! ```
//! I1. Nothing is written while etcd has the record of a cluster, or keys that this recovery did not write.
//! I2. The record of the cluster comes last, with the uid that all servers know. No server acts by other keys
//!     before, and afterwards every server joins again by itself.
//! I3. Every write compares both keys. So a recovery that another one overtook writes nothing more.

use super::{
    ClusterState, EtcdError, Op, SharedKeys, from_text, identity::IDENTITY_FILE, orders::PeerOrder,
    records::ClusterRecord, to_text, view::ClusterView,
};
use bytes::Bytes;
use fletch_core::{Domain, MemberId, cluster::Ring};
use futures::future::join_all;
use reqwest::Method;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The most bytes of values in a transaction. etcd takes 1.5 MiB.
const BATCH_BYTES_MAX: usize = 512 << 10;
/// The most changes of a transaction. etcd takes 128 operations.
const BATCH_OPS_MAX: usize = 48;
/// The longest answer of a member that says what it holds.
const HELD_BYTES_MAX: u32 = 32 << 20;
/// How long the asked server waits until it is in touch with its cluster again.
const JOINED_WITHIN: Duration = Duration::from_secs(5);

/// Why the keys of a cluster were not written back.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// The server is alone.
    #[error("this server is its only member: cluster.coordinator is embedded")]
    Embedded,
    /// The server has never joined.
    #[error(
        "this server has never joined a cluster, so it holds nothing of one ({IDENTITY_FILE} has no uid)"
    )]
    NeverJoined,
    /// Nothing is lost.
    #[error("etcd has the record of this cluster (uid {0}): there is nothing to write back")]
    Alive(String),
    /// Another history lives there.
    #[error("etcd has another cluster of this name: its uid is {found}, and this server has joined {known}")]
    OtherCluster {
        /// The uid of this server.
        known: String,
        /// The uid in etcd.
        found: String,
    },
    /// Keys without a cluster.
    #[error("etcd has {0} keys of a cluster of this name, and no record of a cluster")]
    Remains(usize),
    /// Members did not say what they hold.
    #[error("these members do not answer: {}", .0.join("; "))]
    Silent(Vec<String>),
    /// The servers remember different datasets.
    #[error("the servers remember different datasets, and none knows the latest change: {}", .0.join("; "))]
    DatasetsDiffer(Vec<String>),
    /// No server has this name.
    #[error("{0} is no member that answers")]
    NoMember(String),
    /// etcd did not answer.
    #[error("the coordinator of the cluster did not answer: {0}")]
    Etcd(#[from] EtcdError),
    /// A member did not write its part.
    #[error("{0} did not write what it holds: {1}; the recovery is not complete")]
    Part(String, String),
    /// Another recovery runs, or a cluster was created meanwhile.
    #[error("another recovery, or a server, changed the keys of the cluster meanwhile")]
    Overtaken,
}

/// The right to write keys: the revision of the key `recovering`.
#[derive(Debug, Clone, Copy)]
pub struct RecoveryMark(u64);

impl SharedKeys {
    fn conditions(&self, mark: RecoveryMark) -> Vec<(String, u64)> {
        vec![(self.keys.cluster(), 0), (self.keys.recovering(), mark.0)]
    }

    /// Returns the mark of a recovery of the cluster with this uid, if one runs.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn recovery_mark(&self, uid: &str) -> Result<Option<RecoveryMark>, RecoverError> {
        let one = |key| Op::Read { key, is_prefix: false };
        let found = self.etcd.transact(&[], &[one(self.keys.cluster()), one(self.keys.recovering())]).await?;
        let uid_of = |at: usize| {
            let kv = found.reads.get(at).and_then(|kvs| kvs.first())?;
            let uid = from_text::<ClusterRecord>(&kv.value).map_or_else(|e| e, |record| record.uid);
            Some((uid, kv.mod_revision))
        };
        match (uid_of(0), uid_of(1)) {
            (Some((found, _)), _) if found == uid => Err(RecoverError::Alive(found)),
            (Some((found, _)), _) => Err(RecoverError::OtherCluster { known: uid.to_owned(), found }),
            (None, Some((found, _))) if found != uid => {
                Err(RecoverError::OtherCluster { known: uid.to_owned(), found })
            }
            (None, mark) => Ok(mark.map(|(_, revision)| RecoveryMark(revision))),
        }
    }

    /// Checks that nothing of another history is in etcd.
    async fn check_lost(&self, uid: &str) -> Result<Option<RecoveryMark>, RecoverError> {
        if let Some(mark) = self.recovery_mark(uid).await? {
            return Ok(Some(mark));
        }
        let mut remains = 0;
        for prefix in [self.keys.ring(), self.keys.data(), self.keys.jobs()] {
            remains += self.etcd.read_prefix(&prefix).await?.keys.len();
        }
        if remains > 0 { Err(RecoverError::Remains(remains)) } else { Ok(None) }
    }

    /// Marks etcd as one that gets the keys of the cluster with this uid. A recovery that was interrupted
    /// before goes on.
    async fn begin_recovery(&self, uid: &str) -> Result<RecoveryMark, RecoverError> {
        if let Some(mark) = self.check_lost(uid).await? {
            return Ok(mark);
        }
        let key = self.keys.recovering();
        let value = to_text(&ClusterRecord { uid: uid.to_owned() });
        let put = Op::Put { key: key.clone(), value, lease: 0 };
        let done = self.etcd.transact(&[(self.keys.cluster(), 0), (key, 0)], &[put]).await?;
        if done.succeeded { Ok(RecoveryMark(done.revision)) } else { Err(RecoverError::Overtaken) }
    }

    /// Writes changes back to an etcd that lost them. As [`SharedKeys::write_all`].
    ///
    /// # Errors
    /// [`RecoverError::Etcd`].
    pub async fn write_back(
        &self,
        mark: RecoveryMark,
        changes: Vec<(Op, Option<u64>)>,
    ) -> Result<bool, RecoverError> {
        Ok(self.write_all(&self.conditions(mark), changes).await?)
    }

    /// Writes changes in transactions that etcd takes. In each of them the keys of `conditions` must have
    /// their revisions, and each changed key the revision beside it. Returns whether all are written; if not,
    /// others changed a key.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn write_all(
        &self,
        conditions: &[(String, u64)],
        changes: Vec<(Op, Option<u64>)>,
    ) -> Result<bool, EtcdError> {
        let mut changes = changes.into_iter().peekable();
        while changes.peek().is_some() {
            let (mut compare, mut ops, mut bytes) = (conditions.to_vec(), Vec::new(), 0);
            while let Some((op, seen)) = changes.next_if(|(op, _)| {
                ops.is_empty() || (ops.len() < BATCH_OPS_MAX && bytes + len_of(op) <= BATCH_BYTES_MAX)
            }) {
                bytes += len_of(&op);
                if let (Op::Put { key, .. } | Op::Delete { key }, Some(revision)) = (&op, seen) {
                    compare.push((key.clone(), revision));
                }
                ops.push(op);
            }
            if !self.etcd.transact(&compare, &ops).await?.succeeded {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Puts the record of the cluster and its ring in force.
    async fn commit_recovery(&self, mark: RecoveryMark, uid: &str, ring: &Ring) -> Result<(), RecoverError> {
        let mut compare = self.conditions(mark);
        compare.push((self.keys.ring(), 0));
        let put = |key, value| Op::Put { key, value, lease: 0 };
        let ops = [
            put(self.keys.cluster(), to_text(&ClusterRecord { uid: uid.to_owned() })),
            put(self.keys.ring(), to_text(ring)),
            Op::Delete { key: self.keys.recovering() },
        ];
        let done = self.etcd.transact(&compare, &ops).await?;
        if done.succeeded { Ok(()) } else { Err(RecoverError::Overtaken) }
    }
}

fn len_of(op: &Op) -> usize {
    match op {
        Op::Put { key, value, .. } => key.len() + value.len(),
        Op::Read { key, .. } | Op::Delete { key } => key.len(),
    }
}

/// A recovery of this server's cluster.
pub struct Recovering<'a> {
    cluster: &'a ClusterState,
    of: SharedKeys,
    /// The uid of the cluster.
    pub uid: String,
}

impl ClusterState {
    /// Begins to plan a recovery. Writes nothing.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn plan_recovery(&self) -> Result<Recovering<'_>, RecoverError> {
        let of = self.shared_keys().ok_or(RecoverError::Embedded)?;
        let uid = self.uid().ok_or(RecoverError::NeverJoined)?;
        of.check_lost(&uid).await?;
        Ok(Recovering { cluster: self, of, uid })
    }
}

impl Recovering<'_> {
    /// Returns the members of the last view of this server, without this one.
    #[must_use]
    pub fn others(&self) -> Vec<MemberId> {
        let view = self.cluster.view();
        view.members().filter(|id| *id != self.cluster.own_id()).cloned().collect()
    }

    /// Sends a request to members, and returns what each answered.
    pub async fn ask(
        &self,
        ids: &[MemberId],
        (method, path): (Method, &str),
        within: Duration,
    ) -> Vec<(MemberId, Result<Bytes, String>)> {
        let Some(peers) = self.cluster.peers() else { return Vec::new() };
        let (view, until) = (self.cluster.view(), Instant::now() + within);
        let domain = Domain::default_domain();
        let order = PeerOrder { method, path: path.to_owned(), domain, body: None };
        let calls = ids.iter().map(|id| {
            let (to, order) = (view.last_address(id), &order);
            async move {
                let answer = match &to {
                    Some(to) => {
                        peers.order(to, order, HELD_BYTES_MAX, until).await.map_err(|e| e.to_string())
                    }
                    None => Err("its URL is not known".to_owned()),
                };
                (id.clone(), answer)
            }
        });
        join_all(calls).await
    }

    /// Marks etcd, so that servers may write what they hold.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn begin(&self) -> Result<RecoveryMark, RecoverError> {
        self.of.begin_recovery(&self.uid).await
    }

    /// Puts the cluster in force, and waits for a moment until this server is in touch with it.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn commit(&self, mark: RecoveryMark, ring: &Ring) -> Result<(), RecoverError> {
        self.of.commit_recovery(mark, &self.uid, ring).await?;
        tracing::warn!(uid = self.uid, "the keys of the cluster are written back to etcd");
        let mut views = self.cluster.subscribe();
        let is_back = |view: &std::sync::Arc<ClusterView>| view.core.is_up(self.cluster.own_id());
        let joined = async {
            while !self.cluster.stats().is_coordinator_up || !is_back(&views.borrow_and_update()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(JOINED_WITHIN, joined).await.ok();
        Ok(())
    }
}
