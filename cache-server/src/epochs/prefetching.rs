//! What is fetched ahead of an epoch whose order is known: begun by its first grant, kept in step with its leases.

use super::{Epoch, Inner, sequence::Sequence};
use crate::prefetch::{Prefetcher, UpcomingReads};
use fletch_core::plan::Bits;
use std::sync::Arc;

impl Epoch {
    /// What is fetched ahead of its readers, if anything is.
    #[must_use]
    pub fn prefetcher(&self) -> Option<Arc<Prefetcher>> {
        self.lock().prefetcher.clone()
    }

    /// Begins to fetch ahead, unless that goes on, or cannot be.
    pub(super) fn start_prefetch(&self, inner: &mut Inner) {
        if inner.prefetcher.is_some() || !self.setup.context.prefetch.pool.has_room() {
            return;
        }
        let Some((schedule, done)) = self.upcoming_reads(inner) else { return };
        let Self { setup, .. } = self;
        inner.prefetcher = Prefetcher::start(
            &setup.context.prefetch,
            &setup.samples,
            &setup.exact,
            setup.block,
            schedule,
            done,
        );
    }

    /// The order goes on otherwise.
    pub(super) fn renew_prefetch(&self, inner: &mut Inner) {
        if let (Some(prefetcher), Some((schedule, done))) = (&inner.prefetcher, self.upcoming_reads(inner)) {
            prefetcher.renew(schedule, done);
        }
    }

    /// Lets go of what nobody comes for.
    pub(super) fn close_idle_prefetch(&self, inner: &mut Inner) {
        let alive = inner.leases.live().next().is_some();
        if let Some(prefetcher) = inner.prefetcher.take_if(|a| a.idle(alive)) {
            prefetcher.close();
        }
    }

    /// What is still to come, in its order, and which entries are granted or delivered already.
    fn upcoming_reads(&self, inner: &Inner) -> Option<(UpcomingReads, Bits)> {
        let Sequence::Strict(turns) = &inner.order else { return None };
        let super::Schedule::Strict(strict) = &self.schedule else { return None };
        let (turns, strict) = (turns.clone(), Arc::clone(strict));
        let free = inner.leases.free();
        let mut done = Bits::ones(free.len());
        free.iter_in(0, free.len()).for_each(|e| {
            done.clear(e);
        });
        let places = turns.len();
        let at = move |q| turns.at(&strict, q).map(|entry| (entry, strict.item(entry).sample));
        Some((UpcomingReads { places, at: Box::new(at) }, done))
    }
}
