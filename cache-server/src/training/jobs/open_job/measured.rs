//! What is measured of a job: what cache is worth to it, and what it is to the division of the disk.

use super::{JobError, OpenJob};
use crate::{
    data::versions::Home,
    training::{
        allocation::{Measured, RUNNING_FOR, Reader},
        benefit::{PROBE_STEPS, Served},
    },
};
use fletch_api::benefit::JobBenefit;
use fletch_core::manifest::LayoutKind;
use std::sync::Arc;

impl OpenJob {
    /// Returns what cache is worth to the job, as far as its acks tell.
    #[must_use]
    pub fn benefit(&self) -> JobBenefit {
        let (data, tables) = (self.source.data.home(), self.source.tables.home());
        let mut origins = vec![data.reads()];
        if !Arc::ptr_eq(data, tables) {
            origins.push(tables.reads());
        }
        self.setup.window.benefit(&Served { origins, disk: &self.setup.context.disk_reads })
    }

    /// Begins a probe of the job's latest epoch.
    ///
    /// # Errors
    /// [`JobError`], if there is none or it cannot be probed.
    pub fn probe(&self) -> Result<(), JobError> {
        let refused = |why: &str| Err(JobError::NoProbe(why.to_owned()));
        if self.setup.sweep.is_none() {
            return refused("its order decides which samples it gets");
        }
        let last = self.epochs.lock().last_key_value().map(|(_, epoch)| Arc::clone(epoch));
        let Some(last) = last else { return refused("it has no epoch under way") };
        // A probe ends by acks that carry times.
        if let Some(why) = self.benefit().not_measured {
            return refused(&why);
        }
        self.setup.window.begin_probe(last.probe(PROBE_STEPS as u64)?);
        Ok(())
    }

    /// Returns whether the job has a live lease, or began or acknowledged something lately.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let last = self.setup.window.last_ack().unwrap_or(self.opened).max(self.opened);
        last.elapsed() < RUNNING_FOR || self.has_leases()
    }

    /// Returns the name of the link over which the job's content comes, and the home at its end.
    pub(in crate::training::jobs) fn link(&self) -> (String, Arc<Home>) {
        // A pack lies beside the tables, and files that are not packed lie at the dataset.
        let packed = self.source.version.layout_doc().params.kind == LayoutKind::Pack;
        let home = if packed { self.source.tables.home() } else { self.source.data.home() };
        // One bucket or server has one link, however many datasets lie there.
        let link = home.uri().top().map_or_else(|| home.uri().to_string(), |top| top.to_string());
        (link, Arc::clone(home))
    }

    /// Returns the job as the allocation sees it. `bandwidth` returns what a link carries, in bytes a second.
    pub fn reader(&self, bandwidth: impl FnOnce(&str) -> Option<f64>) -> Reader {
        let (setup, record, benefit) = (&self.setup, self.known(), self.benefit());
        let measured = benefit.estimate.map(|e| Measured {
            rate: e.rate,
            most_rate: e.most_rate,
            sample_bytes: e.sample_bytes,
            verdict: e.verdict,
            parts: [e.compute, e.preparation, e.fetch],
            cached: e.cached,
            origin_rate: e.origin_rate,
            disk_rate: e.disk_rate,
        });
        let sources = &self.sources;
        let swept = sources.version_ids_in(&self.source).sweep;
        let units = setup.samples.unit_map.units().max(1) as u64;
        let (link, _) = self.link();
        Reader {
            id: record.id(),
            name: record.ask.name.clone(),
            tenant: setup.tenant.clone(),
            domain: sources.domain.clone(),
            dataset: record.dataset.clone(),
            // An ordered epoch over a version that a sweep serves hits what the sweep keeps.
            shares: if setup.sweep.is_some() { vec![swept] } else { vec![setup.exact.dataset_id(), swept] },
            is_strict: setup.sweep.is_none(),
            is_first_pass: self.epochs.lock().keys().next_back().is_none_or(|&epoch| epoch == 0),
            settings: self.settings.get(),
            unit_bytes: setup.samples.unit_map.total_bytes() / units,
            bandwidth: bandwidth(&link),
            link,
            measured,
        }
    }
}
