//! What this server knows of jobs and groups, and what follows from it. Waits for nothing.

use super::{
    GroupError, Owner,
    records::{GroupRecord, JobRecord, ranking_key, single_group},
};
use crate::cluster::{ClusterView, Keyed};
use fletch_core::{Domain, MemberId, Tenant};
use fletch_host::clock::BootTime;
use std::collections::{BTreeMap, BTreeSet};

/// This server, as groups name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Me {
    pub id: MemberId,
    pub incarnation: String,
}

impl Me {
    pub fn has(&self, group: &GroupRecord) -> bool {
        group.primary == self.id && group.incarnation == self.incarnation
    }
}

/// The keys below `jobs/`.
#[derive(Debug, Default)]
pub struct Table {
    /// The revision of the record of the cluster.
    pub cluster: u64,
    /// The revision up to which this server has seen all changes. 0: everything must be read.
    pub cursor: u64,
    /// Whether everything was read once.
    pub is_loaded: bool,
    /// The number of the server's tenure when everything was read last.
    pub tenure: u64,
    /// When etcd was heard of last.
    pub heard: Option<BootTime>,
    pub jobs: BTreeMap<String, Keyed<JobRecord>>,
    pub groups: BTreeMap<String, Keyed<GroupRecord>>,
    /// The groups of which etcd has a lower term than the record in `groups`, or nothing.
    pub behind: BTreeSet<String>,
}

/// Where a job is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobPlace {
    /// No server has declared it with the cluster.
    Unknown,
    /// This server has it.
    Here,
    /// This server has its group, and none of its ledgers.
    Lost,
    /// Another server has it, and is up.
    At(Owner),
    /// Another server has it, and is not up.
    Waits {
        owner: Owner,
        /// Whether it is neither up nor restarting.
        is_gone: bool,
        /// The server that may take the group over.
        successor: Option<Owner>,
    },
}

fn put<T>(map: &mut BTreeMap<String, Keyed<T>>, key: String, new: Keyed<T>) {
    if map.get(&key).is_none_or(|known| known.revision <= new.revision) {
        map.insert(key, new);
    }
}

fn remove<T>(map: &mut BTreeMap<String, Keyed<T>>, key: &str, revision: u64) {
    if map.get(key).is_some_and(|known| known.revision <= revision) {
        map.remove(key);
    }
}

impl Table {
    pub fn put_job(&mut self, id: String, revision: u64, value: JobRecord) {
        put(&mut self.jobs, id, Keyed { revision, value });
    }

    pub fn put_group(&mut self, group: String, revision: u64, value: GroupRecord) {
        put(&mut self.groups, group, Keyed { revision, value });
    }

    pub fn remove_job(&mut self, id: &str, revision: u64) {
        remove(&mut self.jobs, id, revision);
    }

    pub fn remove_group(&mut self, group: &str, revision: u64) {
        remove(&mut self.groups, group, revision);
    }

    /// Returns the revision of a job's key. 0: it has none.
    pub fn job_revision(&self, id: &str) -> u64 {
        self.jobs.get(id).map_or(0, |job| job.revision)
    }

