//! Changes of an epoch's world: other ranks, another batch.

use super::{Epoch, Inner};
use crate::training::epochs::JobError;
use fletch_api::{EpochState, WorldSpec};
use fletch_core::{delivery::Event, plan::World};

/// Returns the world that a request describes.
#[must_use]
pub fn world_of(world: &WorldSpec) -> World {
    World { batch: world.batch, ranks: world.ranks, tail: world.tail }
}

/// Returns a world as requests describe it.
#[must_use]
pub fn world_spec(world: World) -> WorldSpec {
    WorldSpec { batch: world.batch, ranks: world.ranks, tail: world.tail }
}

impl Epoch {
    /// Continues the epoch in another world. The same world changes nothing.
    ///
    /// # Errors
    /// [`JobError`].
    pub async fn enter_world(&self, world: World) -> Result<(), JobError> {
        let upto = {
            let mut inner = self.lock();
            let inner = &mut *inner;
            if inner.state != EpochState::Open || inner.leases.world() == world {
                return Ok(());
            }
            let mut events = self.expire_due(inner);
            let changed = self.change_world(inner, world, &mut events);
            if changed.is_ok() {
                // The new world may leave out everything that was left.
                self.end_if_over(inner, &mut events);
            }
            let upto = self.ledger.append(&events);
            changed.map(|()| upto)?
        };
        self.changed.notify_waiters();
        self.ledger.durable(upto).await
    }

    /// Checks whether the epoch could enter another world now.
    ///
    /// # Errors
    /// [`JobError::MidStep`].
    pub fn can_enter_world(&self, world: World) -> Result<(), JobError> {
        self.can_enter_world_in(&self.lock(), world)
    }

    fn can_enter_world_in(&self, inner: &Inner, world: World) -> Result<(), JobError> {
        if inner.state != EpochState::Open {
            return Ok(());
        }
        self.schedule.can_enter_world(self.number(), &self.delivered(inner), inner.leases.world(), world)
    }

    pub(super) fn change_world(
        &self,
        inner: &mut Inner,
        world: World,
        events: &mut Vec<Event>,
    ) -> Result<(), JobError> {
        self.can_enter_world_in(inner, world)?;
        if self.at_most_once() {
            self.deliver(inner, |_| true, events);
            if inner.state != EpochState::Open {
                return Ok(());
            }
        }
        let (event, back) = inner.leases.change_world(world)?;
        events.push(event);
        inner.sequence.take_back(&back);
        self.schedule.share(&mut inner.leases)?;
        inner.sequence.change_world(&self.schedule, &inner.leases)?;
        self.renew_prefetch(inner);
        inner.classes.clear();
        inner.add_ranks();
        Ok(())
    }
}
