//! Reclaims a job whose server is lost, by itself and in the background (`docs/EPOCHS.md`, "A lost server").

use super::{JobHandle, rank_records::JoinedJob};
use crate::call::Call;
use crate::client::to_json;
use crate::{ClientError, body::BodyLength};
use fletch_api::{Acked, Acks, Code, JobList, PlanBase, Reclaim, Reclaimed, StartJob, Visitation, routes};
use http::{Method, StatusCode};
use std::{convert::Infallible, time::Duration};
use tokio::time::{Instant, sleep, timeout};

/// How often a rank shows the job's server that it lives, so that it notices soon when the server is lost.
const SIGN_EVERY: Duration = Duration::from_secs(3);
/// The longest time for a sign of life, and for one reclaim.
const CALL_WITHIN: Duration = Duration::from_secs(5);
/// The first and the longest pause between two reclaims.
const PAUSE_FIRST: Duration = Duration::from_millis(300);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often a wait for other ranks is logged.
const LOG_EVERY: Duration = Duration::from_secs(30);
/// The longest record of a rank, in bytes.
const RECORD_BYTES_MAX: u64 = 1 << 30;

/// How a reclaim ended.
enum Ended {
    /// The job is served, by this term.
    Served,
    /// Other ranks have to reclaim, too.
    WaitsFor(Vec<u32>),
    /// No server takes the job now. One of them may have noted what this process said.
    NotNow,
}

