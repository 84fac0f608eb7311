//! The processes that read as the ranks of an open job. `jobs/loaders.rs` decides; this file applies it.

use super::{JobError, OpenJob};
use crate::training::jobs::loaders::{Admitted, Refusal, Sign};
use fletch_api::{Acks, JobLoaders, LeaseRequest, Loader};

impl OpenJob {
    /// Admits a lease request, or says which process its rank belongs to.
    ///
    /// # Errors
    /// [`JobError::RankInUse`], [`JobError::RankTaken`], [`JobError::RankWaits`], [`JobError::BadLoader`].
    pub fn admit_lease(&self, ask: &LeaseRequest) -> Result<(), JobError> {
        if let Some(loader) = &ask.loader
            && loader.leave
        {
            return Err(JobError::BadLoader("a request for a lease cannot give the rank up".to_owned()));
        }
        self.admit(ask.rank, ask.loader.as_ref(), Sign::Uses)
    }

    /// Admits a request of acks and renewals, or says which process its rank belongs to.
    ///
    /// # Errors
    /// As [`OpenJob::admit_lease`].
    pub fn admit_acks(&self, ask: &Acks) -> Result<(), JobError> {
        let sign = match (ask.acks.is_empty(), ask.renew.is_empty()) {
            (false, _) => Sign::Uses,
            (true, false) => Sign::Renews,
            (true, true) => Sign::None,
        };
        self.admit(ask.rank, ask.loader.as_ref(), sign)
    }

    fn admit(&self, rank: u32, loader: Option<&Loader>, sign: Sign) -> Result<(), JobError> {
        if let Some(loader) = loader {
            loader.check().map_err(JobError::BadLoader)?;
        }
        let ranks = self.current_world().ranks;
        let times = (self.setup.now_ms(), self.setup.ttl_ms());
        // Held until the leases of a former loader have ended: none of the new one ends with them.
        let mut loaders = self.loaders.lock();
        let refusal = match loaders.admit((rank, ranks), loader, sign, times) {
            Ok(Admitted::Goes) => return Ok(()),
            Ok(Admitted::TookOver { from }) => {
                let by = loader.map(ToString::to_string).unwrap_or_default();
                tracing::warn!(
                    job = %self.setup.job, rank, %from, %by,
                    "another process took over a rank; the leases of the former one end"
                );
                self.end_leases_of(rank);
                return Ok(());
            }
            Err(refusal) => refusal,
        };
        let job = self.setup.job.clone();
        Err(match refusal {
            Refusal::InUse { by } => JobError::RankInUse { job, rank, by },
            Refusal::Taken { by } => JobError::RankTaken { job, rank, by },
            Refusal::Waits { by, left } => JobError::RankWaits { job, rank, by, left },
        })
    }

    /// Ends the leases of a rank whose loader gives it up, so that the next process need not wait for them.
    pub fn leave(&self, rank: u32, loader: &Loader) {
        let mut loaders = self.loaders.lock();
        if loaders.leave(rank, &loader.id) {
            tracing::info!(job = %self.setup.job, rank, %loader, "a process gave its rank up");
            self.end_leases_of(rank);
        }
    }

    /// Opens every rank to the next process that asks: the job returned to a state, or changed its world.
    pub(super) fn open_ranks(&self) {
        self.loaders.lock().open_all();
    }

    fn end_leases_of(&self, rank: u32) {
        let epochs: Vec<_> = self.epochs.lock().values().cloned().collect();
        epochs.iter().for_each(|epoch| epoch.end_leases_of(rank));
    }

    /// Returns the loaders as the API shows them.
    pub(super) fn loaders_view(&self) -> JobLoaders {
        self.loaders.lock().view(self.setup.now_ms())
    }
}
