//! What a rank acknowledged in an epoch, for a process that begins to read as this rank.

use super::{Epoch, JobError};
use fletch_api::UnknownRanks;
use fletch_core::delivery::{Ledger, Loss, lease::LeaseError, reclaim::RankRecord};
use std::{fs::File, io::Read as _, sync::Arc};
use tokio::task::spawn_blocking;

impl Epoch {
    /// Returns the record of a rank. All that it has is durable.
    ///
    /// # Errors
    /// [`JobError::Lease`] for a rank that the world does not have, and what the ledger says.
    pub async fn rank_record(self: &Arc<Self>, rank: u32) -> Result<Vec<u8>, JobError> {
        let ranks = self.lock().leases.world().ranks;
        if rank >= ranks {
            return Err(LeaseError::Rank { rank, ranks }.into());
        }
        let upto = self.ledger.len();
        self.ledger.durable(upto).await?;
        let this = Arc::clone(self);
        spawn_blocking(move || this.read_rank_record(rank, upto)).await.map_err(|_| JobError::TaskLost)?
    }

    fn read_rank_record(&self, rank: u32, upto: u64) -> Result<Vec<u8>, JobError> {
        let path = self.ledger.path();
        let failed = |error| JobError::Io { path: path.to_owned(), error };
        let bad = |why| JobError::Damaged { path: path.to_owned(), why };
        let mut bytes = Vec::new();
        File::open(path).and_then(|file| file.take(upto).read_to_end(&mut bytes)).map_err(failed)?;
        let read = Ledger::read(&bytes).map_err(bad)?;
        drop(bytes);
        let record = RankRecord::begin(&read, self.schedule.planned(), rank).map_err(bad)?;
        Ok(record.to_bytes(rank))
    }

    /// Returns the ranks for which nobody knew what they had consumed, by loss of the job's server.
    #[must_use]
    pub fn unknown_ranks(&self) -> Vec<UnknownRanks> {
        let inner = self.lock();
        let losses = inner.losses.iter().filter(|loss| !loss.unknown.is_empty());
        let of =
            |loss: &Loss| UnknownRanks { epoch: self.number(), term: loss.term, ranks: loss.unknown.clone() };
        losses.map(of).collect()
    }

    /// Returns the leases of a rank that live.
    #[must_use]
    pub fn leases_of(&self, rank: u32) -> Vec<u64> {
        self.lock().leases.live().filter(|l| l.request.rank == rank).map(|l| l.id).collect()
    }
}
