//! The calls about a job and its epochs: declare, acknowledge, renew, checkpoint, roll back, state, receipt.

use super::{
    held::HeldLeases,
    lease::{AckToken, GrantRecord},
    loader::OwnLoader,
    rank_records::RankRecords,
};
use crate::call::Call;
use crate::client::{JSON_BYTES_MAX, to_json};
use crate::{Client, ClientError, body::BodyLength};
use bytes::Bytes;
use fletch_api::{
    Ack, Acked, Acks, Checkpoint, Code, Epoch, EpochReceipt, Job, JobLine, JobList, JobSettings, Loader,
    LostRank, MoveJob, MovedJobs, Reclaimed, Rollback, StartJob, WaitingJob, WorldSpec, epochs::ACKS_MAX,
    headers, routes,
};
use http::{Method, StatusCode};
use serde::Serialize;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::time::timeout;

/// The longest time for one request that releases leases. Most leases that it names would soon expire.
const RELEASE_WITHIN: Duration = Duration::from_secs(10);
/// The longest ledger or state that is received, in bytes.
const LEDGER_BYTES_MAX: u64 = (1 << 30) + (64 << 20);

/// A declared job and the leases that are held through it. Clones share both.
///
/// In a cluster one server has the job. The handle remembers it, and finds the next one when that server is
/// away. Of servers that are alone, all calls go to the one where the job was declared.
#[derive(Debug, Clone)]
pub struct JobHandle {
    pub(super) client: Client,
    pub(super) job: Arc<Job>,
    pub(super) held: Arc<HeldLeases>,
    pub(super) loader: Arc<OwnLoader>,
    pub(super) records: Arc<RankRecords>,
    /// The declaration, if this client made it.
    pub(super) declaration: Option<Arc<StartJob>>,
}

/// The jobs of a tenant at all servers of a cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JobsOfAll {
    /// The jobs that a server serves.
    pub jobs: Vec<JobLine>,
    /// The jobs whose server is away.
    pub waiting: Vec<WaitingJob>,
    /// The ids of the servers that did not answer.
    pub silent: Vec<String>,
}

impl Client {
    /// Declares a job. Returns the existing job if one with the same name and settings exists.
    ///
    /// # Errors
    /// [`ClientError`]; `job_differs` if a job of that name has other settings.
    pub async fn declare(&self, job: &StartJob) -> Result<JobHandle, ClientError> {
        let call = Call::new(Method::POST, routes::JOBS).json(to_json(job)?);
        let declared = job.clone();
        // Also if the server that had the job is gone: then another one of its cluster has it.
        let client = self.for_calls_of_job();
        let (server, job) = client.json(&call, &[StatusCode::OK, StatusCode::CREATED]).await?;
        let handle = self.pinned(server).job_handle(job);
        Ok(handle.with_declaration(declared))
    }

    /// Returns a job whose server is away, as its declaration says, without its epochs. Returns `None` if a
    /// server has the job.
    ///
    /// # Errors
    /// As [`Client::declare`].
    pub async fn describe(&self, job: &StartJob) -> Result<Option<Job>, ClientError> {
        let path = format!("{}?describe=true", routes::JOBS);
        let call = Call::new(Method::POST, path).json(to_json(job)?);
        let statuses = [StatusCode::OK, StatusCode::CREATED, StatusCode::ACCEPTED];
        let (_, job) = self.for_calls_of_job().json::<Job>(&call, &statuses).await?;
        Ok(job.is_away.then_some(job))
    }

    /// Returns the handle of an existing job.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if no job has that id.
    pub async fn job(&self, id: &str) -> Result<JobHandle, ClientError> {
        let (server, job) = self.json(&Call::get(routes::job(id)), &[StatusCode::OK]).await?;
        Ok(self.pinned(server).job_handle(job))
    }

    /// Returns a new handle of a job that the caller has already read. Sends no request; holds no lease yet.
    #[must_use]
    pub fn job_handle(&self, job: Job) -> JobHandle {
        let client = self.for_dataset(Some(&job.dataset)).for_calls_of_job();
        JobHandle {
            client,
            job: Arc::new(job),
            held: Arc::default(),
            loader: OwnLoader::of_process(),
            records: Arc::default(),
            declaration: None,
        }
    }