impl JobHandle {
    /// Begins to keep a record of a rank: this process acknowledges for it from now on, and no other one
    /// does.
    ///
    /// If the job's server is lost with its disks, [`JobHandle::keep_alive`] gives the record to the next
    /// server, and the epoch goes on. Does nothing for a server that is alone. Call it before the first lease
    /// of each epoch.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn join(&self, epoch: u64, rank: u32) -> Result<(), ClientError> {
        self.records.joining(epoch, rank);
        let path = format!("{}?rank={rank}", routes::epoch(&self.job.id, epoch, "record"));
        let call = Call::get(path).in_time();
        let record = self.client.call(&call, &[StatusCode::OK], BodyLength::AtMost(RECORD_BYTES_MAX)).await;
        let record = match record {
            Ok(bytes) => Some(bytes),
            // The epoch begins with its first lease.
            Err(error) if error.code() == Some(Code::NotFound) => None,
            // The caller asks again. Meanwhile this process can say that it had nothing as this rank.
            Err(error) if error.retryable() => return Err(error),
            Err(error) => {
                self.records.joins_not(rank);
                // A server that is alone: its ledger is all there is.
                return if error.code() == Some(Code::Conflict) { Ok(()) } else { Err(error) };
            }
        };
        let of_job = JoinedJob {
            entries: self.job.entries,
            acks_ahead: self.job.visitation == Visitation::AtMostOnce,
            term: self.client.job_term().unwrap_or(0),
        };
        self.records.joined((epoch, rank), record.as_deref(), of_job)
    }

    /// Joins again as every rank of this process, because the job returned to a state or changed its world.
    pub(super) async fn join_again(&self) {
        for (rank, epoch) in self.records.ranks() {
            if let Err(error) = self.join(epoch, rank).await {
                // The next batch that is handed out joins again.
                tracing::debug!(job = %self.job.name, rank, epoch, %error, "no record of a rank is kept now");
            }
        }
    }

    /// Notices when the job's server is lost, and reclaims. Never ends.
    pub(super) async fn reclaim_when_lost(&self) -> Infallible {
        loop {
            let is_lost = timeout(SIGN_EVERY, self.client.job_waits()).await.is_ok();
            if !self.records.is_in_use() {
                continue;
            }
            match is_lost {
                false if self.client.job_term().is_some() => self.show_life(&self.records.ranks()).await,
                false => {}
                true if self.is_lost().await => self.reclaim().await,
                true => sleep(PAUSE_FIRST).await,
            }
        }
    }

    /// Sends a request that changes nothing. Its failure says that the job waits.
    async fn show_life(&self, ranks: &[(u32, u64)]) {
        for &(rank, epoch) in ranks {
            let Ok(loader) = self.loader.for_request() else { return };
            let acks = Acks { rank, loader: Some(loader), ..Acks::default() };
            let Ok(body) = to_json(&acks) else { return };
            let path = routes::epoch(&self.job.id, epoch, "acks");
            let client = self.client.within(CALL_WITHIN).fail_fast();
            let call = Call::new(Method::POST, path).json(body);
            if let Err(error) = client.json::<Acked>(&call, &[StatusCode::OK]).await {
                tracing::debug!(job = %self.job.name, rank, %error, "the job's server did not answer");
            }
        }
    }

    /// Returns whether a server says that the job's server is gone. A server that restarts keeps its jobs.
    ///
    /// Once a server has taken the job over for the first rank, only that one says so: the others name it.
    async fn is_lost(&self) -> bool {
        let client = self.client.routed().within(CALL_WITHIN).fail_fast();
        match client.of_all::<JobList>(routes::JOBS).await {
            Ok((lists, _)) => {
                let mut waiting = lists.iter().flat_map(|list| &list.waiting);
                waiting.any(|of| of.id == self.job.id && of.is_gone)
            }
            Err(error) => {
                tracing::debug!(job = %self.job.name, %error, "no server says where the job is");
                false
            }
        }
    }

    /// Says what this process consumed, until the job is served. If its server came back meanwhile, that one
    /// answers.
    async fn reclaim(&self) {
        let (began, mut pause) = (Instant::now(), PAUSE_FIRST);
        let mut logged: Option<Instant> = None;
        loop {
            match self.reclaim_all().await {
                Ok(Ended::Served) => return,
                Ok(Ended::NotNow) => pause = PAUSE_FIRST,
                Ok(Ended::WaitsFor(ranks)) if logged.is_none_or(|at| at.elapsed() > LOG_EVERY) => {
                    logged = Some(Instant::now());
                    tracing::warn!(
                        job = %self.job.name, ?ranks, waited = ?began.elapsed(),
                        "the job's server is lost; the job goes on when these ranks have said what they \
                         consumed"
                    );
                }
                Ok(Ended::WaitsFor(_)) => {}
                Err(error) => {
                    pause = PAUSE_MAX;
                    if logged.is_none_or(|at| at.elapsed() > LOG_EVERY) {
                        logged = Some(Instant::now());
                        tracing::warn!(
                            job = %self.job.name, %error, "the job's server is lost, and the job cannot go on"
                        );
                    }
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Reclaims once for each rank of this process.
    async fn reclaim_all(&self) -> Result<Ended, ClientError> {
        let mut waits_for = Vec::new();
        for report in self.records.report() {
            let rank = report.rank;
            let loader = Some(self.loader.for_request()?);
            let declaration =
                self.declaration.as_deref().filter(|spec| has_lists(spec)).cloned().map(Box::new);
            let ask = Reclaim { loader, declaration, ..report };
            let path = routes::job_reclaim(&self.job.id);
            let call = Call::new(Method::POST, path).json(to_json(&ask)?).in_time();
            let client = self.client.within(CALL_WITHIN).fail_fast();
            match client.json::<Reclaimed>(&call, &[StatusCode::OK]).await {
                Ok((_, answer)) if answer.waits_for.is_empty() => {
                    let term = self.client.job_term().unwrap_or(0);
                    self.records.reclaimed(rank, term, answer);
                    tracing::info!(job = %self.job.name, rank, term, "the job goes on at another server");
                }
                Ok((_, answer)) => waits_for = answer.waits_for,
                Err(error) if error.retryable() => {
                    tracing::debug!(job = %self.job.name, rank, %error, "the job cannot be reclaimed now");
                    return Ok(Ended::NotNow);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(if waits_for.is_empty() { Ended::Served } else { Ended::WaitsFor(waits_for) })
    }
}

/// Returns whether a declaration has lists, which the servers of a cluster do not tell each other.
fn has_lists(spec: &StartJob) -> bool {
    spec.plan.base != PlanBase::All || spec.buckets.is_some() || spec.replay.is_some()
}
