//! What is fetched ahead of an epoch whose order is known: begun by its first grant, kept in step with its leases.

use super::{Epoch, Inner, Order};
use crate::jobs::ahead::{Ahead, Course};
use fletch_core::plan::Bits;
use std::sync::Arc;

impl Epoch {
    /// What is fetched ahead of its readers, if anything is.
    #[must_use]
    pub fn ahead(&self) -> Option<Arc<Ahead>> {
        self.lock().ahead.clone()
    }

    /// Begins to fetch ahead, unless that goes on, or cannot be.
    pub(super) fn foresee(&self, inner: &mut Inner) {
        if inner.ahead.is_some() || !self.setup.means.ahead.has_room() {
            return;
        }
        let Some((course, done)) = self.course(inner) else { return };
        let Self { setup, .. } = self;
        inner.ahead = Ahead::start(&setup.means, &setup.samples, &setup.exact, setup.block, course, done);
    }

    /// The order goes on otherwise.
    pub(super) fn foresee_anew(&self, inner: &mut Inner) {
        if let (Some(ahead), Some((course, done))) = (&inner.ahead, self.course(inner)) {
            ahead.renew(course, done);
        }
    }

    /// Lets go of what nobody comes for.
    pub(super) fn rest_if_idle(&self, inner: &mut Inner) {
        let alive = inner.leases.live().next().is_some();
        if let Some(ahead) = inner.ahead.take_if(|a| a.idle(alive)) {
            ahead.close();
        }
    }

    /// What is still to come, in its order, and which entries are granted or delivered already.
    fn course(&self, inner: &Inner) -> Option<(Course, Bits)> {
        let Order::Strict(turns) = &inner.order else { return None };
        let super::Course::Strict(strict) = &self.course else { return None };
        let (turns, strict) = (turns.clone(), Arc::clone(strict));
        let free = inner.leases.free();
        let mut done = Bits::ones(free.len());
        free.iter_in(0, free.len()).for_each(|e| {
            done.clear(e);
        });
        let places = turns.len();
        let at = move |q| turns.at(&strict, q).map(|entry| (entry, strict.item(entry).sample));
        Some((Course { places, at: Box::new(at) }, done))
    }
}
