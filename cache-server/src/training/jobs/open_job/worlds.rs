//! Change of a job's world: its record, and the epochs that are open.

use super::{JobError, OpenJob, Record, blocking, check_ledger_size, world_of};
use fletch_api::WorldSpec;
use fletch_core::plan::World;
use std::sync::Arc;

impl OpenJob {
    /// Changes the world of this and all later epochs. The same world changes nothing.
    ///
    /// # Errors
    /// [`JobError`].
    pub async fn change_world(self: &Arc<Self>, world: WorldSpec) -> Result<(), JobError> {
        world_of(&world).check()?;
        // Otherwise the job would be rejected when it is opened anew.
        check_ledger_size(
            &self.setup.plan,
            self.setup.bucketed.as_ref(),
            world_of(&world),
            self.setup.context.ledger_bytes,
        )?;
        if self.current_world() != world {
            self.setup.check_state_bytes(1)?;
        }
        self.setup.replay.as_ref().map_or(Ok(()), |told| told.check(world_of(&world)))?;
        let this = Arc::clone(self);
        self.exclusively(async move { this.change_world_exclusively(world).await }).await?;
        self.open_ranks();
        Ok(())
    }

    async fn change_world_exclusively(self: &Arc<Self>, world: WorldSpec) -> Result<(), JobError> {
        if self.setup.bucketed.is_some() {
            // An epoch may reject the change. Those that are not in memory are asked, too, before anything
            // changes.
            let this = Arc::clone(self);
            for n in blocking(move || this.epochs_on_disk()).await? {
                match self.epoch_exclusively(n, false).await {
                    Ok(epoch) => epoch.can_enter_world(world_of(&world))?,
                    // A damaged epoch cannot reject the change.
                    Err(e) if e.is_file_damage() => {}
                    Err(e) => return Err(e),
                }
            }
        }
        if self.current_world() == world {
            return self.enter_world_in_open_epochs(world_of(&world)).await;
        }
        // First the write that the disk may refuse, then the epochs, which may reject the change because of
        // an ack that arrived a moment ago, then the rename. After a crash in between the record's world is
        // in force, and no client was told of another.
        let dir = self.dir.clone();
        let staged = blocking(move || {
            let mut record = Record::read(&dir)?;
            record.ask.world = world;
            record.stage(&dir)
        })
        .await?;
        let mut changed = self.enter_world_in_open_epochs(world_of(&world)).await;
        if changed.is_ok() {
            changed = blocking(move || {
                let path = staged.path().to_owned();
                staged.commit().map_err(|error| JobError::Io { path, error })
            })
            .await;
        }
        match changed {
            Ok(()) => self.known.lock().set_world(world),
            Err(_) => {
                if let Err(error) = self.enter_world_in_open_epochs(world_of(&self.current_world())).await {
                    tracing::error!(
                        job = %self.setup.job, %error,
                        "an epoch stays in a rejected world; PUT a world again"
                    );
                }
            }
        }
        changed
    }

    /// Changes the world of the open epochs. An epoch whose ledger failed is opened anew in the job's world.
    async fn enter_world_in_open_epochs(&self, world: World) -> Result<(), JobError> {
        let open: Vec<_> = self.epochs.lock().values().filter(|e| e.ledger().works()).cloned().collect();
        for epoch in open {
            epoch.enter_world(world).await?;
        }
        Ok(())
    }
}
