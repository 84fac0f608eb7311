//! Writes jobs and groups back to an etcd that lost its keys.
//!
//! Every server writes what it knows, in any order: of two records the one of the higher term stays. So the
//! result does not depend on who writes first.

use super::{Shared, TRIES};
use crate::{
    cluster::{
        Op, RecoverError, RecoveryMark,
        groups::{
            detail,
            records::{GroupRecord, JobRecord, group_key, group_of, job_key, job_text, single_group},
            table::{Me, Table},
        },
        to_text,
    },
    training::jobs::{Record, RecordSummary, Registry},
};
use std::collections::BTreeMap;

/// A job of this server's disk, and the term in which its ledgers came here.
pub(super) struct OwnJob {
    id: String,
    of_ledgers: u64,
    known: RecordSummary,
}

/// What is to be written: records of higher terms than those in etcd.
#[derive(Debug, Default)]
pub(super) struct Plan {
    jobs: BTreeMap<String, JobRecord>,
    groups: BTreeMap<String, GroupRecord>,
}

impl Plan {
    /// Returns what is missing in `there`. `known`: what this server knew of etcd. `own`: its own jobs.
    pub(super) fn new(
        me: &Me,
        known: &Table,
        terms: Vec<(String, GroupRecord)>,
        own: &[OwnJob],
        there: &Table,
    ) -> Self {
        let mut plan = Plan::default();
        let groups = known.groups.iter().map(|(group, held)| (group.clone(), held.value.clone()));
        for (group, held) in groups.chain(terms) {
            plan.add_group(there, group, held);
        }
        for (id, job) in &known.jobs {
            plan.add_job(there, id, job.value.clone());
        }
        for OwnJob { id, of_ledgers, known: summary } in
            own.iter().filter(|o| !known.jobs.contains_key(&o.id))
        {
            let shared = group_of(id, &summary.domain, summary.ask.order, summary.root, summary.layout);
            let is_elsewhere = |plan: &Plan, group: &str| match plan.holder(there, group) {
                Some(held) => !me.has(held),
                None => false,
            };
            let group = if is_elsewhere(&plan, &shared) { single_group(id) } else { shared };
            if is_elsewhere(&plan, &group) {
                // The ledgers here are of an earlier term.
                continue;
            }
            let term = plan.holder(there, &group).map_or(1, |held| held.term).max(*of_ledgers);
            let Me { id: primary, incarnation } = me.clone();
            plan.add_group(there, group.clone(), GroupRecord { term, primary, incarnation });
            let record = Record::clone(summary);
            plan.add_job(there, id, JobRecord { group, term, is_long: summary.is_long, record });
        }
        plan
    }

    fn holder<'a>(&'a self, there: &'a Table, group: &str) -> Option<&'a GroupRecord> {
        self.groups.get(group).or_else(|| there.groups.get(group).map(|held| &held.value))
    }

    fn add_group(&mut self, there: &Table, group: String, record: GroupRecord) {
        if self.holder(there, &group).is_none_or(|held| held.term < record.term) {
            self.groups.insert(group, record);
        }
    }

    fn add_job(&mut self, there: &Table, id: &str, record: JobRecord) {
        let held = self.jobs.get(id).or_else(|| there.jobs.get(id).map(|held| &held.value));
        if held.is_none_or(|held| held.term < record.term) {
            self.jobs.insert(id.to_owned(), record);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.groups.is_empty()
    }
}

impl Shared {
    async fn own_jobs(&self, registry: &Registry) -> Vec<OwnJob> {
        let mut own = Vec::new();
        for known in registry.records() {
            let id = known.id();
            own.push(OwnJob { of_ledgers: registry.ledger_term(&id).await, id, known });
        }
        own
    }

    /// Returns the ids and names of the jobs that this server knows or has.
    pub fn held_jobs(&self, registry: &Registry) -> BTreeMap<String, String> {
        let mut jobs: BTreeMap<String, String> =
            registry.records().iter().map(|own| (own.id(), own.ask.name.to_string())).collect();
        let table = self.table();
        jobs.extend(table.jobs.iter().map(|(id, job)| (id.clone(), job.value.record.ask.name.to_string())));
        jobs
    }

