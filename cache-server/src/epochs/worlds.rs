//! Worlds: who shares an epoch's steps, and how it goes over from one world to the next.

use super::{Epoch, Inner};
use crate::epochs::JobError;
use fletch_api::{EpochState, WorldSpec};
use fletch_core::{delivery::Event, plan::World};

/// The world of a job as the leases want it.
#[must_use]
pub fn world_of(world: &WorldSpec) -> World {
    World { batch: world.batch, ranks: world.ranks, tail: world.tail }
}

impl Epoch {
    /// Another world, from now on. The same one changes nothing.
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
                // All that was left may be what the new world leaves out.
                self.end_if_over(inner, &mut events);
            }
            let upto = self.ledger.append(&events);
            changed.map(|()| upto)?
        };
        self.changed.notify_waiters();
        self.ledger.durable(upto).await
    }

    /// Whether another world could begin now.
    ///
    /// # Errors
    /// [`JobError::MidStep`].
    pub fn may_become(&self, world: World) -> Result<(), JobError> {
        self.may_become_in(&self.lock(), world)
    }

    fn may_become_in(&self, inner: &Inner, world: World) -> Result<(), JobError> {
        if inner.state != EpochState::Open {
            return Ok(());
        }
        self.schedule.may_become(self.number(), &self.delivered(inner), inner.leases.world(), world)
    }

    pub(super) fn change_world(
        &self,
        inner: &mut Inner,
        world: World,
        events: &mut Vec<Event>,
    ) -> Result<(), JobError> {
        self.may_become_in(inner, world)?;
        if self.at_most_once() {
            self.deliver(inner, |_| true, events);
            if inner.state != EpochState::Open {
                return Ok(());
            }
        }
        let (event, back) = inner.leases.change_world(world)?;
        events.push(event);
        inner.order.came_back(&back);
        self.schedule.share(&mut inner.leases)?;
        inner.order.change_world(&self.schedule, &inner.leases)?;
        self.renew_prefetch(inner);
        inner.classes.clear();
        inner.widen();
        Ok(())
    }
}
