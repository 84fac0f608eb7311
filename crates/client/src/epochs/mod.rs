//! Epochs over the wire: declare a job, receive leases, acknowledge, keep what proves it (`docs/EPOCHS.md`).
//!
//! ```text
//! Client::declare ─► JobHandle ─► reader(epoch, rank, worker) ─► next(want) ─► LeaseBatch { token, samples }
//!                       │                                                        │ consumed
//!                       └─ ack(epoch, rank, [token.ack()]) ◀─────────────────────┘      Received::add(samples)
//! ```
//!
//! 1. (I1) A sample is handed out only when each of its files hashes to what the server says it is; that this is what
//!    the version has is what the receipt proves.
//! 2. (I2) A batch is one lease, whole. A cut stream is asked for again with the same sequence number; if the lease is
//!    gone by then, what was received of it is dropped and not handed out.
//! 3. A lease that was handed out is held until it is acknowledged or [`Held::drop_lease`]d: whoever holds leases runs
//!    [`JobHandle::keep_alive`] beside, or they expire. One that was not handed out is not held.

mod held;
mod reader;
mod received;
mod stream;

pub use held::Held;
pub use reader::{EpochReader, LeaseBatch, LeasedSample, Next, Token};
pub use received::Received;

use crate::{Client, ClientError, body::Length, client::JSON_BYTES_MAX};
use bytes::Bytes;
use fletch_api::{
    Ack, Acked, Acks, Checkpoint, Code, EpochReceipt, Job, JobLine, JobList, Rollback, StartJob, WorldSpec,
    epochs::ACKS_MAX, headers, routes,
};
use http::{Method, StatusCode, header};
use std::sync::Arc;

/// No ledger is longer, in bytes.
const LEDGER_BYTES_MAX: u64 = (1 << 30) + (64 << 20);

/// A declared job. Cloning shares what it holds.
#[derive(Debug, Clone)]
pub struct JobHandle {
    client: Client,
    job: Arc<Job>,
    held: Arc<Held>,
}

impl Client {
    /// Declares a job, or finds the one that was declared so.
    ///
    /// # Errors
    /// [`ClientError`]; `job_differs` when one of that name has other settings.
    pub async fn declare(&self, what: &StartJob) -> Result<JobHandle, ClientError> {
        let body = serde_json::to_vec(what).map_err(|e| ClientError::Config(e.to_string()))?;
        let want = [StatusCode::OK, StatusCode::CREATED];
        let request = || self.json_request(Method::POST, routes::JOBS, body.clone());
        let bytes = self.call(request, &want, Length::AtMost(JSON_BYTES_MAX)).await?;
        Ok(self.declared(self.parse(&bytes)?))
    }

    /// A job that was declared.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` when there is none of that id.
    pub async fn job(&self, id: &str) -> Result<JobHandle, ClientError> {
        Ok(self.declared(self.get_json(&routes::job(id)).await?))
    }

    /// A job as it was when it was declared. Nobody is asked, and nothing is held through it yet.
    #[must_use]
    pub fn declared(&self, job: Job) -> JobHandle {
        JobHandle { client: self.clone(), job: Arc::new(job), held: Arc::default() }
    }

    /// The tenant's jobs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn jobs(&self) -> Result<Vec<JobLine>, ClientError> {
        Ok(self.get_json::<JobList>(routes::JOBS).await?.jobs)
    }

    /// Forgets a job and its ledgers.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn delete_job(&self, id: &str) -> Result<(), ClientError> {
        let path = routes::job(id);
        let request = || self.request(Method::DELETE, &path);
        self.call(request, &[StatusCode::NO_CONTENT], Length::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }
}

impl JobHandle {
    /// The job as it was when it was declared or asked for.
    #[must_use]
    pub fn info(&self) -> &Job {
        &self.job
    }

    /// The leases that are held through this handle and its clones.
    #[must_use]
    pub fn held(&self) -> &Arc<Held> {
        &self.held
    }