    /// Writes every job and group of which etcd has a lower term, or nothing.
    pub async fn write_back(&self, registry: &Registry, mark: RecoveryMark) -> Result<(), RecoverError> {
        let own = self.own_jobs(registry).await;
        for _ in 0..TRIES {
            let page = self.of.etcd.read_prefix(&self.of.keys.jobs()).await?;
            let mut there = Table::default();
            for kv in &page.keys {
                let read = self.read_key(&mut there, kv);
                read.map_err(|e| RecoverError::Part(self.me.id.to_string(), detail(&e)))?;
            }
            let plan = Plan::new(&self.me, &self.table(), self.terms.all(), &own, &there);
            if plan.is_empty() {
                return Ok(());
            }
            let put = |key, value| Op::Put { key, value, lease: 0 };
            let groups = plan.groups.into_iter().map(|(group, record)| {
                let seen = there.groups.get(&group).map_or(0, |held| held.revision);
                (put(group_key(&self.of.keys, &group), to_text(&record)), Some(seen))
            });
            let jobs = plan.jobs.into_iter().map(|(id, record)| {
                let seen = there.job_revision(&id);
                (put(job_key(&self.of.keys, &id), job_text(&record)), Some(seen))
            });
            // What others wrote meanwhile is read again.
            self.of.write_back(mark, groups.chain(jobs).collect()).await?;
        }
        Err(RecoverError::Overtaken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Keyed;
    use fletch_api::StartJob;
    use fletch_core::{Domain, MemberId, Tenant};

    fn me(id: &str) -> Me {
        Me { id: MemberId::new(id).expect("a name"), incarnation: format!("of-{id}") }
    }

    fn group(term: u64, of: &str) -> GroupRecord {
        let Me { id, incarnation } = me(of);
        GroupRecord { term, primary: id, incarnation }
    }

    fn own(name: &str, order: &str, of_ledgers: u64) -> OwnJob {
        let text = format!(
            r#"{{"name":"{name}","dataset":"set","seed":1,"order":"{order}",
                "world":{{"ranks":1,"batch":8,"tail":"drop"}}}}"#
        );
        let ask: StartJob = serde_json::from_str(&text).expect("JSON");
        let record = Record {
            domain: Domain::new("a").expect("name"),
            tenant: Tenant::new("t").expect("name"),
            dataset: ask.dataset.clone().expect("named"),
            ask,
            root: "7".repeat(64).parse().expect("a root"),
            layout: "8".repeat(64).parse().expect("a layout"),
        };
        let id = record.id();
        OwnJob { id, of_ledgers, known: record.known() }
    }

    /// Writes a plan into the etcd of the model.
    fn write(there: &mut Table, plan: Plan) {
        for (group, value) in plan.groups {
            there.groups.insert(group, Keyed { revision: 1, value });
        }
        for (id, value) in plan.jobs {
            there.jobs.insert(id, Keyed { revision: 1, value });
        }
    }

    #[test]
    fn the_highest_term_wins_whoever_writes_first() {
        // `a` has ledgers of term 1. The job moved to `b`, and `c` has seen that.
        let of_a = [own("run", "strict", 1)];
        let of_b = [own("run", "strict", 2)];
        let name = single_group(&of_a[0].id);
        let moved = vec![(name.clone(), group(2, "b"))];
        let nothing = Table::default();
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]] {
            let mut there = Table::default();
            for who in order {
                let plan = match who {
                    0 => Plan::new(&me("a"), &nothing, Vec::new(), &of_a, &there),
                    1 => Plan::new(&me("b"), &nothing, moved.clone(), &of_b, &there),
                    _ => Plan::new(&me("c"), &nothing, moved.clone(), &[], &there),
                };
                write(&mut there, plan);
            }
            assert_eq!(there.groups[&name].value, group(2, "b"), "{order:?}");
            assert_eq!(there.jobs[&of_a[0].id].value.term, 2, "{order:?}");
            assert!(Plan::new(&me("a"), &nothing, Vec::new(), &of_a, &there).is_empty(), "{order:?}");
        }
    }

    #[test]
    fn a_job_whose_sweep_is_elsewhere_stays_a_group_of_its_own() {
        let (first, second) = ([own("one", "substitute", 1)], [own("two", "substitute", 1)]);
        let (nothing, mut there) = (Table::default(), Table::default());
        for (id, own) in [("a", &first), ("b", &second)] {
            let plan = Plan::new(&me(id), &nothing, Vec::new(), own, &there);
            write(&mut there, plan);
        }
        let of = |own: &[OwnJob]| there.jobs[&own[0].id].value.group.clone();
        assert!(of(&first).starts_with("sweep-") && of(&second) == single_group(&second[0].id));
        assert!(me("b").has(&there.groups[&of(&second)].value));
    }
}