    /// Returns the jobs of the caller's tenant at one server: the one that answers first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn jobs(&self) -> Result<Vec<JobLine>, ClientError> {
        Ok(self.get_json::<JobList>(routes::JOBS).await?.jobs)
    }

    /// Returns the jobs of the caller's tenant at all servers of the cluster, sorted by name.
    ///
    /// # Errors
    /// [`ClientError`], if no server answers.
    pub async fn jobs_of_all(&self) -> Result<JobsOfAll, ClientError> {
        let (lists, silent) = self.of_all::<JobList>(routes::JOBS).await?;
        let (mut jobs, mut waiting) = (Vec::new(), Vec::new());
        for list in lists {
            jobs.extend(list.jobs);
            waiting.extend(list.waiting);
        }
        jobs.sort_by(|a: &JobLine, b| a.name.cmp(&b.name));
        jobs.dedup_by(|a, b| a.id == b.id);
        // A server that has seen less news than others may list a job that another one serves.
        waiting.retain(|of: &WaitingJob| jobs.iter().all(|job| job.id != of.id));
        waiting.sort_by(|a, b| a.name.cmp(&b.name));
        waiting.dedup_by(|a, b| a.id == b.id);
        Ok(JobsOfAll { jobs, waiting, silent })
    }

    /// Continues an epoch of a job from a state. If the job's server is gone, the state moves the job to
    /// another server of the cluster.
    ///
    /// # Errors
    /// [`ClientError`]; `conflict` if the job was declared with lists, which have to be declared again.
    pub async fn move_job(&self, id: &str, epoch: u64, state: Bytes) -> Result<Epoch, ClientError> {
        put_state(&self.for_calls_of_job(), id, epoch, state, true).await
    }

    /// Gives up the process of a rank of a job whose server is lost: what only that process knew to be
    /// consumed is delivered again. Returns which ranks the job still waits for.
    ///
    /// # Errors
    /// [`ClientError`]; `conflict` if the job waits for no rank.
    pub async fn lose_rank(&self, id: &str, rank: u32) -> Result<Reclaimed, ClientError> {
        let path = routes::job_lost(id);
        let client = self.for_calls_of_job();
        client.send_json(Method::POST, &path, &LostRank { rank }, &[StatusCode::OK]).await
    }

    /// Moves a job to another server of the cluster, with its ledgers, while its ranks run. The jobs that
    /// share its sweep move with it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn move_to(&self, id: &str, member: &str) -> Result<MovedJobs, ClientError> {
        let path = routes::job_move(id);
        let ask = MoveJob { to: member.to_owned() };
        self.for_calls_of_job().send_json(Method::POST, &path, &ask, &[StatusCode::OK]).await
    }

    /// Deletes a job and its ledgers.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn delete_job(&self, id: &str) -> Result<(), ClientError> {
        let path = routes::job(id);
        let call = Call::new(Method::DELETE, path);
        self.call(&call, &[StatusCode::NO_CONTENT], BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }
}

async fn put_state(
    client: &Client,
    id: &str,
    epoch: u64,
    state: Bytes,
    replace: bool,
) -> Result<Epoch, ClientError> {
    let path = format!("{}?replace={replace}", routes::epoch(id, epoch, "state"));
    let call = Call::new(Method::PUT, path).body(headers::LEDGER, state);
    client.json(&call, &[StatusCode::OK]).await.map(|answer| answer.1)
}

impl JobHandle {
    /// Returns the job as it was when this handle was made.
    #[must_use]
    pub fn info(&self) -> &Job {
        &self.job
    }

    /// Sets the loader that the requests of this handle carry.
    ///
    /// By default all handles of a process share one. Workers that get their leases' acks sent by another
    /// process carry the loader of that process.
    #[must_use]
    pub fn with_loader(mut self, loader: Loader) -> Self {
        self.loader = Arc::new(OwnLoader::new(loader));
        self
    }

    /// Sets the declaration of the job. Another server needs it if the job's server is lost, and if it has
    /// lists.
    #[must_use]
    pub fn with_declaration(mut self, spec: StartJob) -> Self {
        self.declaration = Some(Arc::new(spec));
        self
    }

    /// Sets the records of this process's ranks: those of an earlier handle of the job.
    #[must_use]
    pub fn with_records(mut self, records: Arc<RankRecords>) -> Self {
        self.records = records;
        self
    }

    /// Returns the records of this process's ranks.
    #[must_use]
    pub fn records(&self) -> &Arc<RankRecords> {
        &self.records
    }

    /// Notes that a batch is handed out to whoever consumes it. Returns `false` if its lease is void: another
    /// server has the job since, and delivers its samples again. Then release it, and consume none of it.
    ///
    /// A reader calls this by itself. A process that gets a batch from another process calls it.
    ///
    /// # Errors
    /// As [`JobHandle::join`].
    pub async fn hold(&self, token: &AckToken, grant: &GrantRecord) -> Result<bool, ClientError> {
        let AckToken { epoch, rank, .. } = *token;
        if self.records.needs_request(epoch, rank, grant) {
            self.join(epoch, rank).await?;
        }
        Ok(self.hold_now(token, grant))
    }

    /// As [`JobHandle::hold`], if that needs no request ([`RankRecords::needs_request`]).
    #[must_use]
    pub fn hold_now(&self, token: &AckToken, grant: &GrantRecord) -> bool {
        self.records.hold((token.epoch, token.rank, token.lease), grant)
    }

