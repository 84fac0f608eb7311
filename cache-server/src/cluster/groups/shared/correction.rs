//! Writes terms back that etcd has forgotten, because a backup of it was restored.
//!
//! Every server does so with what it remembers. Terms only grow, so the highest one wins, in whatever order
//! the servers write.

use super::{Shared, put};
use crate::{
    cluster::{
        groups::{
            GroupError,
            records::{GroupRecord, group_key},
            table::Table,
        },
        to_text,
    },
    training::epochs::JobError,
};
use std::sync::{Arc, atomic::Ordering::Relaxed};
use tokio::task::spawn_blocking;

/// How often a correction that others overtook is tried.
const TRIES: usize = 8;

impl Shared {
    /// Notes the record of a group that etcd has by a revision. Where this server remembers a higher term,
    /// that record is in force.
    pub(super) fn note_group(&self, table: &mut Table, group: String, revision: u64, told: GroupRecord) {
        let in_force = match self.terms.note(&group, &told) {
            Some(known) => {
                table.behind.insert(group.clone());
                known
            }
            None => {
                table.behind.remove(&group);
                told
            }
        };
        table.put_group(group, revision, in_force);
    }

    /// Notes groups that etcd does not have, although they have moved: such a key is never deleted.
    pub(super) fn note_missing(&self, table: &mut Table) {
        for (group, known) in self.terms.all() {
            if !table.groups.contains_key(&group) {
                table.behind.insert(group.clone());
                table.put_group(group, 0, known);
            }
        }
    }

    /// Makes the terms durable that were noted.
    pub(super) async fn persist_terms(&self) -> Result<(), GroupError> {
        if !self.terms.is_new() {
            return Ok(());
        }
        let terms = Arc::clone(&self.terms);
        let persisted = spawn_blocking(move || terms.persist()).await.map_err(|_| JobError::TaskLost)?;
        Ok(persisted.map_err(|(path, error)| JobError::Io { path, error })?)
    }

    /// Writes back every group of which etcd has a lower term than this server remembers, or nothing.
    pub(super) async fn correct(&self) -> Result<(), GroupError> {
        self.persist_terms().await?;
        for _ in 0..TRIES {
            let (behind, cluster) = {
                let table = self.table();
                let of = |group: &String| table.groups.get(group).map(|held| (group.clone(), held.clone()));
                (table.behind.iter().filter_map(of).collect::<Vec<_>>(), table.cluster)
            };
            if behind.is_empty() {
                return Ok(());
            }
            let mut was_overtaken = false;
            for (group, held) in behind {
                let key = group_key(&self.of.keys, &group);
                let compare = [(self.of.keys.cluster(), cluster), (key.clone(), held.revision)];
                let done = self.of.etcd.transact(&compare, &[put(key, to_text(&held.value))]).await?;
                if !done.succeeded {
                    was_overtaken = true;
                    continue;
                }
                tracing::warn!(
                    group, term = held.value.term, primary = %held.value.primary,
                    "etcd had forgotten who has this group of jobs; this server wrote it back"
                );
                self.counts.corrected.fetch_add(1, Relaxed);
                let mut table = self.table();
                table.behind.remove(&group);
                table.put_group(group, done.revision, held.value);
            }
            if was_overtaken {
                self.read_all().await?;
            }
        }
        Err(GroupError::Contended)
    }
}
