//! Groups that their primary gives to another server while it is up.

use super::{RETRY_AFTER, Shared, TRIES, put};
use crate::cluster::{
    groups::{
        GroupError,
        records::{GroupRecord, group_key, ranking_key},
        table::JobPlace,
    },
    to_text,
};
use fletch_core::{Domain, MemberId, Tenant};
use std::time::Instant;
use tokio::time::{Duration, sleep};

impl Shared {
    /// Returns the ids of the jobs that share the group of a job.
    pub fn jobs_with(&self, id: &str) -> Vec<String> {
        let table = self.table();
        let Some(group) = table.jobs.get(id).map(|job| job.value.group.clone()) else { return Vec::new() };
        table.jobs.iter().filter(|(_, job)| job.value.group == group).map(|(id, _)| id.clone()).collect()
    }

    /// Returns a job of each group that this server has to give away, and the member that gets it: all of its
    /// groups, once it was taken out of the ring.
    pub fn to_give(&self) -> Vec<(String, MemberId)> {
        let view = self.cluster.view();
        if !view.core.ring().drained().contains(&self.me.id) {
            return Vec::new();
        }
        let table = self.table();
        let mut jobs = Vec::new();
        for (name, held) in table.groups.iter().filter(|(_, held)| self.me.has(&held.value)) {
            let first = table.jobs.iter().find(|(_, job)| job.value.group == *name);
            let Some((id, job)) = first.filter(|(_, job)| job.value.term >= held.value.term) else {
                continue;
            };
            match view.first_for(&ranking_key(&job.value.record.domain, name)) {
                Some((to, _)) if *to != self.me.id => jobs.push((id.clone(), to.clone())),
                _ => {}
            }
        }
        jobs
    }

    /// Returns whether a job, of any tenant, came to this server without its ledgers.
    pub fn lacks_ledgers(&self, id: &str) -> bool {
        let (view, table) = (self.cluster.view(), self.table());
        let Some(job) = table.jobs.get(id) else { return false };
        let of = (&job.value.record.domain, &job.value.record.tenant);
        table.place_of(&self.me, &view, of, id) == JobPlace::Lost
    }

    /// Lets no ledger be set aside while the value lives.
    pub async fn hold_still(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.comparing.lock().await
    }

    /// Makes another member that is up the primary of a job's group.
    pub async fn give(&self, id: &str, to: &MemberId) -> Result<(), GroupError> {
        for _ in 0..TRIES {
            let view = self.cluster.view();
            let incarnation = view.incarnation_of(to).ok_or_else(|| GroupError::NoMember(to.to_string()))?;
            let (group, held, cluster) = {
                let table = self.table();
                let group = table.jobs.get(id).map(|job| job.value.group.clone());
                let group = group.ok_or(GroupError::Contended)?;
                let held = table.groups.get(&group).cloned();
                let held = held.filter(|held| self.me.has(&held.value)).ok_or(GroupError::Contended)?;
                (group, held, table.cluster)
            };
            let (term, primary) = (held.value.term + 1, to.clone());
            let new = GroupRecord { term, primary, incarnation: incarnation.to_owned() };
            let key = group_key(&self.of.keys, &group);
            let compare = [(self.of.keys.cluster(), cluster), (key.clone(), held.revision)];
            let done = self.of.etcd.transact(&compare, &[put(key, to_text(&new))]).await?;
            if done.succeeded {
                tracing::info!(group, term, %to, "this server gave a group of jobs to another one");
                self.note_group(&mut self.table(), group, done.revision, new);
                return self.persist_terms().await;
            }
            self.read_all().await?;
        }
        Err(GroupError::Contended)
    }

    /// Waits until this server knows that it has a job, whose ledgers another one gives it.
    pub async fn await_given(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
        within: Duration,
    ) -> Result<(), GroupError> {
        let began = Instant::now();
        loop {
            match self.place_of(domain, tenant, id)? {
                JobPlace::Lost => return Ok(()),
                place if began.elapsed() > within => {
                    place.check(&self.name_of(domain, tenant, id))?;
                    return Err(GroupError::Contended);
                }
                _ => {}
            }
            self.read_all().await?;
            sleep(RETRY_AFTER / 5).await;
        }
    }
}