    /// Returns the loader that the requests of this handle carry.
    #[must_use]
    pub fn loader(&self) -> &Loader {
        self.loader.loader()
    }

    /// Gives a rank up, and with it all its leases: another process gets the rank and the samples at once.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn leave(&self, epoch: u64, rank: u32) -> Result<(), ClientError> {
        self.records.left(rank);
        let loader = Loader { leave: true, ..self.loader.for_request()? };
        let acks = Acks { rank, loader: Some(loader), ..Acks::default() };
        self.post_epoch::<Acked>(epoch, "acks", &acks).await.map(|_| ())
    }

    /// Returns the address of the server where the job lives, for [`Client::at`] in another process.
    #[must_use]
    pub fn server(&self) -> String {
        self.client.preferred()
    }

    /// Returns the leases that are held through this handle and its clones.
    #[must_use]
    pub fn held(&self) -> &Arc<HeldLeases> {
        &self.held
    }

    /// Returns the job as it is now, with its epochs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn current(&self) -> Result<Job, ClientError> {
        self.client.get_json(&routes::job(&self.job.id)).await
    }

    /// Changes the job's world. Setting the same world again changes nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_world(&self, world: WorldSpec) -> Result<Job, ClientError> {
        self.records.set_stale();
        let path = routes::job_world(&self.job.id);
        let changed = self.client.send_json(Method::PUT, &path, &world, &[StatusCode::OK]).await;
        self.join_again().await;
        changed
    }

    /// Begins a probe: the job gets cached samples only, until its most rate is known. Returns the job.
    ///
    /// # Errors
    /// [`ClientError`]; `bad_request` if the job cannot be probed now.
    pub async fn probe(&self) -> Result<Job, ClientError> {
        let path = routes::job_probe(&self.job.id);
        self.client.send_json(Method::POST, &path, &serde_json::json!({}), &[StatusCode::OK]).await
    }

    /// Replaces the job's settings. An absent setting gets its default.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_settings(&self, settings: &JobSettings) -> Result<Job, ClientError> {
        let path = routes::job_settings(&self.job.id);
        self.client.send_json(Method::PUT, &path, settings, &[StatusCode::OK]).await
    }

    /// Acknowledges the consumed entries of some leases. They are durable when this returns.
    ///
    /// The server applies all acks or none. After `lease_gone`, acknowledge each lease alone to learn which
    /// is gone.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn ack(&self, epoch: u64, rank: u32, acks: &[Ack]) -> Result<Acked, ClientError> {
        self.send_acks(epoch, &Acks { rank, acks: acks.to_vec(), ..Acks::default() }).await
    }

    /// Sends acks, releases and renewals of one rank in one request. A request without a loader gets the
    /// handle's.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn send_acks(&self, epoch: u64, acks: &Acks) -> Result<Acked, ClientError> {
        if acks.loader.is_some() {
            return self.post_acks(epoch, acks).await;
        }
        let acks = Acks { loader: Some(self.loader.for_request()?), ..acks.clone() };
        self.post_acks(epoch, &acks).await
    }

    async fn post_acks(&self, epoch: u64, acks: &Acks) -> Result<Acked, ClientError> {
        let path = routes::epoch(&self.job.id, epoch, "acks");
        let call = Call::new(Method::POST, path).json(to_json(acks)?).in_time();
        self.records.acking(epoch, acks.rank, &acks.acks);
        let acked = self.client.json(&call, &[StatusCode::OK]).await.map(|answer| answer.1);
        match &acked {
            Ok(_) => self.records.acked(epoch, acks.rank, &acks.acks),
            // Of several acks, the caller sends each alone.
            Err(error) if error.code() == Some(Code::LeaseGone) && acks.acks.len() == 1 => {
                self.records.ended(epoch, acks.rank, acks.acks[0].lease);
            }
            Err(_) => {}
        }
        for &lease in &acks.release {
            self.records.ended(epoch, acks.rank, lease);
        }
        acked
    }

    /// Renews every held lease and sends every release for as long as this future is polled. Run it beside
    /// whatever holds leases.
    ///
    /// Renews the leases that are held already at once, because their age is not known. Forgets a lease when
    /// its epoch or rank is gone, or another process has the rank. Retries after every other error. Returns
    /// only when the job is gone.
    ///
    /// # Errors
    /// [`ClientError`] with the code `not_found`.
    pub async fn keep_alive(&self) -> ClientError {
        tokio::select! {
            gone = self.renew_leases() => gone,
            never = self.send_releases() => match never {},
            never = self.reclaim_when_lost() => match never {},
        }
    }

    /// Tells the server of releases. A release that fails is given up: its leases expire.
    ///
    /// They travel alone, because a server of an earlier version rejects a request that has them.
    async fn send_releases(&self) -> Infallible {
        loop {
            let (epoch, rank, release) = self.held.next_releases(ACKS_MAX).await;
            let releases = Acks { rank, release, ..Acks::default() };
            let sent = timeout(RELEASE_WITHIN, self.send_acks(epoch, &releases)).await;
            let why = match sent {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {RELEASE_WITHIN:?}")),
            };
            if let Some(why) = why {
                let leases = releases.release.len();
                tracing::debug!(
                    job = %self.job.name, epoch, rank, leases, why, "could not release leases, so they expire"
                );
            }
            self.held.release_ended(epoch, rank, &releases.release);
        }
    }

    async fn renew_leases(&self) -> ClientError {
        let mut due = !self.held.is_empty();
        loop {
            if !std::mem::replace(&mut due, false) {
                self.held.due().await;
            }
            for (epoch, rank, renew) in self.held.renewals(ACKS_MAX) {
                let renewals = Acks { rank, renew, ..Acks::default() };
                match self.send_acks(epoch, &renewals).await {
                    Ok(answer) => {
                        for lease in answer.gone {
                            tracing::warn!(
                                job = %self.job.name, epoch, rank, lease,
                                "a held lease expired; the server delivers its samples again"
                            );
                            self.held.forget(epoch, rank, lease);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(job = %self.job.name, epoch, rank, %error, "could not renew leases");
                        let code = error.code();
                        if matches!(
                            code,
                            Some(
                                Code::NotFound
                                    | Code::EpochClosed
                                    | Code::BadRank
                                    | Code::RankInUse
                                    | Code::RankTaken
                            )
                        ) {
                            renewals.renew.iter().for_each(|&l| self.held.forget(epoch, rank, l));
                        }
                        // The epoch is gone; is the job gone too?
                        if code == Some(Code::NotFound)
                            && let Err(e) = self.current().await
                            && e.code() == Some(Code::NotFound)
                        {
                            return e;
                        }
                    }
                }
            }
        }
    }

    /// Returns the state of an epoch: everything that is needed to continue it on another server.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn state(&self, epoch: u64) -> Result<Bytes, ClientError> {
        self.get_log(epoch, "state").await
    }

    /// Returns the durable part of an epoch's ledger.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn ledger(&self, epoch: u64) -> Result<Bytes, ClientError> {
        self.get_log(epoch, "ledger").await
    }

    async fn get_log(&self, epoch: u64, what: &str) -> Result<Bytes, ClientError> {
        let path = routes::epoch(&self.job.id, epoch, what);
        self.client.call(&Call::get(path), &[StatusCode::OK], BodyLength::AtMost(LEDGER_BYTES_MAX)).await
    }

    /// Continues an epoch from a state.
    ///
    /// With `replace`, discards what the server has recorded since that state.
    ///
    /// # Errors
    /// [`ClientError`]; `state_differs`, `state_behind`.
    pub async fn put_state(&self, epoch: u64, state: Bytes, replace: bool) -> Result<Epoch, ClientError> {
        self.records.set_stale();
        let put = put_state(&self.client, &self.job.id, epoch, state, replace).await;
        self.join_again().await;
        put
    }

    /// Commits everything that is acknowledged now, under the number of a saved model checkpoint.
    ///
    /// A number that the server remembers changes nothing.
    ///
    /// # Errors
    /// [`ClientError`]; `no_commit` if the job's visitation is not `checkpoint`.
    pub async fn checkpoint(&self, epoch: u64, commit: u64) -> Result<Epoch, ClientError> {
        self.post_epoch(epoch, "checkpoint", &Checkpoint { commit }).await
    }

    /// Rolls the job back to a commit of this epoch, or to its latest commit if `commit` is `None`.
    ///
    /// The server delivers again what was acknowledged after the commit, and deletes every later epoch.
    ///
    /// # Errors
    /// [`ClientError`]; `no_commit`.
    pub async fn rollback(&self, epoch: u64, commit: Option<u64>) -> Result<Epoch, ClientError> {
        self.records.set_stale();
        let rolled_back = self.post_epoch(epoch, "rollback", &Rollback { commit }).await;
        self.join_again().await;
        rolled_back
    }

    async fn post_epoch<T: serde::de::DeserializeOwned>(
        &self,
        epoch: u64,
        what: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let path = routes::epoch(&self.job.id, epoch, what);
        self.client.send_json(Method::POST, &path, body, &[StatusCode::OK]).await
    }

    /// Returns the receipt of a finished epoch.
    ///
    /// [`super::ReceivedSum::agrees`] compares it with what was received.
    ///
    /// # Errors
    /// [`ClientError`]; `epoch_open` before the epoch is finished.
    pub async fn receipt(&self, epoch: u64) -> Result<EpochReceipt, ClientError> {
        self.client.get_json(&routes::epoch(&self.job.id, epoch, "receipt")).await
    }
}
