//! A member of a cluster that etcd coordinates: the part that waits. `steps.rs` decides.
//!
//! I1. One task reads snapshots, writes, and publishes views, so views come in the order of the snapshots.
//! I2. News of a watch only wakes that task. It also reads every third of `member_ttl`, so a watch that is
//!     silently dead delays a view and never loses one.
//! I3. After a failed call the view stays, and the next round begins within [`RETRY_AFTER`].
//! I4. A renewal counts for the tenure once the own key was read back under the renewed lease.

use super::{
    ClusterError, ClusterStats, NotReady,
    etcd::{Etcd, EtcdError, KeyValue, Op},
    history::{History, HistoryPoint},
    identity::{self, Identity},
    records::{
        ClusterRecord, Keyed, Keys, MemberPhase, MemberRecord, PEER_PROTOCOL, Snapshot, from_text, to_text,
    },
    settings::EtcdConfig,
    steps::{OwnMember, Refusal, Step, next_step},
    tenure::{Tenure, Tenures},
    view::ClusterView,
};
use fletch_core::{
    MemberId,
    cluster::{Silence, Weight},
};
use fletch_host::clock::BootTime;
use parking_lot::Mutex;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

/// How soon a failed round is tried again, and a broken watch opened again.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// The most steps of one round. Others write, too, so a round may have to read again.
const STEPS_MAX: usize = 32;
/// How often a server that waits for etcd says so in the log.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// The longest time for leaving at a stop.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a drain waits until this server sees it.
const DRAIN_SEEN_WITHIN: Duration = Duration::from_secs(2);

/// Why a round did not end.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the record {0} cannot be used: {1}")]
    Record(String, String),
    #[error("other servers changed the ring at every try")]
    Contended,
}

/// What the members of a cluster share by etcd, beside the view.
#[derive(Clone)]
pub struct SharedKeys {
    /// The client.
    pub etcd: Arc<Etcd>,
    /// The keys of the cluster.
    pub keys: Keys,
    /// How long a silent member counts as up.
    pub member_ttl: Duration,
}

impl SharedKeys {
    /// Checks that etcd has the cluster with the uid `joined`. Returns the revision of its record, and that
    /// of etcd. `None`: etcd has another cluster, or was wiped.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub async fn check_cluster(&self, joined: &str) -> Result<Option<(u64, u64)>, EtcdError> {
        let read = Op::Read { key: self.keys.cluster(), is_prefix: false };
        let found = self.etcd.transact(&[], &[read]).await?;
        let record = found.reads.first().and_then(|kvs| kvs.first());
        let is_joined =
            |kv: &&KeyValue| from_text::<ClusterRecord>(&kv.value).is_ok_and(|there| there.uid == joined);
        Ok(record.filter(is_joined).map(|kv| (kv.mod_revision, found.revision)))
    }
}

/// Why a member was not drained.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// The server is alone.
    #[error("this server is its only member: cluster.coordinator is embedded")]
    Embedded,
    /// The ring has no such member.
    #[error("the ring has no member {0}")]
    NoMember(MemberId),
    /// The coordinator did not do it.
    #[error("the ring was not changed: {0}")]
    Failed(String),
}

/// What is known of the contact with etcd.
#[derive(Debug)]
struct Contact {
    /// Whether the server was in the cluster, now or before it started.
    joined: bool,
    is_up: bool,
    last: Instant,
    logged: Option<Instant>,
    failure: String,
}

/// The lease of this process.
#[derive(Debug, Default)]
struct Session {
    /// The lease, and the revision of the own record under it.
    lease: Option<(i64, u64)>,
    renewed: Option<BootTime>,
    silence: Silence,
}

/// A member of a cluster that etcd coordinates.
pub struct EtcdMember {
    etcd: Arc<Etcd>,
    keys: Keys,
    dir: PathBuf,
    member_ttl: Duration,
    forget_after: Duration,
    stale_max: Option<Duration>,
    weight: Option<u32>,
    started: Instant,
    identity: Mutex<Identity>,
    own: Mutex<OwnMember>,
    contact: Mutex<Contact>,
    session: tokio::sync::Mutex<Session>,
    tenures: Tenures,
    history: Arc<History>,
    news: Notify,
    views: watch::Sender<Arc<ClusterView>>,
}

