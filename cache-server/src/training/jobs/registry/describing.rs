//! Jobs whose server is away: what their declaration says.

use super::Registry;
use crate::{
    data::versions::{Source, Sources},
    training::{
        epochs::JobError,
        jobs::{OpenJob, Record, record::is_long, settings::StoredSettings},
    },
};
use fletch_api::{Job, StartJob};
use std::sync::Arc;

impl Registry {
    /// Returns a job that the cluster knows, without its epochs. Nothing is written, and nothing is loaded.
    ///
    /// `lacks_lists`: the record lacks the lists of the declaration, which `ask` has.
    ///
    /// # Errors
    /// [`JobError::Differs`]: the job has other settings than `ask`. And those of [`Registry::declare`].
    pub async fn describe(
        &self,
        (mut known, lacks_lists): (Record, bool),
        ask: StartJob,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
    ) -> Result<Job, JobError> {
        let asked = Record { ask: StartJob { world: known.ask.world, ..ask }, ..known.clone() };
        if lacks_lists {
            let StartJob { plan, buckets, replay, .. } = asked.ask.clone();
            (known.ask.plan, known.ask.buckets, known.ask.replay) = (plan, buckets, replay);
        }
        if let Some(what) = known.clone().known().header_mismatch(&asked.known()) {
            return Err(JobError::Differs { name: known.ask.name.to_string(), what });
        }
        let charges = self.reserve(&known)?;
        let (_, samples) = self.samples(&known.domain, source).await?;
        let permit = self.permit_for_long(is_long(&known.ask)).await;
        let settings = Arc::new(StoredSettings::of_new(&self.dir.join(known.id())));
        let kept = (charges, settings);
        let (opened, permit): (OpenJob, _) =
            self.open_record(known, kept, permit, (samples, None), (sources, source)).await?;
        let described = Job { is_away: true, ..opened.view_with(Vec::new()) };
        drop(permit);
        Ok(described)
    }
}
