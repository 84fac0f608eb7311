//! The hashes of the groups of long chunks that a run collects, for `groups.bin`.
//!
//! With them a server reads a small range of a long file from the origin without the rest of its chunk.
//! Nothing else depends on them, so a run whose scratch file fails goes on without.

use super::Run;
use super::state::RunState;
use crate::out::Out;
use fletch_tables::{GroupLists, TablesWriter, Version};
use std::sync::Arc;

/// The hashes that a run collects, or none.
#[derive(Clone, Default)]
pub struct RunGroups(Option<Arc<GroupLists>>);

impl RunGroups {
    /// Goes on with what an earlier run collected.
    #[must_use]
    pub fn open(state: &RunState, out: Out) -> Self {
        match GroupLists::open(&state.group_lists()) {
            Ok(lists) => RunGroups(Some(Arc::new(lists))),
            Err(error) => {
                out.warn(format_args!("hashes of groups are left out of the tables: {error}"));
                RunGroups(None)
            }
        }
    }

    /// The hashes so far. `None`: the run collects none.
    #[must_use]
    pub fn lists(&self) -> Option<&Arc<GroupLists>> {
        self.0.as_ref()
    }

    /// Has a writer keep what was collected.
    pub fn keep_in(&self, writer: &mut TablesWriter) {
        if let Some(lists) = &self.0 {
            writer.keep_groups(lists);
        }
    }

    /// Takes over from the parent what the run did not read itself.
    pub fn complete(&self, run: &Run<'_>, writers: &[&TablesWriter], parent: Option<&Version>) {
        let Some(lists) = &self.0 else { return };
        if let Some(parent) = parent {
            let without = writers.iter().flat_map(|writer| writer.chunks_without(lists)).collect();
            let copied = run.ctx.rt.block_on(parent.each_group_hashes(&without, |groups| lists.add(groups)));
            if let Err(error) = copied {
                run.ctx.out.warn(format_args!("hashes of groups are not taken over: {error}"));
            }
        }
        if let Some(error) = lists.finish() {
            run.ctx.out.warn(format_args!("hashes of groups are left out of the tables: {error}"));
        }
    }
}
