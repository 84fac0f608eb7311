//! A job goes over from one world to the next: its file, and the epochs that are under way.

use super::{JobError, OpenJob, Record, blocking, can_be_kept, lock, world_of};
use fletch_api::WorldSpec;
use fletch_core::plan::World;
use std::sync::Arc;

impl OpenJob {
    /// Another world for this and all later epochs. The same changes nothing.
    ///
    /// # Errors
    /// [`JobError`].
    pub async fn change_world(self: &Arc<Self>, world: WorldSpec) -> Result<(), JobError> {
        world_of(&world).check()?;
        // Or the job would be refused when it is opened anew.
        can_be_kept(
            &self.setup.plan,
            self.setup.bucketed.as_ref(),
            world_of(&world),
            self.setup.context.ledger_bytes,
        )?;
        self.setup.replay.as_ref().map_or(Ok(()), |told| told.check(world_of(&world)))?;
        let this = Arc::clone(self);
        self.alone(async move { this.world_alone(world).await }).await
    }

    async fn world_alone(self: &Arc<Self>, world: WorldSpec) -> Result<(), JobError> {
        if self.setup.bucketed.is_some() {
            // An epoch may refuse: those that are not in memory are asked, too, and before anything changes.
            let this = Arc::clone(self);
            for n in blocking(move || this.on_disk()).await? {
                match self.epoch_alone(n, false).await {
                    Ok(epoch) => epoch.can_enter_world(world_of(&world))?,
                    // Of one that cannot be believed nothing is known that could refuse.
                    Err(e) if e.is_of_its_file() => {}
                    Err(e) => return Err(e),
                }
            }
        }
        if self.world_now() == world {
            return self.worlds(world_of(&world)).await;
        }
        // What the disk may refuse comes first; then the epochs, which may refuse because of what was acknowledged a moment
        // ago; then the file is the new one. After a crash in between the file's world is in force, and nobody was told of
        // another.
        let dir = self.dir.clone();
        let staged = blocking(move || {
            let mut record = Record::read(&dir)?;
            record.ask.world = world;
            record.stage(&dir)
        })
        .await?;
        let mut changed = self.worlds(world_of(&world)).await;
        if changed.is_ok() {
            changed = blocking(move || {
                let path = staged.path().to_owned();
                staged.commit().map_err(|error| JobError::Io { path, error })
            })
            .await;
        }
        match changed {
            Ok(()) => lock(&self.known).set_world(world),
            Err(_) => {
                if let Err(error) = self.worlds(world_of(&self.world_now())).await {
                    tracing::error!(job = %self.setup.job, %error, "an epoch stays in a world that was refused; put a world again");
                }
            }
        }
        changed
    }

    /// Changes the world of the epochs that are open. One whose ledger failed is read anew in the job's world.
    async fn worlds(&self, world: World) -> Result<(), JobError> {
        let open: Vec<_> = lock(&self.epochs).values().filter(|e| e.ledger().works()).cloned().collect();
        for epoch in open {
            epoch.enter_world(world).await?;
        }
        Ok(())
    }
}