impl EtcdMember {
    /// Opens the identity and the last view of a state directory. Blocking.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn open(
        id: &MemberId,
        config: &EtcdConfig,
        dir: &Path,
        own_url: &str,
    ) -> Result<(Self, watch::Receiver<Arc<ClusterView>>), ClusterError> {
        let etcd = Arc::new(Etcd::new(config)?);
        let identity = Identity::open(dir, &config.cluster, id)?;
        let record = MemberRecord {
            incarnation: identity.incarnation.clone(),
            url: own_url.to_owned(),
            peer_url: config.peer_url.clone(),
            zone: config.zone.clone(),
            build: env!("CARGO_PKG_VERSION").to_owned(),
            peer_protocol: PEER_PROTOCOL,
            phase: MemberPhase::Up,
            process: identity::random_hex(),
            place: identity::place(dir),
            needs_token: Some(config.needs_token),
        };
        let last = identity.uid.as_ref().and_then(|_| identity::last_view(dir));
        let joined = last.is_some();
        let view = match last {
            Some(view) => view.with_own(id, record.clone()),
            None => ClusterView::waiting(id.clone(), record.clone()),
        };
        let (views, receiver) = watch::channel(Arc::new(view));
        let own = OwnMember {
            id: id.clone(),
            uid: identity.uid.clone(),
            record,
            weight: Weight::Unknown,
            starts: true,
        };
        let now = Instant::now();
        let failure = "etcd was not asked yet".to_owned();
        let member = EtcdMember {
            etcd,
            keys: Keys::new(&config.cluster),
            dir: dir.to_owned(),
            member_ttl: config.member_ttl,
            forget_after: config.forget_after,
            stale_max: config.stale_max,
            weight: config.weight,
            started: now,
            identity: Mutex::new(identity),
            own: Mutex::new(own),
            contact: Mutex::new(Contact { joined, is_up: false, last: now, logged: None, failure }),
            session: tokio::sync::Mutex::default(),
            tenures: Tenures::new(config.member_ttl),
            history: Arc::new(History::open(dir)),
            news: Notify::new(),
            views,
        };
        Ok((member, receiver))
    }

    pub fn not_ready(&self) -> Option<NotReady> {
        let contact = self.contact.lock();
        let what = match self.stale_max {
            _ if !contact.joined => "the server has not joined its cluster yet",
            Some(max) if contact.last.elapsed() > max => {
                "the server's view of its cluster is older than cluster.stale_max"
            }
            _ => return None,
        };
        Some(NotReady { what, failure: contact.failure.clone() })
    }

    /// Returns whether there was no contact with etcd for `cluster.stale_max`.
    pub fn is_stale(&self) -> bool {
        self.stale_max.is_some_and(|max| self.contact.lock().last.elapsed() > max)
    }

    pub fn shared_keys(&self) -> SharedKeys {
        let (etcd, keys, member_ttl) = (Arc::clone(&self.etcd), self.keys.clone(), self.member_ttl);
        SharedKeys { etcd, keys, member_ttl }
    }

    /// Returns the random number of the own state directory.
    pub fn incarnation(&self) -> String {
        self.own.lock().record.incarnation.clone()
    }

    /// Returns the tenure, if it lasts now.
    pub fn tenure(&self) -> Option<Tenure> {
        self.tenures.now()
    }

    /// Returns the numbers of the tenures as they begin.
    pub fn tenures(&self) -> watch::Receiver<u64> {
        self.tenures.numbers()
    }

    /// Returns the uid of the cluster that this server has joined.
    pub fn uid(&self) -> Option<String> {
        self.own.lock().uid.clone()
    }

    /// Notes that etcd lost changes.
    pub fn note_history_loss(&self) {
        self.history.note_loss();
    }

    pub fn stats(&self) -> ClusterStats {
        let is_coordinator_up = self.contact.lock().is_up;
        let (failed_calls, history_losses) = (self.etcd.failed(), self.history.losses());
        ClusterStats { is_coordinator_up, failed_calls, history_losses }
    }

    /// Tries once to join. Returns an error only if the cluster refuses this server.
    pub async fn join_first(&self, weight: Weight) -> Result<(), Refusal> {
        self.own.lock().weight = self.weight.map_or(weight, Weight::Exact);
        let mut session = self.session.lock().await;
        match self.round(&mut session).await {
            // etcd lost the keys. The server goes on as it does without etcd, so that it can write them back.
            Err(RoundError::Refused(Refusal::Emptied(_))) => Ok(()),
            Err(RoundError::Refused(refusal)) => Err(refusal),
            // The failure is logged, and `run` goes on.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub async fn run(&self, stop: CancellationToken) {
        let mut session = self.session.lock().await;
        let keep = async {
            loop {
                let wait = match self.round(&mut session).await {
                    Ok(()) => self.member_ttl / 3,
                    Err(_) => RETRY_AFTER,
                };
                tokio::select! {
                    () = self.news.notified() => {}
                    () = tokio::time::sleep(wait) => {}
                }
            }
        };
        let watch = async {
            let keys = [(self.keys.ring(), false), (self.keys.members(), true)];
            loop {
                let ended = self.watch(&keys).await;
                self.news.notify_one();
                if let Err(error) = ended {
                    tracing::debug!(%error, "the watch of the cluster is opened again");
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = keep => {}
            () = watch => {}
        }
        if tokio::time::timeout(LEAVE_TIMEOUT, self.leave(&session)).await.is_err() {
            tracing::warn!(
                "etcd did not answer at the stop; the other servers see it after cluster.member_ttl"
            );
        }
    }

    /// Wakes the task that reads at each change, until the watch ends.
    async fn watch(&self, keys: &[(String, bool)]) -> Result<(), EtcdError> {
        let mut watch = self.etcd.watch(keys).await?;
        while watch.next().await?.is_some() {
            self.news.notify_one();
        }
        Ok(())
    }

    /// Renews the lease if that is due, writes what is due, and publishes the view.
    async fn round(&self, session: &mut Session) -> Result<(), RoundError> {
        let done = self.settle(session).await;
        match &done {
            Ok(()) => self.reached(),
            Err(e) => self.failed(&e.to_string()),
        }
        done
    }

    async fn settle(&self, session: &mut Session) -> Result<(), RoundError> {
        let is_due = session.renewed.is_none_or(|at| at.elapsed() >= self.member_ttl / 3);
        if let (Some((lease, _)), true) = (session.lease, is_due) {
            let sent = BootTime::now();
            if self.etcd.keep_alive(lease).await? {
                session.renewed = Some(sent);
            } else {
                tracing::warn!("the lease of this member has ended; it gets another one");
                session.lease = None;
                self.tenures.end();
            }
        }
        for _ in 0..STEPS_MAX {
            let (snapshot, history) = self.read().await?;
            if self.history.note(history) {
                let history = Arc::clone(&self.history);
                tokio::task::spawn_blocking(move || history.keep()).await.ok();
            }
            let view = ClusterView::from(&snapshot);
            let drained = view.core.ring().drained().iter().filter(|id| !view.core.is_up(id));
            let silent = view.core.silent().chain(drained);
            session.silence.observe(self.started.elapsed(), self.member_ttl, silent);
            let gone = session.silence.longer_than(self.forget_after);
            let own = self.own.lock().clone();
            let step = next_step(&own, &snapshot, session.lease, &gone)?;
            if let (Some((_, put_at)), Some(sent)) = (session.lease, session.renewed)
                && snapshot.members.get(&own.id).is_some_and(|there| there.revision == put_at)
            {
                self.tenures.renew(put_at, sent);
            }
            if step == Step::Settled {
                self.publish(snapshot.cluster, view).await;
                return Ok(());
            }
            if let (Step::ChangeRing(..), [_, ..]) = (&step, &gone[..]) {
                tracing::warn!(members = ?gone, "members were silent for too long and leave the ring");
            }
            self.execute(session, &own, step).await?;
        }
        Err(RoundError::Contended)
    }

    async fn execute(&self, session: &mut Session, own: &OwnMember, step: Step) -> Result<(), EtcdError> {
        let put = |key, value, lease| [Op::Put { key, value, lease }];
        match step {
            Step::Settled => {}
            Step::Create => {
                let (key, record) = (self.keys.cluster(), ClusterRecord { uid: identity::random_hex() });
                let compare = [(key.clone(), 0), (self.keys.recovering(), 0)];
                self.etcd.transact(&compare, &put(key, to_text(&record), 0)).await?;
            }
            Step::Grant => {
                let sent = BootTime::now();
                session.lease = Some((self.etcd.grant(self.member_ttl).await?, 0));
                session.renewed = Some(sent);
            }
            Step::Put(seen) => {
                let Some((lease, _)) = session.lease else { return Ok(()) };
                let key = self.keys.member(&own.id);
                let ops = put(key.clone(), to_text(&own.record), lease);
                match self.etcd.transact(&[(key, seen)], &ops).await {
                    Ok(done) if done.succeeded => session.lease = Some((lease, done.revision)),
                    Ok(_) => {}
                    // The lease ended between its renewal and the write.
                    Err(EtcdError::Rejected { .. }) if session.renewed.is_some() => {
                        (session.lease, session.renewed) = (None, None);
                        self.tenures.end();
                    }
                    Err(e) => return Err(e),
                }
            }
            Step::ChangeRing(seen, ring) => {
                let key = self.keys.ring();
                self.etcd.transact(&[(key.clone(), seen)], &put(key, to_text(&ring), 0)).await?;
            }
        }
        Ok(())
    }

    /// Reads all keys of the cluster at one revision. Returns them with that point of etcd's history.
    async fn read(&self) -> Result<(Snapshot, HistoryPoint), RoundError> {
        let one = |key| Op::Read { key, is_prefix: false };
        let members = Op::Read { key: self.keys.members(), is_prefix: true };
        let found =
            self.etcd.transact(&[], &[one(self.keys.cluster()), one(self.keys.ring()), members]).await?;
        let bad = |kv: &KeyValue, why| RoundError::Record(String::from_utf8_lossy(&kv.key).into_owned(), why);
        let mut snapshot = Snapshot::default();
        for (at, kv) in
            found.reads.iter().enumerate().flat_map(|(at, kvs)| kvs.iter().map(move |kv| (at, kv)))
        {
            match at {
                0 => snapshot.cluster = Some(from_text(&kv.value).map_err(|e| bad(kv, e))?),
                1 => {
                    let value = from_text(&kv.value).map_err(|e| bad(kv, e))?;
                    snapshot.ring = Keyed { revision: kv.mod_revision, value };
                }
                _ => {
                    let id = String::from_utf8_lossy(&kv.key[self.keys.members().len()..]).into_owned();
                    let id = MemberId::new(&id).map_err(|e| bad(kv, e.to_string()))?;
                    // A member of a newer build is no member that this server can use.
                    match from_text::<MemberRecord>(&kv.value) {
                        Ok(value) => {
                            snapshot.members.insert(id, Keyed { revision: kv.mod_revision, value });
                        }
                        Err(error) => tracing::warn!(%id, %error, "a member has a record of another format"),
                    }
                }
            }
        }
        Ok((snapshot, found.history))
    }

    /// Puts a view in force, and keeps it for the next start.
    async fn publish(&self, cluster: Option<ClusterRecord>, view: ClusterView) {
        self.own.lock().starts = false;
        let uid = cluster.map(|c| c.uid);
        let changed = {
            let mut identity = self.identity.lock();
            let is_new = identity.uid != uid;
            identity.uid.clone_from(&uid);
            is_new.then(|| identity.clone())
        };
        self.own.lock().uid = uid;
        let before = Arc::clone(&self.views.borrow());
        if changed.is_none() && *before == view {
            return;
        }
        tracing::info!(
            view = view.core.number(),
            members = view.core.ring().members().len(),
            up = view.core.up().len(),
            "the view of the cluster changed"
        );
        let view = Arc::new(view);
        self.views.send_replace(Arc::clone(&view));
        let dir = self.dir.clone();
        let kept = tokio::task::spawn_blocking(move || {
            if let Some(Err(error)) = changed.map(|identity| identity.record(&dir)) {
                tracing::warn!(%error, "the cluster is not remembered for the next start");
            }
            identity::keep_view(&dir, &view);
        });
        if let Err(error) = kept.await {
            tracing::warn!(%error, "the view of the cluster is not kept for the next start");
        }
    }

    fn reached(&self) {
        let mut contact = self.contact.lock();
        if !contact.is_up {
            tracing::info!(
                view = self.views.borrow().core.number(),
                "this server is in touch with its cluster"
            );
        }
        contact.joined = true;
        contact.is_up = true;
        contact.last = Instant::now();
        contact.logged = None;
    }

    fn failed(&self, why: &str) {
        let mut contact = self.contact.lock();
        contact.is_up = false;
        contact.failure = why.to_owned();
        if contact.logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            contact.logged = Some(Instant::now());
            let now = if contact.joined { "the last view stays in force" } else { "the server is not ready" };
            tracing::warn!("no contact with the cluster: {why}; {now}, and the server tries again");
        }
    }

    /// Marks this member as restarting, and gives its lease back. A drained member just goes.
    async fn leave(&self, session: &Session) {
        let Some((lease, put_at)) = session.lease else { return };
        // The key may be gone before the last requests have ended.
        self.tenures.end();
        let own = self.own.lock().clone();
        let left = async {
            if !self.views.borrow().core.ring().drained().contains(&own.id) {
                let rest = self.etcd.grant(self.forget_after).await?;
                let record = MemberRecord { phase: MemberPhase::Restarting, ..own.record };
                let key = self.keys.member(&own.id);
                let put = Op::Put { key: key.clone(), value: to_text(&record), lease: rest };
                self.etcd.transact(&[(key, put_at)], &[put]).await?;
            }
            self.etcd.revoke(lease).await?;
            // It serves nothing from here on, so nobody needs to wait for it, or to name it.
            let seen = Op::Delete { key: self.keys.seen(&own.id) };
            self.etcd.transact(&[], &[seen]).await.map(drop)
        };
        if let Err(error) = left.await {
            tracing::warn!(%error, "the other servers see this stop after cluster.member_ttl");
        }
    }

    /// Forgets a member that left the ring before, and is not up: nobody names it any more.
    async fn forget(&self, id: &MemberId, snapshot: &Snapshot) -> Result<(), DrainError> {
        let failed = |e: EtcdError| DrainError::Failed(e.to_string());
        let key = self.keys.seen(id);
        let read = [Op::Read { key: key.clone(), is_prefix: false }];
        let found = self.etcd.transact(&[], &read).await.map_err(failed)?;
        let is_known = found.reads.first().is_some_and(|kvs| !kvs.is_empty());
        if !is_known || snapshot.members.contains_key(id) {
            return Err(DrainError::NoMember(id.clone()));
        }
        self.etcd.transact(&[(self.keys.member(id), 0)], &[Op::Delete { key }]).await.map_err(failed)?;
        Ok(())
    }

    pub async fn drain(&self, id: &MemberId) -> Result<(), DrainError> {
        let failed = |e: &dyn std::fmt::Display| DrainError::Failed(e.to_string());
        for _ in 0..STEPS_MAX {
            let (snapshot, _) = self.read().await.map_err(|e| failed(&e))?;
            if snapshot.cluster.as_ref().map(|c| &c.uid) != self.own.lock().uid.as_ref() {
                return Err(DrainError::Failed("etcd has another cluster now".to_owned()));
            }
            let ring = &snapshot.ring.value;
            if ring.drained().contains(id) {
                return Ok(());
            }
            let Some(next) = ring.with_drained(id) else { return self.forget(id, &snapshot).await };
            let key = self.keys.ring();
            let put = Op::Put { key: key.clone(), value: to_text(&next), lease: 0 };
            let done = self.etcd.transact(&[(key, snapshot.ring.revision)], &[put]).await;
            if done.map_err(|e| failed(&e))?.succeeded {
                self.news.notify_one();
                let mut views = self.views.subscribe();
                let seen = views.wait_for(|view| view.core.ring().drained().contains(id));
                // The ring is changed, whether this server has seen it or not.
                tokio::time::timeout(DRAIN_SEEN_WITHIN, seen).await.ok();
                return Ok(());
            }
        }
        Err(failed(&RoundError::Contended))
    }
}
