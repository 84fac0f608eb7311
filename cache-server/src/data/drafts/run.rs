//! One seal, from its turn to its end.

use super::{
    RunPlaces, index_on_a_thread,
    pages::DraftPages,
    problem_of,
    seals::{SealEnd, SealRecord, Seals},
    unix_ns,
};
use crate::{data::versions::Sources, tenancy::state::RegistrationHandle};
use fletch_api::{Code, Problem, RunState};
use fletch_core::{
    Root, TagName,
    manifest::{KeyRule, SampleRule},
};
use fletch_indexer::{
    failure::{Exit, Failure},
    progress::Mode,
    run::{
        options::{OnFault, RunFailure, RunOptions},
        renewed::RenewedPins,
    },
    source::{shard_dirs::shard_directories_of_draft, walk::Symlinks},
};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

/// The most objects that an error names.
const NAMED_MAX: usize = 3;

impl Seals {
    /// Seals a draft, when its turn comes.
    pub(super) async fn run(
        self: Arc<Self>,
        record: &Arc<SealRecord>,
        entry: &Arc<RegistrationHandle>,
        sources: Arc<Sources>,
    ) {
        let dataset = &entry.dataset.name;
        let sealed = match self.permits.acquire().await {
            Ok(_permit) => self.seal(record, entry, sources).await,
            Err(_) => Err(Failure::new("the server stops").exit(Exit::Interrupted).into()),
        };
        let (state, root, error) = match sealed {
            Ok(root) => (RunState::Done, Some(root), None),
            Err(failed) => {
                let (state, problem) = blocked_or_failed(failed, entry);
                (state, None, Some(problem))
            }
        };
        let [done, blocked, failed] = &self.ended;
        let count = match state {
            RunState::Done => done,
            RunState::Blocked => blocked,
            RunState::Failed | RunState::Running | RunState::Unknown => failed,
        };
        count.fetch_add(1, Relaxed);
        self.bytes_read.fetch_add(record.counters.bytes_read.load(Relaxed), Relaxed);
        match (&error, root) {
            (None, Some(root)) => {
                tracing::info!(%dataset, draft = %record.draft, %root, "a draft was sealed")
            }
            (error, _) => {
                let why = error.as_ref().map(|error| error.detail.as_str()).unwrap_or_default();
                tracing::warn!(%dataset, draft = %record.draft, error = why, "a draft was not sealed");
            }
        }
        let end = SealEnd { at: Instant::now(), at_ns: unix_ns(), state, root, error };
        *record.ended.lock() = Some(end);
    }

    async fn seal(
        &self,
        record: &SealRecord,
        entry: &Arc<RegistrationHandle>,
        sources: Arc<Sources>,
    ) -> Result<Root, RunFailure> {
        let options = self.options(entry, sources).await?;
        let (stop, counters) = (Arc::clone(&self.stop), Arc::clone(&record.counters));
        let report = index_on_a_thread(&self.context, options, stop, counters).await?;
        Ok(report.root.parse::<Root>().map_err(|e| Failure::new(e.to_string()))?)
    }

    async fn options(
        &self,
        entry: &Arc<RegistrationHandle>,
        sources: Arc<Sources>,
    ) -> Result<RunOptions, Failure> {
        let places = RunPlaces::of(&self.context, entry).await?;
        let draft = Arc::new(DraftPages { versions: Arc::clone(&self.context.versions), sources });
        // The rule of a draft says nothing: nobody has read its shards.
        let shard_dirs = shard_directories_of_draft(draft.clone()).await?;
        let key = if shard_dirs.is_empty() { KeyRule::File } else { KeyRule::Stem };
        Ok(RunOptions {
            uri: places.objects,
            to: places.tables,
            list: None,
            parent: None,
            renewed: RenewedPins::default(),
            learned: Some(draft.clone()),
            seal: Some(draft),
            draft: None,
            tag: Some(TagName::latest()),
            rule: SampleRule::new(key, Vec::new()),
            shard_dirs,
            allow_empty: true,
            symlinks: Symlinks::Keep,
            one_file_system: false,
            on_fault: OnFault::Report,
            allow_loss: None,
            threads: self.context.parallel,
            state_dir: places.scratch,
            progress: Mode::None,
        })
    }
}

/// Returns the state and the problem of a seal that made no version.
fn blocked_or_failed(failed: RunFailure, entry: &RegistrationHandle) -> (RunState, Problem) {
    let (RunFailure { failure, faults }, dataset) = (failed, &entry.dataset);
    if !faults.is_empty() {
        let named = faults.iter().take(NAMED_MAX).map(|fault| format!("{}: {}", fault.path, fault.why));
        let named = named.collect::<Vec<_>>().join("; ");
        let detail = match faults.len() {
            1 => format!("blocked: 1 object changed or cannot be read: {named}"),
            n => format!("blocked: {n} objects changed or cannot be read: {named}"),
        };
        let hint = format!("run `fletch refresh {}`, then seal again", dataset.name);
        return (RunState::Blocked, Problem::new(Code::OriginChanged, detail, hint));
    }
    let hint = format!(
        "seal again; or run `fletch index {}` where its objects can be read and {} can be written",
        dataset.uri, dataset.tables
    );
    (RunState::Failed, problem_of(failure, hint))
}
