//! The part of the groups that waits: reads the keys from etcd, and writes changes.
//!
//! I1. Changes are noted in the order of revisions. After a watch that ended or was idle, and when a tenure
//!     begins, everything is read again.
//! I2. Every write compares the record of the cluster, so an etcd that was wiped gets none.

mod correction;
mod moving;
mod recovery;

use super::{
    GroupError, GroupStats, NewJob, detail,
    records::{
        GroupRecord, JobKey, JobRecord, group_key, group_of, job_key, job_text, parse_key, read_job,
        single_group,
    },
    table::{JobPlace, Me, Table},
    terms::Terms,
};
use crate::{
    cluster::{ClusterState, Event, Follower, KeyValue, Op, SharedKeys, from_text, to_text},
    training::{
        epochs::JobError,
        jobs::{Record, RecordSummary, Registry},
    },
};
use fletch_api::{TermStamp, WaitingJob};
use fletch_core::{Domain, MemberId, Tenant};
use fletch_host::clock::BootTime;
use fletch_host::replace::replace_file;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{Notify, watch},
    task::spawn_blocking,
    time::sleep,
};

/// How soon a failed read or write is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// How often a change that others overtook is tried.
const TRIES: usize = 8;
/// For how long a job waits for a server that stopped in good order. A restart takes less.
const RESTART_MAX: Duration = Duration::from_secs(10);
/// After this time without news of etcd, the watch is silently dead. It exceeds the time after which an idle
/// watch is opened anew.
const SILENT_AFTER: Duration = Duration::from_secs(40);
/// The file of the state directory that says to which cluster the jobs were brought.
const BROUGHT_FILE: &str = "jobs.cluster";

/// What this server did with groups.
#[derive(Debug, Default)]
struct Counts {
    claimed: AtomicU64,
    taken_over: AtomicU64,
    set_aside: AtomicU64,
    corrected: AtomicU64,
}

/// The groups, with what this server needs to change them.
pub struct Shared {
    of: SharedKeys,
    me: Me,
    cluster: Arc<ClusterState>,
    brought: PathBuf,
    table: Mutex<Table>,
    terms: Arc<Terms>,
    /// The servers that restart: since when jobs wait for them, and when one was asked for last.
    restarting: Mutex<BTreeMap<MemberId, (Instant, Instant)>>,
    counts: Counts,
    pub follower: Follower,
    pub changed: Notify,
    /// Held by whoever compares the jobs of this server's disk with the table.
    comparing: tokio::sync::Mutex<()>,
    /// Held by whoever writes jobs of groups that this server has: no group ends while it gets a job.
    writing: tokio::sync::Mutex<()>,
}

fn bad_record(kv: &KeyValue, why: String) -> GroupError {
    GroupError::Record(String::from_utf8_lossy(&kv.key).into_owned(), why)
}

fn put(key: String, value: Vec<u8>) -> Op {
    Op::Put { key, value, lease: 0 }
}

