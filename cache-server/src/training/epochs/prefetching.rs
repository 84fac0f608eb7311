//! Prefetch for an epoch in strict order: begins with the first grant and follows the leases.

use super::{Epoch, Inner, sequence::Sequence};
use crate::training::prefetch::{Prefetcher, UpcomingReads};
use fletch_core::plan::Bits;
use std::sync::Arc;

impl Epoch {
    /// Returns the prefetcher, if one runs.
    #[must_use]
    pub fn prefetcher(&self) -> Option<Arc<Prefetcher>> {
        self.lock().prefetcher.clone()
    }

    /// Starts a prefetcher, unless one runs or no memory is free.
    pub(super) fn start_prefetch(&self, inner: &mut Inner) {
        if inner.prefetcher.is_some() || !self.setup.context.prefetch.pool.has_room() {
            return;
        }
        let Some((schedule, done)) = self.upcoming_reads(inner) else { return };
        let Self { setup, .. } = self;
        let Some(costs) = self.costs.get() else { return };
        inner.prefetcher = Prefetcher::start(
            &setup.context.prefetch,
            (&setup.tenant, costs),
            &setup.samples,
            &setup.exact,
            setup.block,
            schedule,
            done,
        );
    }

    /// Tells the prefetcher that the order continues differently.
    pub(super) fn renew_prefetch(&self, inner: &mut Inner) {
        if let (Some(prefetcher), Some((schedule, done))) = (&inner.prefetcher, self.upcoming_reads(inner)) {
            prefetcher.renew(schedule, done);
        }
    }

    /// Closes a prefetcher whose epoch nobody reads.
    pub(super) fn close_idle_prefetch(&self, inner: &mut Inner) {
        let alive = inner.leases.live().next().is_some();
        if let Some(prefetcher) = inner.prefetcher.take_if(|a| a.idle(alive)) {
            prefetcher.close();
        }
    }

    /// Returns the reads to come, in order, and the entries that are granted or delivered already.
    fn upcoming_reads(&self, inner: &Inner) -> Option<(UpcomingReads, Bits)> {
        let Sequence::Strict(turns) = &inner.sequence else { return None };
        let super::Schedule::Strict(strict) = &self.schedule else { return None };
        let (turns, strict) = (turns.clone(), Arc::clone(strict));
        let free = inner.leases.free();
        let mut done = Bits::ones(free.len());
        free.iter_in(0, free.len()).for_each(|e| {
            done.clear(e);
        });
        let positions = turns.len();
        let at = move |q| turns.at(&strict, q).map(|entry| (entry, strict.item(entry).sample));
        Some((UpcomingReads { positions, at: Box::new(at) }, done))
    }
}