    /// Returns the record of a job, for its tenant only (I7).
    pub fn job(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Option<&Keyed<JobRecord>> {
        self.jobs.get(id).filter(|j| j.value.record.tenant == *tenant && j.value.record.domain == *domain)
    }

    /// Returns where a group is. `None`: no server has claimed it.
    fn place_of_group(&self, me: &Me, view: &ClusterView, domain: &Domain, group: &str) -> Option<JobPlace> {
        let record = &self.groups.get(group)?.value;
        if me.has(record) {
            return Some(JobPlace::Here);
        }
        let GroupRecord { primary, incarnation, .. } = record;
        let owner = |url: Option<&str>| Owner { id: primary.clone(), url: url.map(str::to_owned) };
        if let Some(url) = view.url_of(primary, incarnation) {
            return Some(JobPlace::At(owner(Some(url))));
        }
        let first = view.first_for(&ranking_key(domain, group));
        let successor = first.map(|(id, url)| Owner { id: id.clone(), url: Some(url.to_owned()) });
        Some(JobPlace::Waits { owner: owner(None), is_gone: view.is_gone(primary, incarnation), successor })
    }

    /// Returns where a job of a tenant is.
    pub fn place_of(
        &self,
        me: &Me,
        view: &ClusterView,
        (domain, tenant): (&Domain, &Tenant),
        id: &str,
    ) -> JobPlace {
        let Some(job) = self.job(domain, tenant, id) else { return JobPlace::Unknown };
        let (group, term) = (&job.value.group, job.value.term);
        match self.place_of_group(me, view, domain, group) {
            None => JobPlace::Unknown,
            Some(JobPlace::Here) if self.groups.get(group).is_some_and(|g| g.value.term > term) => {
                JobPlace::Lost
            }
            Some(place) => place,
        }
    }

    /// Returns whether a group has a job other than this one.
    pub fn has_others(&self, group: &str, id: &str) -> bool {
        self.jobs.iter().any(|(other, job)| other != id && job.value.group == group)
    }

    /// Returns the group of a new job: that of its sweep, or its own if the server of that one has left, or
    /// came back without its state directory.
    pub fn group_of_new(
        &self,
        me: &Me,
        view: &ClusterView,
        domain: &Domain,
        (group, id): (&str, &str),
    ) -> String {
        // A server of that name that is there has another state directory: the one of the group is lost.
        let has_left =
            |owner: &Owner| view.core.ring().get(&owner.id).is_none() || !view.is_absent(&owner.id);
        match self.place_of_group(me, view, domain, group) {
            Some(JobPlace::Waits { is_gone: true, owner, .. })
                if has_left(&owner) && self.has_others(group, id) =>
            {
                single_group(id)
            }
            _ => group.to_owned(),
        }
    }

    /// Returns whether a group without jobs has a server that is gone, so that another one may claim it.
    pub fn is_abandoned(&self, view: &ClusterView, group: &str, id: &str) -> bool {
        let record = self.groups.get(group).map(|held| &held.value);
        record.is_some_and(|r| view.is_gone(&r.primary, &r.incarnation)) && !self.has_others(group, id)
    }

    /// Returns where a new job of a group belongs.
    pub fn place_of_new(
        &self,
        me: &Me,
        view: &ClusterView,
        domain: &Domain,
        (group, id): (&str, &str),
    ) -> JobPlace {
        match self.place_of_group(me, view, domain, group) {
            Some(place) if place == JobPlace::Here || !self.is_abandoned(view, group, id) => return place,
            _ => {}
        }
        match view.first_for(&ranking_key(domain, group)) {
            // Where nobody is up, this server is as good as any.
            None => JobPlace::Here,
            Some((id, _)) if *id == me.id => JobPlace::Here,
            Some((id, url)) => JobPlace::At(Owner { id: id.clone(), url: Some(url.to_owned()) }),
        }
    }

    /// Returns the number of jobs that wait for each server that is neither up nor restarting, and for this
    /// one, where it has none of their ledgers.
    pub fn waiting_for(&self, me: &Me, view: &ClusterView) -> BTreeMap<MemberId, u64> {
        let mut waiting = BTreeMap::new();
        for job in self.jobs.values() {
            let Some(group) = self.groups.get(&job.value.group) else { continue };
            let GroupRecord { term, primary, incarnation } = &group.value;
            let waits = match me.has(&group.value) {
                true => *term > job.value.term,
                false => view.is_gone(primary, incarnation),
            };
            if waits {
                *waiting.entry(primary.clone()).or_default() += 1;
            }
        }
        waiting
    }

    /// Returns the number of jobs and of groups that this server has.
    pub fn owned(&self, me: &Me) -> (u64, u64) {
        let is_mine = |group: &str| self.groups.get(group).is_some_and(|g| me.has(&g.value));
        let jobs = self.jobs.values().filter(|j| is_mine(&j.value.group)).count();
        (jobs as u64, self.groups.values().filter(|g| me.has(&g.value)).count() as u64)
    }
}

impl JobPlace {
    /// Returns an error for a job that this server cannot serve. `name` is what the caller calls it.
    pub fn check(self, name: &str) -> Result<(), GroupError> {
        let job = name.to_owned();
        match self {
            JobPlace::Unknown | JobPlace::Here => Ok(()),
            JobPlace::Lost => Err(GroupError::Lost { job }),
            JobPlace::At(owner) => Err(GroupError::Elsewhere { job, owner }),
            JobPlace::Waits { owner, is_gone, .. } => Err(GroupError::Waits { job, owner, is_gone }),
        }
    }
}