    /// The job as it is now, with its epochs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn now(&self) -> Result<Job, ClientError> {
        self.client.get_json(&routes::job(&self.job.id)).await
    }

    /// Changes who shares a step. The same world again changes nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn world(&self, world: WorldSpec) -> Result<Job, ClientError> {
        let body = serde_json::to_vec(&world).map_err(|e| ClientError::Config(e.to_string()))?;
        let path = routes::job_world(&self.job.id);
        let request = || self.client.json_request(Method::PUT, &path, body.clone());
        let bytes = self.client.call(request, &[StatusCode::OK], Length::AtMost(JSON_BYTES_MAX)).await?;
        self.client.parse(&bytes)
    }

    /// One worker's side of an epoch.
    #[must_use]
    pub fn reader(&self, epoch: u64, rank: u32, worker: u32) -> EpochReader {
        EpochReader::new(self.clone(), epoch, rank, worker)
    }

    /// Acknowledges what was consumed: of each lease so many entries from its first. When this returns it is durable. All
    /// of it or nothing; on `lease_gone` acknowledge one by one to learn which.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn ack(&self, epoch: u64, rank: u32, acks: &[Ack]) -> Result<Acked, ClientError> {
        self.send_acks(epoch, &Acks { rank, acks: acks.to_vec(), renew: Vec::new() }).await
    }

    /// Acks and renewals as they are.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn send_acks(&self, epoch: u64, what: &Acks) -> Result<Acked, ClientError> {
        let body = serde_json::to_vec(what).map_err(|e| ClientError::Config(e.to_string()))?;
        let path = routes::epoch(&self.job.id, epoch, "acks");
        let request = || self.client.json_request(Method::POST, &path, body.clone());
        let bytes = self.client.call(request, &[StatusCode::OK], Length::AtMost(JSON_BYTES_MAX)).await?;
        self.client.parse(&bytes)
    }

    /// Renews every held lease for as long as this is polled, at once those that are held already: how old they are is not
    /// known. Run it beside whatever holds leases. It returns only
    /// when the server says that the job is gone; leases of an epoch or a rank that is gone are held no more.
    ///
    /// # Errors
    /// [`ClientError`] `not_found`; everything else is tried again.
    pub async fn keep_alive(&self) -> ClientError {
        let mut due = !self.held.is_empty();
        loop {
            if !std::mem::replace(&mut due, false) {
                self.held.due().await;
            }
            for (epoch, rank, renew) in self.held.chunks(ACKS_MAX) {
                let what = Acks { rank, acks: Vec::new(), renew };
                match self.send_acks(epoch, &what).await {
                    Ok(answer) => {
                        for lease in answer.gone {
                            tracing::warn!(job = %self.job.name, epoch, rank, lease, "a lease expired while it was held; what it has is delivered again");
                            self.held.drop_lease(epoch, rank, lease);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(job = %self.job.name, epoch, rank, %error, "leases were not renewed");
                        let code = error.code();
                        if matches!(code, Some(Code::NotFound | Code::EpochClosed | Code::BadRank)) {
                            what.renew.iter().for_each(|&l| self.held.drop_lease(epoch, rank, l));
                        }
                        // Of the epoch, or of the whole job?
                        if code == Some(Code::NotFound)
                            && let Err(e) = self.now().await
                            && e.code() == Some(Code::NotFound)
                        {
                            return e;
                        }
                    }
                }
            }
        }
    }

    /// The epoch's self-contained state.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn state(&self, epoch: u64) -> Result<Bytes, ClientError> {
        self.get_log(epoch, "state").await
    }

    /// The epoch's ledger, as far as it is durable.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn ledger(&self, epoch: u64) -> Result<Bytes, ClientError> {
        self.get_log(epoch, "ledger").await
    }

    async fn get_log(&self, epoch: u64, what: &str) -> Result<Bytes, ClientError> {
        let path = routes::epoch(&self.job.id, epoch, what);
        let request = || self.client.request(Method::GET, &path);
        self.client.call(request, &[StatusCode::OK], Length::AtMost(LEDGER_BYTES_MAX)).await
    }

    /// Continues an epoch from a state. `replace`: what was delivered since is forgotten.
    ///
    /// # Errors
    /// [`ClientError`]; `state_differs`, `state_behind`.
    pub async fn put_state(
        &self,
        epoch: u64,
        state: Bytes,
        replace: bool,
    ) -> Result<fletch_api::Epoch, ClientError> {
        let path = format!("{}?replace={replace}", routes::epoch(&self.job.id, epoch, "state"));
        let request = || {
            self.client
                .request(Method::PUT, &path)
                .header(header::CONTENT_TYPE, headers::LEDGER)
                .body(state.clone())
        };
        let bytes = self.client.call(request, &[StatusCode::OK], Length::AtMost(JSON_BYTES_MAX)).await?;
        self.client.parse(&bytes)
    }

    /// The model was saved: what is acknowledged now is committed under this number. The same number again changes nothing.
    ///
    /// # Errors
    /// [`ClientError`]; `no_commit` when the job's visitation is not `checkpoint`.
    pub async fn checkpoint(&self, epoch: u64, commit: u64) -> Result<fletch_api::Epoch, ClientError> {
        self.post_epoch(epoch, "checkpoint", &Checkpoint { commit }).await
    }

    /// The model went back to a commit of this epoch, the latest unless one is named: what was acknowledged after it is
    /// delivered again, and later epochs have not begun.
    ///
    /// # Errors
    /// [`ClientError`]; `no_commit`.
    pub async fn rollback(&self, epoch: u64, commit: Option<u64>) -> Result<fletch_api::Epoch, ClientError> {
        self.post_epoch(epoch, "rollback", &Rollback { commit }).await
    }

    async fn post_epoch(
        &self,
        epoch: u64,
        what: &str,
        body: &impl serde::Serialize,
    ) -> Result<fletch_api::Epoch, ClientError> {
        let body = serde_json::to_vec(body).map_err(|e| ClientError::Config(e.to_string()))?;
        let path = routes::epoch(&self.job.id, epoch, what);
        let request = || self.client.json_request(Method::POST, &path, body.clone());
        let bytes = self.client.call(request, &[StatusCode::OK], Length::AtMost(JSON_BYTES_MAX)).await?;
        self.client.parse(&bytes)
    }

    /// The receipt of a finished epoch; [`Received::agrees`] says whether it is proof.
    ///
    /// # Errors
    /// [`ClientError`]; `epoch_open` before its end.
    pub async fn receipt(&self, epoch: u64) -> Result<EpochReceipt, ClientError> {
        self.client.get_json(&routes::epoch(&self.job.id, epoch, "receipt")).await
    }
}