impl Shared {
    pub fn new(of: SharedKeys, incarnation: String, cluster: Arc<ClusterState>, state: &Path) -> Self {
        let me = Me { id: cluster.own_id().clone(), incarnation };
        Shared {
            of,
            me,
            cluster,
            brought: state.join(BROUGHT_FILE),
            table: Mutex::default(),
            terms: Arc::new(Terms::open(state)),
            restarting: Mutex::default(),
            counts: Counts::default(),
            follower: Follower::new("jobs"),
            changed: Notify::new(),
            comparing: tokio::sync::Mutex::default(),
            writing: tokio::sync::Mutex::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Whoever panicked leaves at worst an old revision, with which a transaction fails.
        self.table.lock()
    }

    pub fn stats(&self) -> GroupStats {
        let (jobs, groups) = self.table().owned(&self.me);
        let of = |count: &AtomicU64| count.load(Relaxed);
        let Counts { claimed, taken_over, set_aside, corrected } = &self.counts;
        GroupStats {
            jobs,
            groups,
            claimed: of(claimed),
            taken_over: of(taken_over),
            set_aside: of(set_aside),
            corrected: of(corrected),
        }
    }

    pub fn place_of(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<JobPlace, GroupError> {
        let view = self.cluster.view();
        let table = self.table();
        match table.is_loaded {
            true => Ok(self.with_patience(table.place_of(&self.me, &view, (domain, tenant), id))),
            false => Err(GroupError::NoCluster),
        }
    }

    /// Returns the place of a job. A server that restarts for long counts as gone.
    fn with_patience(&self, place: JobPlace) -> JobPlace {
        match place {
            JobPlace::Waits { owner, is_gone: false, successor } => {
                let (mut restarting, now) = (self.restarting.lock(), Instant::now());
                let wait = restarting.entry(owner.id.clone()).or_insert((now, now));
                // Whoever waits asks about once a second. Else this is another restart.
                let begun = if now - wait.1 > RESTART_MAX / 2 { now } else { wait.0 };
                *wait = (begun, now);
                JobPlace::Waits { owner, is_gone: now - begun > RESTART_MAX, successor }
            }
            place => place,
        }
    }

    /// Returns the number of jobs that wait for each lost server.
    pub fn waiting_for(&self) -> BTreeMap<MemberId, u64> {
        let view = self.cluster.view();
        self.table().waiting_for(&self.me, &view)
    }

    /// Returns the jobs of some tenants whose server is away, in the order of their names.
    pub fn waiting(&self, sees: impl Fn(&Domain, &Tenant) -> bool) -> Vec<WaitingJob> {
        let (view, table) = (self.cluster.view(), self.table());
        let mut waiting: Vec<WaitingJob> = table
            .jobs
            .iter()
            .filter_map(|(id, job)| {
                let record = &job.value.record;
                let of = (&record.domain, &record.tenant);
                if !sees(of.0, of.1) {
                    return None;
                }
                let place = table.place_of(&self.me, &view, of, id);
                let (server, is_gone) = match self.with_patience(place) {
                    JobPlace::Waits { owner, is_gone, .. } => (owner.id, is_gone),
                    JobPlace::Lost => (self.me.id.clone(), true),
                    JobPlace::Unknown | JobPlace::Here | JobPlace::At(_) => return None,
                };
                Some(WaitingJob {
                    id: id.clone(),
                    name: record.ask.name.clone(),
                    dataset: record.dataset.clone(),
                    root: record.root,
                    server: server.to_string(),
                    is_gone,
                    waits_for: Vec::new(),
                })
            })
            .collect();
        waiting.sort_by(|a, b| a.name.cmp(&b.name));
        waiting
    }

    /// Returns by which right this server answers for a job. See [`super::Groups::right`].
    pub fn right(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<Option<TermStamp>, GroupError> {
        let place = self.place_of(domain, tenant, id)?;
        let unproven = |why| Err(GroupError::Unproven { job: self.name_of(domain, tenant, id), why });
        if place == JobPlace::Unknown {
            return unproven("etcd does not know the job yet");
        }
        place.check(&self.name_of(domain, tenant, id))?;
        let Some(tenure) = self.cluster.tenure() else {
            return unproven("its lease in etcd was not renewed in time");
        };
        let (held, read_in, heard) = {
            let table = self.table();
            let job = table.job(domain, tenant, id);
            let group = job.and_then(|job| Some((&job.value.group, table.groups.get(&job.value.group)?)));
            let held = group.map(|(group, held)| (group.clone(), held.value.term));
            (held, table.tenure, table.heard)
        };
        if read_in != tenure.number {
            return unproven("it reads again which jobs it has");
        }
        if heard.is_none_or(|at| at.elapsed() > SILENT_AFTER) {
            return unproven("it has no news of etcd");
        }
        Ok(held.map(|(group, term)| TermStamp { group, term, valid: tenure.valid }))
    }

    /// Returns the record of a job of a tenant.
    pub fn job(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Option<JobRecord> {
        self.table().job(domain, tenant, id).map(|job| job.value.clone())
    }

    /// Returns the present term of a group, or 0 if the group is not known.
    pub fn term_of(&self, group: &str) -> u64 {
        self.table().groups.get(group).map_or(0, |held| held.value.term)
    }

    /// Returns the name of a tenant's job with its id, or only that if the job is not known.
    pub fn name_of(&self, domain: &Domain, tenant: &Tenant, id: &str) -> String {
        let table = self.table();
        match table.job(domain, tenant, id) {
            Some(job) => format!("{} ({id})", job.value.record.ask.name),
            None => id.to_owned(),
        }
    }

    pub fn place_of_new(&self, new: &NewJob<'_>) -> Result<JobPlace, GroupError> {
        let NewJob { domain, tenant, name, order, root, layout } = *new;
        let id = Record::id_of(domain, tenant, name);
        let known = self.place_of(domain, tenant, &id)?;
        if known != JobPlace::Unknown {
            return Ok(known);
        }
        let group = group_of(&id, domain, order, root, layout);
        let (view, table) = (self.cluster.view(), self.table());
        let group = table.group_of_new(&self.me, &view, domain, (&group, &id));
        Ok(table.place_of_new(&self.me, &view, domain, (&group, &id)))
    }

    /// Checks that etcd has the cluster that this server joined. Returns the revision of its record.
    async fn check_cluster(&self) -> Result<(u64, u64), GroupError> {
        let joined = self.cluster.uid().ok_or(GroupError::NoCluster)?;
        self.of.check_cluster(&joined).await?.ok_or(GroupError::NoCluster)
    }

    /// Notes what a key has. Where this server remembers a higher term of a group, that is in force.
    fn note(&self, table: &mut Table, kv: &KeyValue) -> Result<(), GroupError> {
        match parse_key(&self.of.keys, &kv.key) {
            JobKey::Group(group) => {
                let record = from_text(&kv.value).map_err(|why| bad_record(kv, why))?;
                self.note_group(table, group, kv.mod_revision, record);
                Ok(())
            }
            JobKey::Job(_) | JobKey::Unknown => self.read_key(table, kv),
        }
    }

    /// Notes what a key has, by no other record than this one.
    fn read_key(&self, table: &mut Table, kv: &KeyValue) -> Result<(), GroupError> {
        let bad = |why| bad_record(kv, why);
        match parse_key(&self.of.keys, &kv.key) {
            JobKey::Job(id) => {
                let job = read_job(kv, &id).map_err(bad)?;
                table.put_job(id, kv.mod_revision, job);
            }
            JobKey::Group(group) => {
                table.put_group(group, kv.mod_revision, from_text(&kv.value).map_err(bad)?);
            }
            JobKey::Unknown => {}
        }
        Ok(())
    }

    async fn read_all(&self) -> Result<(), GroupError> {
        // Before the read: a tenure that begins meanwhile needs another one.
        let tenure = self.cluster.tenures().map_or(0, |numbers| *numbers.borrow());
        let heard = Some(BootTime::now());
        let page = self.of.etcd.read_prefix(&self.of.keys.jobs()).await?;
        let (cluster, _) = self.check_cluster().await?;
        let is_loaded = self.table().is_loaded;
        let mut new = Table { cluster, cursor: page.revision, is_loaded, tenure, heard, ..Table::default() };
        for kv in &page.keys {
            self.note(&mut new, kv)?;
        }
        self.note_missing(&mut new);
        let mut table = self.table();
        if page.revision < table.cursor {
            // The watch has seen more meanwhile.
            (table.tenure, table.heard) = (tenure, heard);
            return Ok(());
        }
        // A write of this server may be newer than what was read. After a watch that ended, etcd may have
        // lost what it had, so that the revisions do not compare.
        let compares = table.cursor > 0;
        for (id, job) in &table.jobs {
            if compares && job.revision > page.revision {
                new.put_job(id.clone(), job.revision, job.value.clone());
            }
        }
        for (group, record) in &table.groups {
            if compares && record.revision > page.revision {
                new.put_group(group.clone(), record.revision, record.value.clone());
            }
        }
        *table = new;
        drop(table);
        // The watch passes by what was read here.
        self.changed.notify_one();
        Ok(())
    }

    /// Reads all jobs, and compares them with those of this server's disk.
    pub async fn load(&self, registry: &Registry) -> Result<(), GroupError> {
        self.read_all().await?;
        self.correct().await?;
        self.compare(registry).await?;
        self.table().is_loaded = true;
        Ok(())
    }

    /// Makes the jobs on this server's disk and those of the cluster agree.
    async fn compare(&self, registry: &Registry) -> Result<(), GroupError> {
        let _one = self.comparing.lock().await;
        let uid = self.cluster.uid().ok_or(GroupError::NoCluster)?;
        let path = self.brought.clone();
        let brought = spawn_blocking(move || std::fs::read_to_string(path).unwrap_or_default()).await;
        let is_first = brought.map_err(|_| JobError::TaskLost)?.trim() != uid;
        for own in registry.records() {
            let mut done = false;
            for _ in 0..TRIES {
                done = self.compare_one(registry, &own, is_first).await?;
                if done {
                    break;
                }
                self.read_all().await?;
            }
            if !done {
                return Err(GroupError::Contended);
            }
        }
        if is_first {
            let path = self.brought.clone();
            let written = spawn_blocking(move || replace_file(&path, format!("{uid}\n").as_bytes()));
            let failed = |error| JobError::Io { path: self.brought.clone(), error };
            written.await.map_err(|_| JobError::TaskLost)?.map_err(failed)?;
        }
        Ok(())
    }

    /// Compares one job. Returns whether that is done; if not, what was known of etcd is old.
    async fn compare_one(
        &self,
        registry: &Registry,
        own: &RecordSummary,
        is_first: bool,
    ) -> Result<bool, GroupError> {
        let id = own.id();
        let (known, group, holder) = {
            let table = self.table();
            let known = table.jobs.get(&id).cloned();
            let shared = group_of(&id, &own.domain, own.ask.order, own.root, own.layout);
            let group = known.as_ref().map_or(shared, |job| job.value.group.clone());
            let holder = table.groups.get(&group).cloned();
            (known, group, holder)
        };
        let is_mine = holder.as_ref().map(|held| self.me.has(&held.value));
        let (group, holder) = match (&known, is_mine) {
            (_, Some(true) | None) => (group, holder),
            // The sweep of its version is at another server. The job comes as a group of its own.
            (None, Some(false)) if is_first && group != single_group(&id) => {
                let group = single_group(&id);
                let holder = self.table().groups.get(&group).cloned();
                (group, holder)
            }
            (_, Some(false)) => (group, holder),
        };
        if let Some(held) = holder.as_ref().filter(|held| !self.me.has(&held.value)) {
            tracing::warn!(
                job = %own.ask.name, tenant = %own.tenant,
                primary = %held.value.primary, term = held.value.term,
                "another server has this job; its ledgers on this server are set aside"
            );
            registry.set_aside(&id).await?;
            self.counts.set_aside.fetch_add(1, Relaxed);
            return Ok(true);
        }
        let term = holder.as_ref().map_or(1, |held| held.value.term);
        // etcd may have forgotten in which term the ledgers came here.
        let of_ledgers = registry.ledger_term(&id).await;
        let term = known.as_ref().map_or(term, |job| job.value.term).max(of_ledgers);
        if term > of_ledgers {
            registry.keep_ledger_term(&id, term).await?;
        }
        let job = JobRecord { group: group.clone(), term, is_long: own.is_long, record: Record::clone(own) };
        if known.as_ref().is_some_and(|known| known.value == job) && holder.is_some() {
            return Ok(true);
        }
        if known.is_none() {
            tracing::info!(job = %own.ask.name, tenant = %own.tenant, "the cluster knows this job now");
        }
        self.write(&id, job, holder.map(|held| (held.revision, held.value))).await
    }

    /// Writes a job, and claims its group if this server is not its primary. Returns whether nobody else
    /// changed either.
    async fn write(
        &self,
        id: &str,
        job: JobRecord,
        holder: Option<(u64, GroupRecord)>,
    ) -> Result<bool, GroupError> {
        let _one = self.writing.lock().await;
        let (cluster, revision) = {
            let table = self.table();
            (table.cluster, table.job_revision(id))
        };
        let (key, of_group) = (job_key(&self.of.keys, id), group_key(&self.of.keys, &job.group));
        let seen = holder.as_ref().map_or(0, |held| held.0);
        let compare = [(self.of.keys.cluster(), cluster), (key.clone(), revision), (of_group.clone(), seen)];
        let mut ops = vec![put(key, job_text(&job))];
        let claims = holder.as_ref().is_none_or(|held| !self.me.has(&held.1));
        let Me { id: primary, incarnation } = self.me.clone();
        let claim = GroupRecord { term: job.term, primary, incarnation };
        if claims {
            ops.push(put(of_group, to_text(&claim)));
        }
        let done = self.of.etcd.transact(&compare, &ops).await?;
        if !done.succeeded {
            return Ok(false);
        }
        {
            let mut table = self.table();
            if claims {
                self.note_group(&mut table, job.group.clone(), done.revision, claim);
                self.counts.claimed.fetch_add(1, Relaxed);
            }
            table.put_job(id.to_owned(), done.revision, job);
        }
        self.persist_terms().await?;
        Ok(true)
    }

    /// Records a new job of this server.
    pub async fn record(&self, own: RecordSummary) -> Result<(), GroupError> {
        let id = own.id();
        for _ in 0..TRIES {
            let (job, holder) = {
                let (view, table) = (self.cluster.view(), self.table());
                let known = table.jobs.get(&id);
                let of_new = || {
                    let shared = group_of(&id, &own.domain, own.ask.order, own.root, own.layout);
                    table.group_of_new(&self.me, &view, &own.domain, (&shared, &id))
                };
                let group = known.map_or_else(of_new, |job| job.value.group.clone());
                let holder = table.groups.get(&group).map(|held| (held.revision, held.value.clone()));
                let term = match &holder {
                    None => 1,
                    Some((_, held)) if self.me.has(held) => held.term,
                    Some((_, held)) if known.is_none() && table.is_abandoned(&view, &group, &id) => {
                        held.term + 1
                    }
                    Some(_) => return Err(GroupError::Contended),
                };
                // A job that waits for a state stays so until it has one.
                let term = known.map_or(term, |job| job.value.term);
                (JobRecord { group, term, is_long: own.is_long, record: Record::clone(&own) }, holder)
            };
            if self.write(&id, job, holder).await? {
                return Ok(());
            }
            self.read_all().await?;
        }
        Err(GroupError::Contended)
    }

    /// Makes this server the primary of a job's group, if the present one is gone and this one is the next.
    pub async fn take_over(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<(), GroupError> {
        for _ in 0..TRIES {
            let JobPlace::Waits { is_gone: true, successor, .. } = self.place_of(domain, tenant, id)? else {
                return Ok(());
            };
            let name = self.name_of(domain, tenant, id);
            match successor {
                Some(successor) if successor.id != self.me.id => {
                    return Err(GroupError::Elsewhere { job: name, owner: successor });
                }
                _ => {}
            }
            let (group, held, cluster) = {
                let table = self.table();
                let job = table.job(domain, tenant, id).ok_or(JobError::NotFound)?;
                let group = job.value.group.clone();
                let held = table.groups.get(&group).cloned().ok_or(GroupError::Contended)?;
                (group, held, table.cluster)
            };
            let Me { id: primary, incarnation } = self.me.clone();
            let new = GroupRecord { term: held.value.term + 1, primary, incarnation };
            let key = group_key(&self.of.keys, &group);
            let mut compare = vec![(self.of.keys.cluster(), cluster), (key.clone(), held.revision)];
            if held.value.primary != self.me.id && self.cluster.view().is_absent(&held.value.primary) {
                // It is not up: the view of this server may be old.
                compare.push((self.of.keys.member(&held.value.primary), 0));
            }
            let done = self.of.etcd.transact(&compare, &[put(key, to_text(&new))]).await?;
            if done.succeeded {
                tracing::warn!(
                    group, term = new.term, from = %held.value.primary,
                    "this server takes over a group of jobs: a rank or a saved state came for one of them"
                );
                self.counts.taken_over.fetch_add(1, Relaxed);
                self.note_group(&mut self.table(), group, done.revision, new);
                return self.persist_terms().await;
            }
            self.read_all().await?;
            sleep(RETRY_AFTER).await;
        }
        Err(GroupError::Contended)
    }

    /// Says that a job has its ledgers here.
    pub async fn revived(&self, registry: &Registry, id: &str) -> Result<(), GroupError> {
        for _ in 0..TRIES {
            let (job, holder) = {
                let table = self.table();
                let job = table.jobs.get(id).ok_or(JobError::NotFound)?;
                let held = table.groups.get(&job.value.group).ok_or(GroupError::Contended)?;
                if !self.me.has(&held.value) {
                    return Err(GroupError::Contended);
                }
                let job = JobRecord { term: held.value.term, ..job.value.clone() };
                (job, (held.revision, held.value.clone()))
            };
            let term = job.term;
            if self.write(id, job, Some(holder)).await? {
                return Ok(registry.keep_ledger_term(id, term).await?);
            }
            self.read_all().await?;
        }
        Err(GroupError::Contended)
    }

    pub async fn delete(
        &self,
        registry: &Registry,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
    ) -> Result<(), GroupError> {
        self.take_over(domain, tenant, id).await?;
        match self.place_of(domain, tenant, id)? {
            JobPlace::Lost => {}
            place => place.check(&self.name_of(domain, tenant, id))?,
        }
        let _one = self.comparing.lock().await;
        let mut had_key = false;
        for _ in 0..TRIES {
            let Some(known) = self.table().job(domain, tenant, id).cloned() else { break };
            had_key = true;
            if self.delete_keys(id, &known.value.group, known.revision).await? {
                break;
            }
            self.read_all().await?;
        }
        match registry.delete(domain, tenant, id).await {
            Err(JobError::NotFound) if had_key => Ok(()),
            done => Ok(done?),
        }
    }

    /// Deletes the key of a job, and that of its group if it was the last job of it. A group that was at
    /// another server before keeps its key: the term tells that server.
    async fn delete_keys(&self, id: &str, group: &str, revision: u64) -> Result<bool, GroupError> {
        let _one = self.writing.lock().await;
        let key = job_key(&self.of.keys, id);
        let (cluster, held, is_last) = {
            let table = self.table();
            (table.cluster, table.groups.get(group).cloned(), !table.has_others(group, id))
        };
        let Some(held) = held.filter(|held| self.me.has(&held.value)) else {
            return Err(GroupError::Contended);
        };
        let of_group = group_key(&self.of.keys, group);
        let compare =
            [(self.of.keys.cluster(), cluster), (key.clone(), revision), (of_group.clone(), held.revision)];
        let mut ops = vec![Op::Delete { key }];
        let ends_group = is_last && held.value.term == 1;
        if ends_group {
            ops.push(Op::Delete { key: of_group });
        }
        let done = self.of.etcd.transact(&compare, &ops).await?;
        if done.succeeded {
            let mut table = self.table();
            table.remove_job(id, done.revision);
            if ends_group {
                table.remove_group(group, done.revision);
            }
        }
        Ok(done.succeeded)
    }

    /// Notes changes that etcd announces. Returns whether a group changed.
    async fn execute(&self, events: Vec<Event>) -> Result<bool, GroupError> {
        let cursor = self.table().cursor;
        let new: Vec<Event> = events.into_iter().filter(|e| e.kv.mod_revision > cursor).collect();
        let Some(revision) = new.iter().map(|e| e.kv.mod_revision).max() else { return Ok(false) };
        if new.iter().any(Event::is_delete) {
            self.check_cluster().await?;
        }
        let mut table = self.table();
        let mut groups = BTreeSet::new();
        for event in &new {
            let key = parse_key(&self.of.keys, &event.kv.key);
            if let JobKey::Group(group) = &key {
                groups.insert(group.clone());
            }
            match key {
                JobKey::Job(id) if event.is_delete() => table.remove_job(&id, event.kv.mod_revision),
                JobKey::Group(group) if event.is_delete() => {
                    table.remove_group(&group, event.kv.mod_revision)
                }
                _ => self.note(&mut table, &event.kv)?,
            }
        }
        self.note_missing(&mut table);
        table.cursor = revision;
        let is_other = |group: &String| table.groups.get(group).is_some_and(|held| !self.me.has(&held.value));
        Ok(groups.iter().any(is_other))
    }

    pub async fn run(&self, registry: &Registry) {
        let follow = async {
            loop {
                let Err(error) = self.follow(registry).await else { continue };
                let needs_person = matches!(error, GroupError::Record(..) | GroupError::Job(_));
                self.follower.failed(&detail(&error), needs_person);
                sleep(RETRY_AFTER).await;
            }
        };
        let push = async {
            loop {
                self.changed.notified().await;
                while let Err(error) = self.compare(registry).await {
                    tracing::debug!(error = %detail(&error), "the record of a job is written again");
                    sleep(RETRY_AFTER).await;
                }
            }
        };
        tokio::join!(follow, push);
    }

    async fn follow(&self, registry: &Registry) -> Result<(), GroupError> {
        let Some(mut tenures) = self.cluster.tenures() else { return Err(GroupError::NoCluster) };
        tenures.mark_unchanged();
        // The watch may have missed changes, also where etcd has the same revision as before.
        self.table().cursor = 0;
        self.load(registry).await?;
        self.follower.reached();
        self.watch(registry, &mut tenures).await
    }

    /// Executes changes until the watch ends or is idle, or a tenure begins: another server may have had the
    /// groups before it.
    async fn watch(&self, registry: &Registry, tenures: &mut watch::Receiver<u64>) -> Result<(), GroupError> {
        let (prefix, from) = (self.of.keys.jobs(), self.table().cursor + 1);
        let mut watch = self.of.etcd.watch_from(&prefix, from).await?;
        loop {
            let news = tokio::select! {
                news = watch.next() => news?,
                _ = tenures.changed() => None,
            };
            let Some(events) = news else { return Ok(()) };
            self.table().heard = Some(BootTime::now());
            let is_elsewhere = self.execute(events).await?;
            self.correct().await?;
            if is_elsewhere {
                self.compare(registry).await?;
            }
        }
    }
}
